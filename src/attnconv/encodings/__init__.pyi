from .absolute import (
    Absolute as Absolute,
    LearnedPositions as LearnedPositions,
    SinusoidalPositions as SinusoidalPositions,
)
from .base import (
    Encoding as Encoding,
    JointEncoding as JointEncoding,
    SeparableEncoding as SeparableEncoding,
)
from .gaussians import Gaussians as Gaussians
from .learned_relative import (
    LearnedRelative as LearnedRelative,
    LearnedRelativeContent as LearnedRelativeContent,
)
from .quadratic import (
    GeneralizedQuadratic as GeneralizedQuadratic,
    Quadratic as Quadratic,
)
from .registry import (
    ENCODING_NAMES as ENCODING_NAMES,
    encoding_named as encoding_named,
)
from .transformer_xl import (
    QuadraticFeatures as QuadraticFeatures,
    Relative as Relative,
    SinusoidalFeatures as SinusoidalFeatures,
)
