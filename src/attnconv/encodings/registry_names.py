"""Names of the encodings, without importing torch."""

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
