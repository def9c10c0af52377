"""Changes to a model: heads pruned or replaced by convolutions, and initialisations."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
