"""Settings: plain values that survive JSON, and every mistake as a sentence in the user's spelling."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings, from_dict, problems, to_dict


@pytest.mark.parametrize("settings", [*PRESETS.values(), AttentionSettings(layers=2, heads=(3, 4), head_channels=5)])
def test_settings_survive_json(settings: ModelSettings) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(settings)))) == settings


def test_a_missing_name_takes_its_default() -> None:
    assert from_dict({"kind": "attention", "heads": 4}) == AttentionSettings(heads=4)


def test_heads_of_each_layer() -> None:
    assert AttentionSettings(layers=3, heads=2).heads_per_layer == (2, 2, 2)
    assert AttentionSettings(layers=2, heads=(7, 5)).heads_per_layer == (7, 5)


@pytest.mark.parametrize("kind", [None, "transformer", ["attention"]])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"model.kind: must be one of attention, resnet, got {kind!r} (from a.json)")
    ):
        from_dict({"kind": kind}, origin="from a.json")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model \(resnet\): .*got 'heads' \(from a\.json\)"):
        from_dict({"kind": "resnet", "heads": 4}, origin="from a.json")


def test_presets_have_no_problems() -> None:
    assert {name: problems(settings) for name, settings in PRESETS.items() if problems(settings)} == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoding": "cubic"}, "model.encoding: must be one of quadratic, "),
        ({"norm": "none"}, "model.norm: must be one of post, pre, got 'none'"),
        ({"layers": 0}, "model.layers: must be a whole number of at least 1, got 0"),
        ({"width": 12.5}, "model.width: must be a whole number of at least 1, got 12.5"),
        ({"heads": 0}, "model.heads: must be a whole number of at least 1, got 0"),
        ({"heads": True}, "model.heads: must be a whole number of at least 1, got True"),
        ({"heads": "nine"}, "model.heads: must be a whole number of at least 1, got 'nine'"),
        ({"heads": [9, 0], "layers": 2}, "model.heads: must be one or more whole numbers of at least 1, got (9, 0)"),
        ({"heads": [9, 9]}, "model.heads: must be one number, or one for each of the 6 layers, got (9, 9)"),
        ({"max_shift": -1}, "model.max_shift: must be a whole number of at least 0, got -1"),
        ({"head_channels": 0}, "model.head_channels: must be a whole number of at least 1 or None, got 0"),
        ({"dropout": 1.0}, "model.dropout: must be a number of at least 0 and below 1, got 1.0"),
        ({"attention_dropout": "0"}, "model.attention_dropout: must be a number of at least 0 and below 1, got '0'"),
        ({"norm_epsilon": float("nan")}, "model.norm_epsilon: must be a number of at least 0 and finite, got nan"),
        ({"centre_std": float("inf")}, "model.centre_std: must be a number of at least 0 and finite, got inf"),
        ({"centres": "grid"}, "model.centres: must be one of normal, near, got 'grid'"),
        (
            {"encoding": "learned", "centres": "near"},
            "model.centres: must be normal for encoding learned, whose heads have no centres, got 'near'",
        ),
        ({"downsampling": 3}, "model.downsampling: must divide the image size 32, got 3"),
        (
            {"encoding": "learned-content", "key_channels": 7},
            "model.key_channels: must be even for encoding learned-content, got 7",
        ),
        (
            {"encoding": "absolute-sinusoidal", "width": 6},
            "model.width: must be a multiple of 4 for encoding absolute-sinusoidal, got 6",
        ),
        ({"kind": "resnet", "classes": 0}, "model.classes: must be a whole number of at least 1, got 0"),
        ({"kind": "resnet", "widths": []}, "model.widths: must be one or more whole numbers of at least 1, got ()"),
        ({"kind": "resnet", "blocks": [2]}, "model.blocks: must be one number for each of the 4 widths, got (2,)"),
        ({"width": 10**9}, "model.width: must be at most 65536, got 1000000000"),
        ({"width": 1e9}, "model.width: must be a whole number of at least 1, got 1000000000.0"),
        ({"classes": 65_537}, "model.classes: must be at most 65536, got 65537"),
        ({"layers": 1001}, "model.layers: must be at most 1000, got 1001"),
        ({"heads": [9, 10**9], "layers": 2}, "model.heads: must be at most 65536, got (9, 1000000000)"),
        ({"image_size": 4098}, "model.image_size: must be at most 4096, got 4098"),
        ({"dropout": 10**400}, "model.dropout: must be a number of at least 0 and below 1, got 1000"),
        ({"width": 20_000}, "model.width: must be such that the model has at most 1,000,000,000 parameters, got 20000"),
        (
            {"kind": "resnet", "blocks": [500, 1, 1, 500]},
            "model.blocks: must be at most 1000 in all, got (500, 1, 1, 500)",
        ),
        (
            {"kind": "resnet", "widths": [9000] * 4},
            "model.widths: must be such that the model has at most 1,000,000,000 parameters, got (9000, ",
        ),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict({"kind": "attention", **values})


def test_all_problems_are_named_at_once_in_the_spelling_of_the_flags() -> None:
    wrong = problems(AttentionSettings(mlp_width=0, dropout=2.0, downsampling=5))
    assert [message.partition(":")[0] for message in wrong] == [
        "--model.mlp-width",
        "--model.dropout",
        "--model.downsampling",
    ]


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
    assert to_dict(ResNetSettings())["kind"] == "resnet"
    assert to_dict(AttentionSettings())["kind"] == "attention"
