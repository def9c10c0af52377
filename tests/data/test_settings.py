"""Settings of data and augmentation: errors name the setting and its value."""

import json
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest

from attnconv._util.settings import Problem, SettingsError, problems
from attnconv.data.load_splits import load_data
from attnconv.data.settings import Augmentation, AugmentSettings, DataSettings, root_problems, settle

DIGITS = DataSettings("digits")


def named(found: list[Problem]) -> dict[str, str]:
    """Return the invalid value of each setting, by name."""
    return {problem.name: problem.got for problem in found}


@pytest.mark.usefixtures("unhooked")
class TestProblems:
    @pytest.mark.parametrize("settings", [DIGITS, DataSettings(), DataSettings("cifar100")])
    def test_good_settings_have_none(self, settings: DataSettings) -> None:
        assert problems(settings) == []

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "mnist"},
            {"validation": -1},
            {"split_seed": -5},
            {"limit": 0},
            {"normalisation": "his"},
            {"root": ""},
        ],
    )
    def test_each_wrong_value_is_named(self, change: dict[str, Any]) -> None:
        assert named(problems(replace(DIGITS, **change), "data")) == {
            f"data.{name}": repr(value) for name, value in change.items()
        }

    def test_the_root_must_be_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        absent = tmp_path / "absent"
        assert root_problems(DataSettings(root=str(absent))) == []  # a download creates the folder
        for settings in (DataSettings("folder", root=str(absent)), DataSettings(root=str(absent), download=False)):
            assert named(root_problems(settings)) == {"data.root": str(absent)}
            with pytest.raises(SettingsError, match=r"data\.root: .*absent"):
                load_data(settings)
        file = DataSettings(root=str(tmp_path / "file"))
        assert named(root_problems(file)) == {"data.root": f"the file {tmp_path / 'file'}"}

    def test_all_problems_come_at_once(self) -> None:
        assert len(problems(replace(DIGITS, limit=0, validation=-1, root=""))) == 3

    @pytest.mark.parametrize(
        "change",
        [
            {"recipe": "wild"},
            {"padding": -1},
            {"border": "wrap"},
            {"cutout": -2},
            {"jitter": 1.5},
            {"mixup": -0.1},
            {"cutmix": float("nan")},
        ],
    )
    def test_each_wrong_augmentation_is_named(self, change: dict[str, Any]) -> None:
        assert named(problems(AugmentSettings(**change))) == {name: repr(value) for name, value in change.items()}


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
        assert settle(chosen, channels=3, size=32) == Augmentation(0, "zero", False, 0, 0.0)

    def test_images_must_be_large_enough(self) -> None:
        with pytest.raises(ValueError, match=r"augment\.padding: .*got 8\."):
            settle(AugmentSettings(padding=8), channels=1, size=8)
        with pytest.raises(ValueError, match=r"augment\.cutout: .*got 9\."):
            settle(AugmentSettings(cutout=9), channels=1, size=8)


def test_settings_are_frozen_and_plain() -> None:
    with pytest.raises(FrozenInstanceError):
        DIGITS.limit = 3  # type: ignore[misc]
    for settings in (DataSettings(), AugmentSettings()):
        assert type(settings)(**json.loads(json.dumps(asdict(settings)))) == settings
