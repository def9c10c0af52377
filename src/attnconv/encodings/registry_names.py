"""The names of the encodings, free of torch: the command line and settings need no more than them."""

from typing import Literal, TypeAlias, get_args

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
