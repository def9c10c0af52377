"""Encodings by name: what a layer builds when it is given a name instead of an encoding."""

from typing import Literal, TypeAlias, get_args

from attnconv._errors import bad
from attnconv.encodings.absolute import Absolute
from attnconv.encodings.base import Encoding
from attnconv.encodings.learned import LearnedRelative, LearnedRelativeContent
from attnconv.encodings.positions import LearnedPositions, SinusoidalPositions
from attnconv.encodings.quadratic import GeneralizedQuadratic, Quadratic
from attnconv.encodings.relative import Relative

EncodingName: TypeAlias = Literal[
    "quadratic",
    "quadratic-generalized",
    "learned",
    "learned-content",
    "sinusoidal",
    "absolute-sinusoidal",
    "absolute-learned",
]
TABLE_SIZE = 16  # positions per axis that a table learned by name covers, as in the paper's models

ENCODING_NAMES: tuple[str, ...] = get_args(EncodingName)


def encoding_named(name: str, in_channels: int, heads: int, dims: int) -> Encoding:
    """A new encoding by name, for an image of `in_channels`; learned tables cover 16 positions per axis.

    Raises:
        ValueError: There is no encoding of that name.
    """
    match name:
        case "quadratic":
            return Quadratic(heads, dims)
        case "quadratic-generalized":
            return GeneralizedQuadratic(heads, dims)
        case "learned":
            return LearnedRelative(heads, dims, channels=in_channels, max_shift=TABLE_SIZE - 1)
        case "learned-content":
            return LearnedRelativeContent(in_channels, heads, dims, max_shift=TABLE_SIZE - 1)
        case "sinusoidal":
            return Relative(in_channels, heads, dims)
        case "absolute-sinusoidal":
            return Absolute(in_channels, heads, dims, positions=SinusoidalPositions(in_channels, dims))
        case "absolute-learned":
            return Absolute(in_channels, heads, dims, positions=LearnedPositions(in_channels, (TABLE_SIZE,) * dims))
    raise ValueError(bad("encoding", f"must be an Encoding or one of {', '.join(ENCODING_NAMES)}", repr(name)))
