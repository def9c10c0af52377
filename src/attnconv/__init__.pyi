from . import (
    convert as convert,
    data as data,
    encodings as encodings,
    explorer as explorer,
    grid as grid,
    inspect as inspect,
    layers as layers,
    models as models,
    operators as operators,
    report as report,
    surgery as surgery,
    theory as theory,
    training as training,
)
from .convert import from_conv as from_conv, recast as recast, restore as restore, to_conv as to_conv
from .encodings import (
    Absolute as Absolute,
    Encoding as Encoding,
    GeneralizedQuadratic as GeneralizedQuadratic,
    LearnedRelative as LearnedRelative,
    LearnedRelativeContent as LearnedRelativeContent,
    Quadratic as Quadratic,
    Relative as Relative,
)
from .explorer import explore as explore
from .grid import Grid as Grid
from .inspect import audit as audit
from .layers import (
    SelfAttention1d as SelfAttention1d,
    SelfAttention2d as SelfAttention2d,
    SelfAttention3d as SelfAttention3d,
)
from .models import list_models as list_models, load as load
from .operators import Content as Content, Dense as Dense, Kronecker as Kronecker, Shift as Shift, Toeplitz as Toeplitz
from .theory import can_express as can_express

__version__: str
