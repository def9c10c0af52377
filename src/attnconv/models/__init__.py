"""Models: the paper's classifier, the residual network beside it, named presets, checkpoints and the loader.

`attnconv.models.model_loader.load` is also `attnconv.load`.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
