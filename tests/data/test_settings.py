"""The settings of data and augmentation: what is wrong is said in the spelling of the flags."""

import json
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest

from attnconv.data.settings import Augmentation, AugmentSettings, DataSettings, problems, settle

DIGITS = DataSettings("digits")


@pytest.mark.usefixtures("unhooked")
class TestProblems:
    @pytest.mark.parametrize("settings", [DIGITS, DataSettings(), DataSettings("cifar100", labels="coarse")])
    def test_good_settings_have_none(self, settings: DataSettings) -> None:
        assert problems(settings) == []

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"name": "mnist"}, "--data.name: must be one of digits, cifar10, cifar100, folder, got 'mnist'."),
            ({"validation": -1}, "--data.validation: must be at least 0, got -1."),
            ({"split_seed": -5}, "--data.split-seed: must be at least 0, got -5."),
            ({"limit": 0}, "--data.limit: must be at least 1, got 0."),
            ({"labels": "medium"}, "--data.labels: must be one of fine, coarse, got 'medium'."),
            ({"normalisation": "his"}, "--data.normalisation: must be one of paper, measured, got 'his'."),
            ({"image_size": 2}, "--data.image-size: must be 4 to 1024, got 2."),
            ({"image_size": 5000}, "--data.image-size: must be 4 to 1024, got 5000."),
            ({"cache": ""}, "--data.cache: must be auto, off or a folder, got ''."),
        ],
    )
    def test_each_wrong_value_is_named(self, change: dict[str, Any], message: str) -> None:
        assert message in problems(replace(DIGITS, **change))

    def test_coarse_labels_are_for_cifar100(self) -> None:
        found = problems(replace(DIGITS, labels="coarse"))
        assert found == ["--data.labels: must be 'fine' for digits, got 'coarse'. Only CIFAR-100 has coarse labels."]

    def test_the_root_must_be_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        absent = tmp_path / "absent"
        assert problems(DataSettings(root=str(absent))) == []  # a download creates it
        for settings in (DataSettings("folder", root=str(absent)), DataSettings(root=str(absent), download=False)):
            assert problems(settings) == [f"--data.root: must be a folder that exists, got {absent}."]
        file = DataSettings(root=str(tmp_path / "file"))
        assert problems(file) == [f"--data.root: must be a folder, got the file {tmp_path / 'file'}."]
        assert problems(DataSettings(root="")) == ["--data.root: must be the folder that holds the data, got ''."]

    def test_all_problems_come_at_once(self) -> None:
        assert len(problems(replace(DIGITS, limit=0, validation=-1, image_size=0))) == 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"recipe": "wild"}, "--augment.recipe: must be one of none, paper, modern, got 'wild'."),
            ({"padding": -1}, "--augment.padding: must be at least 0, got -1."),
            ({"border": "wrap"}, "--augment.border: must be one of zero, reflect, got 'wrap'."),
            ({"cutout": -2}, "--augment.cutout: must be at least 0, got -2."),
            ({"jitter": 1.5}, "--augment.jitter: must be 0 to 1, got 1.5."),
            ({"mixup": -0.1}, "--augment.mixup: must be 0 to 1, got -0.1."),
            ({"cutmix": float("nan")}, "--augment.cutmix: must be 0 to 1, got nan."),
        ],
    )
    def test_each_wrong_augmentation_is_named(self, change: dict[str, Any], message: str) -> None:
        assert problems(AugmentSettings(**change)) == [message]


class TestSettle:
    def test_recipes_fill_what_is_left_open(self) -> None:
        assert settle(AugmentSettings("none"), channels=3, size=32) == Augmentation(0, "zero", False, 0, 0.0)
        assert settle(AugmentSettings("paper"), channels=3, size=32) == Augmentation(4, "zero", True, 0, 0.0)
        assert settle(AugmentSettings("modern"), channels=3, size=32) == Augmentation(4, "reflect", True, 8, 0.2)

    @pytest.mark.parametrize("recipe", ["none", "paper", "modern"])
    def test_digits_are_never_mirrored(self, recipe: Any) -> None:
        assert settle(AugmentSettings(recipe), channels=1, size=8).flip is False

    def test_what_is_chosen_is_kept_even_where_it_is_zero_or_false(self) -> None:
        chosen = AugmentSettings("modern", padding=0, border="zero", flip=False, cutout=0, jitter=0.0)
        settled = settle(chosen, channels=3, size=32)
        assert settled == Augmentation(0, "zero", False, 0, 0.0)
        assert not settled.random

    def test_images_must_be_large_enough(self) -> None:
        with pytest.raises(ValueError, match=r"--augment\.padding: .*got 8\."):
            settle(AugmentSettings(padding=8), channels=1, size=8)
        with pytest.raises(ValueError, match=r"--augment\.cutout: .*got 9\."):
            settle(AugmentSettings(cutout=9), channels=1, size=8)


def test_settings_are_frozen_and_plain() -> None:
    with pytest.raises(FrozenInstanceError):
        DIGITS.limit = 3  # type: ignore[misc]
    for settings in (DataSettings(), AugmentSettings()):
        assert type(settings)(**json.loads(json.dumps(asdict(settings)))) == settings
