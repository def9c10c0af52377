"""Encodings by name."""

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
    """A new encoding by name; each uses the arguments that it has. Defaults are those of the paper's models.

    Args:
        name: One of `ENCODING_NAMES`.
        in_channels: Channels of the image.
        heads: Number of heads.
        dims: Number of axes.
        key_channels: Channels of each head's query and key; None for in_channels.
        max_shift: Largest shift with its own row in learned tables.
        positions: Positions per axis in a table of absolute positions.
        centre_std: Standard deviation of the initial centres of quadratic encodings, in positions.
        spread_std: Standard deviation of their initial spreads around 1.

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
