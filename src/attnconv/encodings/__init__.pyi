from .absolute import Absolute as Absolute
from .base import (
    Encoding as Encoding,
    Gaussians as Gaussians,
    JointEncoding as JointEncoding,
    SeparableEncoding as SeparableEncoding,
)
from .learned_relative import (
    LearnedRelative as LearnedRelative,
    LearnedRelativeContent as LearnedRelativeContent,
)
from .quadratic import (
    GeneralizedQuadratic as GeneralizedQuadratic,
    Quadratic as Quadratic,
)
from .registry import encoding_named as encoding_named
from .registry_names import ENCODING_NAMES as ENCODING_NAMES
from .sinusoidal_and_learned_positions import (
    LearnedPositions as LearnedPositions,
    SinusoidalPositions as SinusoidalPositions,
)
from .transformer_xl import (
    QuadraticFeatures as QuadraticFeatures,
    Relative as Relative,
    SinusoidalFeatures as SinusoidalFeatures,
)
