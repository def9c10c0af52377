"""The embedded digits: complete, and always split in the same way."""

import hashlib

import torch
from sklearn.datasets import load_digits

from attnconv.data.digits import read_digits


def test_all_digits_are_on_one_side() -> None:
    train, test = read_digits()
    assert (len(train), len(test)) == (1437, 360)
    together = torch.cat([train.images, test.images]).flatten(1)
    content = load_digits()
    original = torch.from_numpy(content.images).flatten(1)
    assert sorted(together.tolist()) == sorted((original * 255 / 16).round().to(torch.uint8).tolist())
    counts = torch.bincount(torch.cat([train.labels, test.labels]))
    assert counts.tolist() == torch.bincount(torch.from_numpy(content.target)).tolist()


def test_the_test_set_has_the_same_share_of_each_digit() -> None:
    _, test = read_digits()
    assert set(torch.bincount(test.labels).tolist()) <= {35, 36, 37}


def test_the_split_is_fixed_for_ever() -> None:
    """All published accuracies on digits use this split, and would change with it."""
    _, test = read_digits()
    assert hashlib.sha256(test.images.numpy().tobytes()).hexdigest()[:16] == "5d79f32d3233fa52"
    assert test.labels[:10].tolist() == [0, 8, 5, 9, 0, 2, 0, 5, 8, 4]


def test_the_range_of_bytes_is_used() -> None:
    train, _ = read_digits()
    assert (int(train.images.min()), int(train.images.max())) == (0, 255)
    assert train.images.unique().numel() == 17
