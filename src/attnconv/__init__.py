"""attnconv: self-attention that performs convolution, after Cordonnier, Loukas and Jaggi (ICLR 2020).

The names below are the whole top-level surface; everything else lives in the subpackages. Names are imported when first
used, so that ``import attnconv`` does not import torch.
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attnconv.analysis import audit as audit
    from attnconv.encodings import Absolute as Absolute
    from attnconv.encodings import Encoding as Encoding
    from attnconv.encodings import GeneralizedQuadratic as GeneralizedQuadratic
    from attnconv.encodings import LearnedRelative as LearnedRelative
    from attnconv.encodings import LearnedRelativeContent as LearnedRelativeContent
    from attnconv.encodings import Quadratic as Quadratic
    from attnconv.encodings import Relative as Relative
    from attnconv.explorer import explore as explore
    from attnconv.grid import Grid as Grid
    from attnconv.layers import SelfAttention1d as SelfAttention1d
    from attnconv.layers import SelfAttention2d as SelfAttention2d
    from attnconv.layers import SelfAttention3d as SelfAttention3d
    from attnconv.models.load import load as load
    from attnconv.operators import Content as Content
    from attnconv.operators import Dense as Dense
    from attnconv.operators import Kronecker as Kronecker
    from attnconv.operators import Shift as Shift
    from attnconv.operators import Toeplitz as Toeplitz
    from attnconv.theorem import can_express as can_express
    from attnconv.theorem import from_conv as from_conv
    from attnconv.theorem import recast as recast
    from attnconv.theorem import restore as restore
    from attnconv.theorem import to_conv as to_conv
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Absolute": "encodings",
            "Content": "operators",
            "Dense": "operators",
            "Encoding": "encodings",
            "GeneralizedQuadratic": "encodings",
            "Grid": "grid",
            "Kronecker": "operators",
            "LearnedRelative": "encodings",
            "LearnedRelativeContent": "encodings",
            "Quadratic": "encodings",
            "SelfAttention1d": "layers",
            "SelfAttention2d": "layers",
            "SelfAttention3d": "layers",
            "Shift": "operators",
            "Relative": "encodings",
            "Toeplitz": "operators",
            "audit": "analysis",
            "can_express": "theorem",
            "explore": "explorer",
            "from_conv": "theorem",
            "load": "models.load",
            "recast": "theorem",
            "restore": "theorem",
            "to_conv": "theorem",
        },
        submodules=(
            "analysis",
            "data",
            "encodings",
            "explorer",
            "grid",
            "layers",
            "models",
            "operators",
            "report",
            "theorem",
        ),
        extra=("__version__",),
    )
