from .base import (
    Encoding as Encoding,
    Gaussians as Gaussians,
    JointEncoding as JointEncoding,
    SeparableEncoding as SeparableEncoding,
)
from .content import (
    Absolute as Absolute,
    LearnedPositions as LearnedPositions,
    QuadraticFeatures as QuadraticFeatures,
    Relative as Relative,
    SinusoidalFeatures as SinusoidalFeatures,
    SinusoidalPositions as SinusoidalPositions,
)
from .learned_relative import LearnedRelative as LearnedRelative, LearnedRelativeContent as LearnedRelativeContent
from .quadratic import GeneralizedQuadratic as GeneralizedQuadratic, Quadratic as Quadratic
from .registry import ENCODING_NAMES as ENCODING_NAMES, encoding_named as encoding_named
