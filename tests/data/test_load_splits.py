"""`load_data`: from settings to splits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.data.cifar import CIFARS
from attnconv.data.image_set import Splits, channel_statistics
from attnconv.data.load_splits import load_data
from attnconv.data.settings import DataSettings
from tests.data.making import small_cifar, write_hub_folder
from tests.data.test_image_folder import two_classes

DIGITS = DataSettings("digits")


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.validation), len(splits.test)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    """Settings of a small CIFAR-10."""
    monkeypatch.setitem(CIFARS, "cifar10", small_cifar()[0])
    write_hub_folder(tmp_path)
    return DataSettings(root=str(tmp_path), validation=5, download=False)


class TestDigits:
    def test_splits(self) -> None:
        splits = load_data(DIGITS)
        assert sizes(splits) == (1237, 200, 360)
        assert splits.classes == tuple("0123456789")
        assert splits.source == "the digits of scikit-learn"
        torch.testing.assert_close(
            torch.tensor([*splits.mean, *splits.std]), torch.tensor([0.3055, 0.3762]), rtol=0, atol=1e-4
        )

    @pytest.mark.parametrize(("validation", "expected"), [(0, 0), (1, 1), (400, 400), (None, 200)])
    def test_as_many_are_held_out_as_asked(self, validation: int | None, expected: int) -> None:
        assert sizes(load_data(replace(DIGITS, validation=validation))) == (1437 - expected, expected, 360)

    def test_held_out_images_depend_on_the_split_seed_alone(self) -> None:
        first, again, other = (load_data(replace(DIGITS, split_seed=seed)) for seed in (0, 0, 1))
        assert torch.equal(first.validation.images, again.validation.images)
        assert not torch.equal(first.validation.images, other.validation.images)
        assert torch.equal(first.test.images, other.test.images)

    def test_constants_do_not_depend_on_the_split(self) -> None:
        assert load_data(DIGITS).mean == load_data(replace(DIGITS, validation=700, limit=20)).mean

    def test_a_limit_keeps_classes_even(self) -> None:
        splits = load_data(replace(DIGITS, limit=100))
        assert sizes(splits) == (100, 200, 360)
        assert set(torch.bincount(splits.train.labels).tolist()) <= {9, 10, 11}
        assert sizes(load_data(replace(DIGITS, limit=1237))) == (1237, 200, 360)

    def test_limits_and_holdouts_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"data\.limit: .*got 1238"):
            load_data(replace(DIGITS, limit=1238))
        with pytest.raises(ValueError, match=r"data\.validation: .*got 1437"):
            load_data(replace(DIGITS, validation=1437))

    def test_all_problems_come_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"data\.validation: .* got -1\.\ndata\.limit: .* got 0\."):
            load_data(replace(DIGITS, validation=-1, limit=0))


class TestCifar:
    def test_splits(self, cifar: DataSettings) -> None:
        splits = load_data(cifar)
        assert sizes(splits) == (15, 5, 10)
        assert splits.classes[3] == "cat"
        assert splits.source == "CIFAR-10 from parquet files"

    @pytest.mark.parametrize(
        ("normalisation", "std"), [("paper", (0.2023, 0.1994, 0.2010)), ("measured", (0.2470, 0.2435, 0.2616))]
    )
    def test_constants(self, normalisation: Any, std: tuple[float, ...], cifar: DataSettings) -> None:
        splits = load_data(replace(cifar, normalisation=normalisation))
        assert splits.mean == (0.4914, 0.4822, 0.4465)
        assert splits.std == std

    def test_cifar_100_has_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CIFARS, "cifar100", small_cifar("cifar100")[0])
        write_hub_folder(tmp_path, column="fine_label")
        splits = load_data(DataSettings("cifar100", root=str(tmp_path), validation=5))
        assert (len(splits.classes), splits.std) == (100, (0.2673, 0.2564, 0.2762))


class TestFolder:
    def test_a_tenth_is_held_out(self, tmp_path: Path) -> None:
        two_classes(tmp_path / "train", 20)
        two_classes(tmp_path / "test", 2)
        splits = load_data(DataSettings("folder", root=str(tmp_path)), image_size=8)
        assert sizes(splits) == (36, 4, 4)
        whole = torch.cat([splits.train.images, splits.validation.images])
        torch.testing.assert_close(torch.tensor(splits.mean), torch.tensor(channel_statistics(whole)[0]))

    def test_a_validation_folder_is_taken_as_it_is(self, tmp_path: Path) -> None:
        for split, count in (("train", 4), ("val", 3), ("test", 2)):
            two_classes(tmp_path / split, count)
        settings = DataSettings("folder", root=str(tmp_path))
        assert sizes(load_data(settings, image_size=8)) == (8, 6, 4)
        with pytest.raises(ValueError, match=r"data\.validation: .*got 2"):
            load_data(replace(settings, validation=2))
