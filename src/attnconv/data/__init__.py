"""Image sets in memory, the splits they are used in, and augmentation on the device.

``load(settings)`` reads a data set; ``attnconv.data.augmentation.augment`` prepares a batch. Importing this package, or
its ``settings``, does not import torch.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
