from .augmentation import normalise as normalise
from .image_files import FolderPictures as FolderPictures, read_image as read_image, read_pictures as read_pictures
from .image_set import ImageSet as ImageSet, Splits as Splits
from .load_splits import load_data as load_data
from .settings import AugmentSettings as AugmentSettings, DataSettings as DataSettings
