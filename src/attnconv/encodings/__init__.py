"""Encodings: how much a query likes a shift."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.encodings.absolute import Absolute as Absolute
    from attnconv.encodings.base import Encoding as Encoding
    from attnconv.encodings.base import JointEncoding as JointEncoding
    from attnconv.encodings.base import SeparableEncoding as SeparableEncoding
    from attnconv.encodings.learned import LearnedRelative as LearnedRelative
    from attnconv.encodings.learned import LearnedRelativeContent as LearnedRelativeContent
    from attnconv.encodings.named import encoding_named as encoding_named
    from attnconv.encodings.names import ENCODING_NAMES as ENCODING_NAMES
    from attnconv.encodings.positions import LearnedPositions as LearnedPositions
    from attnconv.encodings.positions import SinusoidalPositions as SinusoidalPositions
    from attnconv.encodings.quadratic import GeneralizedQuadratic as GeneralizedQuadratic
    from attnconv.encodings.quadratic import Quadratic as Quadratic
    from attnconv.encodings.relative import QuadraticFeatures as QuadraticFeatures
    from attnconv.encodings.relative import Relative as Relative
    from attnconv.encodings.relative import SinusoidalFeatures as SinusoidalFeatures
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Absolute": "absolute",
            "ENCODING_NAMES": "names",
            "Encoding": "base",
            "GeneralizedQuadratic": "quadratic",
            "JointEncoding": "base",
            "LearnedPositions": "positions",
            "LearnedRelative": "learned",
            "LearnedRelativeContent": "learned",
            "Quadratic": "quadratic",
            "QuadraticFeatures": "relative",
            "Relative": "relative",
            "SeparableEncoding": "base",
            "SinusoidalFeatures": "relative",
            "SinusoidalPositions": "positions",
            "encoding_named": "named",
        },
    )
