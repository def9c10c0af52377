"""Encodings by name: what a layer or a model builds when it is given a name instead of an encoding."""

from attnconv._util.errors import bad
from attnconv.encodings.absolute import Absolute
from attnconv.encodings.base import Encoding
from attnconv.encodings.learned_relative import LearnedRelative, LearnedRelativeContent
from attnconv.encodings.quadratic import GeneralizedQuadratic, Quadratic
from attnconv.encodings.registry_names import ENCODING_NAMES
from attnconv.encodings.sinusoidal_and_learned_positions import LearnedPositions, SinusoidalPositions
from attnconv.encodings.transformer_xl import Relative


def encoding_named(
    name: str,
    in_channels: int,
    heads: int,
    dims: int,
    *,
    key_channels: int | None = None,
    max_shift: int = 15,
    positions: int = 16,
    centre_std: float = 2.0,
    spread_std: float = 0.01,
) -> Encoding:
    """A new encoding by name. The sizes are those of the paper's models; an encoding takes the ones that it has.

    Args:
        name: One of `ENCODING_NAMES`.
        in_channels: Channels of the image.
        heads: Number of heads.
        dims: Number of axes.
        key_channels: Channels of each head's query and key; None for in_channels.
        max_shift: Largest shift with a row of its own in learned tables, in positions.
        positions: Positions per axis of the image that a table of absolute positions is made for.
        centre_std: Deviation of the centres that quadratic encodings start from, in positions.
        spread_std: Deviation of their spreads around 1.

    Raises:
        ValueError: There is no encoding of that name, or it does not fit the sizes.
    """
    match name:
        case "quadratic":
            return Quadratic(heads, dims, centre_std=centre_std, spread_std=spread_std)
        case "quadratic-generalized":
            return GeneralizedQuadratic(heads, dims, centre_std=centre_std, spread_std=spread_std)
        case "learned":
            return LearnedRelative(heads, dims, channels=in_channels, max_shift=max_shift)
        case "learned-content":
            return LearnedRelativeContent(in_channels, heads, dims, head_channels=key_channels, max_shift=max_shift)
        case "sinusoidal":
            return Relative(in_channels, heads, dims, head_channels=key_channels)
        case "absolute-sinusoidal":
            sinusoids = SinusoidalPositions(in_channels, dims)
            return Absolute(in_channels, heads, dims, positions=sinusoids, head_channels=key_channels)
        case "absolute-learned":
            table = LearnedPositions(in_channels, (positions,) * dims)
            return Absolute(in_channels, heads, dims, positions=table, head_channels=key_channels)
    raise ValueError(bad("encoding", f"must be an Encoding or one of {', '.join(ENCODING_NAMES)}", repr(name)))
