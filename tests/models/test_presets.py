"""Presets: names, descriptions, and errors for misspelt names."""

import pytest

from attnconv.models.presets import CATALOGUE, PRESETS, preset_settings
from attnconv.models.settings import AttentionSettings

PAPER = ("resnet18", "quadratic", "quadratic-generalized", "learned", "learned-content", "quadratic-16-heads")
SMALL = (
    "quadratic-small",
    "quadratic-generalized-small",
    "learned-small",
    "learned-content-small",
    "quadratic-16-heads-small",
    "quadratic-fast",
    "resnet-small",
    "quadratic-digits",
    "resnet-digits",
)


def test_the_names() -> None:
    assert tuple(PRESETS) == PAPER + SMALL


def test_each_preset_is_described_in_one_sentence() -> None:
    for name, preset in CATALOGUE.items():
        assert preset.description.endswith("."), name
        assert preset.description.count(". ") == 0, name
        assert "\n" not in preset.description, name


def test_the_papers_model_has_the_papers_hyper_parameters() -> None:
    assert preset_settings("quadratic") == AttentionSettings(
        encoding="quadratic",
        layers=6,
        heads=9,
        width=400,
        mlp_width=512,
        downsampling=2,
        dropout=0.1,
        attention_dropout=0.0,
        norm="post",
        norm_epsilon=1e-12,
        max_shift=15,
        centres="normal",
        centre_std=2.0,
        spread_std=0.01,
    )


def test_a_misspelt_preset_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"preset: .*got 'quadratic_smal'"):
        preset_settings("quadratic_smal")


def test_an_unknown_preset_is_answered_with_all_names() -> None:
    with pytest.raises(ValueError, match=r"got 'xyz'\. The presets are resnet18, quadratic, .*resnet-digits\."):
        preset_settings("xyz")
