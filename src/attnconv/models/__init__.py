"""Models: the paper's classifier, the residual network beside it, named presets, checkpoints and the loader.

`attnconv.models.model_loader.load` is also `attnconv.load`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
