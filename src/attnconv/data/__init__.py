"""Image sets in memory, the splits they are used in, and augmentation on the device.

``attnconv.data.load.load(settings)`` is the front door; ``attnconv.data.augment.augment`` prepares a batch. Importing
this package, or its ``settings``, does not import torch.
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.data.augment import normalise as normalise
    from attnconv.data.batches import Batch as Batch
    from attnconv.data.batches import Batches as Batches
    from attnconv.data.folder import read_image as read_image
    from attnconv.data.images import ImageSet as ImageSet
    from attnconv.data.images import Splits as Splits
    from attnconv.data.mixing import mix as mix
    from attnconv.data.pictures import FolderPictures as FolderPictures
    from attnconv.data.pictures import read_pictures as read_pictures
    from attnconv.data.randomness import Stream as Stream
    from attnconv.data.randomness import integers as integers
    from attnconv.data.randomness import permutation as permutation
    from attnconv.data.randomness import uniform as uniform
    from attnconv.data.settings import AugmentSettings as AugmentSettings
    from attnconv.data.settings import DataSettings as DataSettings
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "AugmentSettings": "settings",
            "Batch": "batches",
            "Batches": "batches",
            "DataSettings": "settings",
            "ImageSet": "images",
            "Splits": "images",
            "Stream": "randomness",
            "integers": "randomness",
            "mix": "mixing",
            "normalise": "augment",
            "permutation": "randomness",
            "read_image": "folder",
            "FolderPictures": "pictures",
            "read_pictures": "pictures",
            "uniform": "randomness",
        },
        submodules=("augment", "batches", "images", "load", "randomness", "settings"),
    )
