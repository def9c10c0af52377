"""The digits of scikit-learn: 1797 greyscale images of handwritten digits, 8 x 8 pixels; no download is needed.

Pixel values v from 0 to 16 are scaled to uint8, round(255 v / 16). The test set is fixed: 360 images, about a fifth of
every digit. The same writers appear in training and test images, so accuracies are higher than for unseen writers.
"""

import base64
import importlib.util
from pathlib import Path

import numpy as np
import torch

from attnconv.data.image_set import ImageSet

CLASSES = tuple(str(digit) for digit in range(10))
# One bit per image, 1 for the test set.
_TEST = (
    "gIEaAoJkmALQAgggwQBNIIgCAIAwFAMJgJBCSSIAQIIAAACCBABcAgQAAAAQgQEAAEwFhYhHUwgAAAAAA0gCICqRKWUHgYIDiSAp"
    "IQRAgEAAJBCBoQATAYSgAAhKFAJBlAlgFoCFgADCwQAVAAiFRAAtQFQJAkCiQBpigxI5AHgAIKAAAgIAYAERGKAAACAAAoEkCcBE"
    "FBQIogRQRgAgDCEAgUEkJQAAAEQBAJIRAqFKQUCAgQgAFHAWCAgTEIEEEIAIABAhEABkYQ4AIAKBlIiIgEBKAMQAMAMUASIEAEhg"
)


def read_digits() -> tuple[ImageSet, ImageSet]:
    """Read the training set (1437 images) and the test set (360 images)."""
    # The file that sklearn.datasets.load_digits reads. Importing scikit-learn would take as long as several epochs.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    content = np.loadtxt(file, delimiter=",")  # 64 pixels and the digit of each image
    pixels = np.rint(content[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    digits = ImageSet(torch.from_numpy(pixels)[:, None], torch.from_numpy(content[:, -1].astype(np.int64)))
    bits = np.unpackbits(np.frombuffer(base64.b64decode(_TEST), np.uint8), count=len(digits))
    test = torch.from_numpy(bits == 1)
    return digits.take((~test).nonzero()[:, 0]), digits.take(test.nonzero()[:, 0])
