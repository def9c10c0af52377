"""Data sets, their splits, and augmentation. `load_data(settings)` loads a data set into memory."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
