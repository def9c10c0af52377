"""Registry of encodings by name; importing it does not import torch."""

from typing import Literal, TypeAlias, get_args

from attnconv import encodings
from attnconv._util.errors import bad

EncodingName: TypeAlias = Literal[
    "quadratic",
    "quadratic-generalized",
    "learned",
    "learned-content",
    "sinusoidal",
    "absolute-sinusoidal",
    "absolute-learned",
]
ENCODING_NAMES: tuple[EncodingName, ...] = get_args(EncodingName)


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
) -> "encodings.Encoding":
    """Create an encoding by name.

    Arguments that the encoding does not use are ignored; the defaults are those of the paper.

    Args:
        name: One of `ENCODING_NAMES`.
        in_channels: Number of channels of the image.
        heads: Number of heads.
        dims: Number of axes.
        key_channels: Length of each head's queries and keys; None for in_channels.
        max_shift: Largest shift in the tables of learned relative encodings, in positions.
        positions: Number of positions per axis in the table of a learned absolute encoding.
        centre_std: Standard deviation of the initial centres of quadratic encodings, in positions.
        spread_std: Standard deviation of the initial inverse widths s = sqrt(2 alpha) of heads, in 1 / position.

    Raises:
        ValueError: If the name is unknown, or an argument is out of range.
    """
    match name:
        case "quadratic":
            return encodings.Quadratic(heads, dims, centre_std=centre_std, spread_std=spread_std)
        case "quadratic-generalized":
            return encodings.GeneralizedQuadratic(heads, dims, centre_std=centre_std, spread_std=spread_std)
        case "learned":
            return encodings.LearnedRelative(heads, dims, channels=in_channels, max_shift=max_shift)
        case "learned-content":
            return encodings.LearnedRelativeContent(
                in_channels, heads, dims, head_channels=key_channels, max_shift=max_shift
            )
        case "sinusoidal":
            return encodings.Relative(in_channels, heads, dims, head_channels=key_channels)
        case "absolute-sinusoidal":
            sinusoids = encodings.SinusoidalPositions(in_channels, dims)
            return encodings.Absolute(in_channels, heads, dims, positions=sinusoids, head_channels=key_channels)
        case "absolute-learned":
            table = encodings.LearnedPositions(in_channels, (positions,) * dims)
            return encodings.Absolute(in_channels, heads, dims, positions=table, head_channels=key_channels)
    raise ValueError(bad("encoding", f"must be an Encoding or one of {', '.join(ENCODING_NAMES)}", repr(name)))
