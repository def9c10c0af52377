"""Changes to a model: heads pruned or replaced by convolutions, and initialisations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
