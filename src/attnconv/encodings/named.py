"""Encodings by name: what a layer builds when it is given a name instead of an encoding."""

from collections.abc import Callable, Mapping
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

_MAKERS: Mapping[str, Callable[[int, int, int], Encoding]] = {
    "quadratic": lambda channels, heads, dims: Quadratic(heads, dims),
    "quadratic-generalized": lambda channels, heads, dims: GeneralizedQuadratic(heads, dims),
    "learned": lambda channels, heads, dims: LearnedRelative(
        heads, dims, channels=channels, max_shift=TABLE_SIZE - 1
    ),
    "learned-content": lambda channels, heads, dims: LearnedRelativeContent(
        channels, heads, dims, max_shift=TABLE_SIZE - 1
    ),
    "sinusoidal": lambda channels, heads, dims: Relative(channels, heads, dims),
    "absolute-sinusoidal": lambda channels, heads, dims: Absolute(
        channels, heads, dims, positions=SinusoidalPositions(channels, dims)
    ),
    "absolute-learned": lambda channels, heads, dims: Absolute(
        channels, heads, dims, positions=LearnedPositions(channels, (TABLE_SIZE,) * dims)
    ),
}
ENCODING_NAMES: tuple[str, ...] = get_args(EncodingName)


def encoding_named(name: str, in_channels: int, heads: int, dims: int) -> Encoding:
    """A new encoding by name, for an image of `in_channels`; learned tables cover 16 positions per axis.

    Raises:
        ValueError: There is no encoding of that name.
    """
    if name not in _MAKERS:
        raise ValueError(bad("encoding", f"must be an Encoding or one of {', '.join(_MAKERS)}", repr(name)))
    return _MAKERS[name](in_channels, heads, dims)
