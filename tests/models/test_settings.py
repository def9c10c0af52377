"""Model settings: JSON round trips, and errors with the argument and its value."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from attnconv._util.settings import SettingsError, plain, problems, read
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings


def model_settings(values: dict[str, Any], *, origin: str = "") -> ModelSettings:
    settings: ModelSettings = read(ModelSettings, values, name="model", origin=origin)
    return settings


@pytest.mark.parametrize("settings", [*PRESETS.values(), AttentionSettings(layers=2, heads=(3, 4), head_channels=5)])
def test_settings_survive_json(settings: ModelSettings) -> None:
    assert model_settings(json.loads(json.dumps(plain(settings)))) == settings


def test_a_missing_name_takes_its_default() -> None:
    assert model_settings({"kind": "attention", "heads": 4}) == AttentionSettings(heads=4)


def test_heads_of_each_layer() -> None:
    assert AttentionSettings(layers=3, heads=2).heads_per_layer == (2, 2, 2)
    assert AttentionSettings(layers=2, heads=(7, 5)).heads_per_layer == (7, 5)


@pytest.mark.parametrize("kind", [None, "transformer", ["attention"]])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(
        ValueError, match=rf"model\.kind: .*attention, staged, resnet, got {re.escape(repr(kind))} \(from a\.json\)"
    ):
        model_settings({"kind": kind}, origin="from a.json")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.heads: .*got 4 \(from a\.json\)"):
        model_settings({"kind": "resnet", "heads": 4}, origin="from a.json")


def test_presets_have_no_problems() -> None:
    assert {name: problems(settings) for name, settings in PRESETS.items() if problems(settings)} == {}


@pytest.mark.parametrize(
    ("values", "name", "got"),
    [
        ({"encoding": "cubic"}, "encoding", "'cubic'"),
        ({"norm": "none"}, "norm", "'none'"),
        ({"layers": 0}, "layers", "0"),
        ({"width": 12.5}, "width", "12.5"),
        ({"heads": 0}, "heads", "0"),
        ({"heads": True}, "heads", "True"),
        ({"heads": "nine"}, "heads", "'nine'"),
        ({"heads": [9, 0], "layers": 2}, "heads", "[9, 0]"),
        ({"heads": [9, 9]}, "heads", "(9, 9)"),
        ({"max_shift": -1}, "max_shift", "-1"),
        ({"head_channels": 0}, "head_channels", "0"),
        ({"dropout": 1.0}, "dropout", "1.0"),
        ({"attention_dropout": "0"}, "attention_dropout", "'0'"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon", "nan"),
        ({"centre_std": float("inf")}, "centre_std", "inf"),
        ({"centres": "grid"}, "centres", "'grid'"),
        ({"encoding": "learned", "centres": "near"}, "centres", "'near'"),
        ({"downsampling": 3}, "downsampling", "3"),
        ({"encoding": "learned-content", "key_channels": 7}, "key_channels", "7"),
        ({"encoding": "absolute-sinusoidal", "width": 6}, "width", "6"),
        ({"kind": "staged", "layers": [2]}, "layers", "(2,)"),
        ({"kind": "staged", "downsampling": 3}, "downsampling", "3"),
        ({"kind": "staged", "layers": [500, 1, 500]}, "layers", "(500, 1, 500)"),
        ({"kind": "resnet", "classes": 0}, "classes", "0"),
        ({"kind": "resnet", "widths": []}, "widths", "[]"),
        ({"kind": "resnet", "blocks": [2]}, "blocks", "(2,)"),
        ({"width": 10**9}, "width", "1000000000"),
        ({"width": 1e9}, "width", "1000000000.0"),
        ({"classes": 65_537}, "classes", "65537"),
        ({"layers": 1001}, "layers", "1001"),
        ({"heads": [9, 10**9], "layers": 2}, "heads", "[9, 1000000000]"),
        ({"image_size": 4098}, "image_size", "4098"),
        ({"dropout": 10**400}, "dropout", str(10**400)),
        ({"width": 20_000}, "width", "20000"),
        ({"kind": "resnet", "blocks": [500, 1, 1, 500]}, "blocks", "(500, 1, 1, 500)"),
        ({"kind": "resnet", "widths": [9000] * 4}, "widths", "(9000, 9000, 9000, 9000)"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], name: str, got: str) -> None:
    with pytest.raises(SettingsError) as error:
        model_settings({"kind": "attention", **values})
    assert [(problem.name, problem.got) for problem in error.value.problems] == [(f"model.{name}", got)]


def test_all_problems_are_named_at_once() -> None:
    wrong = problems(AttentionSettings(mlp_width=0, dropout=2.0, downsampling=5), "model")
    assert [problem.name for problem in wrong] == ["model.mlp_width", "model.dropout", "model.downsampling"]


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 32])
def test_any_divisor_of_the_image_may_be_the_downsampling(side: int) -> None:
    assert problems(replace(AttentionSettings(), downsampling=side)) == []


def test_settings_presets_and_tables_do_not_import_torch() -> None:
    code = (
        "import sys, attnconv.models.settings, attnconv.models.presets\n"
        "from attnconv.models.preset_tables import table_of_presets\n"
        "table_of_presets()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


def test_resnet_settings_are_not_attention_settings() -> None:
    assert plain(ResNetSettings())["kind"] == "resnet"
    assert plain(AttentionSettings())["kind"] == "attention"
