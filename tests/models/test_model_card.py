"""Model cards: what is recorded, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attnconv.convert import recast
from attnconv.models.checkpoint import About, save_recast, save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_card import model_card
from attnconv.models.settings import AttentionSettings, ResNetSettings

ROOT = Path(__file__).resolve().parents[2]
TINY = AttentionSettings(layers=1, heads=2, width=8, mlp_width=8, image_size=8, classes=2)


def card(folder: Path, extra: dict[str, Any] | None = None, **records: Any) -> str:
    """Return the card of a folder with weights and the given records."""
    save_weights(folder / "weights.safetensors", build(TINY), TINY, classes=("cat", "dog"), extra=extra)
    for name, values in records.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return model_card("me/model", folder, folder / "weights.safetensors", "mit")


def metadata(text: str) -> Any:
    return pytest.importorskip("huggingface_hub").ModelCard(text).data


def test_a_published_result_is_described_with_its_recorded_numbers() -> None:
    folder = ROOT / "results" / "cifar10-small" / "quadratic-small"
    if not (folder / "weights.safetensors").is_file():
        pytest.skip("the source distribution does not contain the weights of the results")
    text = model_card("me/small", folder, folder / "weights.safetensors", "mit")
    assert "| test | 84.08% | 10000 |" in text
    assert "930,038 parameters, stored in float16." in text
    assert "root=" not in text
    for number in re.findall(r"=(\d[\d.e-]*)", text.partition("## Training")[2].partition("## Limits")[0]):
        assert re.search(rf"\b{re.escape(number)}\b", (folder / "settings.json").read_text(encoding="utf-8")), number
    data = metadata(text)
    assert (data.library_name, data.license, data.datasets) == ("attnconv", "mit", ["uoft-cs/cifar10"])
    assert [result.metric_value for result in data.eval_results] == [0.8408]


def test_without_records_there_are_no_results(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert "No evaluation of these weights is recorded." in text
    assert "only these classes: cat, dog." in text
    data = metadata(text)
    assert (data.datasets, data.metrics, data.eval_results) == (None, None, None)


def test_metrics_of_another_epoch_are_left_out(tmp_path: Path) -> None:
    lines = {"last": {"epoch": 9, "test": {"accuracy": 0.9}}, "best": {"epoch": 7, "test": {"accuracy": 0.875}}}
    settings = {"settings": {"data": {"name": "folder", "root": "/home/me"}, "train": {"seed": None, "epochs": 9}}}
    text = card(tmp_path, {"epoch": 7}, result=lines, settings=settings)
    assert "87.50%" in text
    assert "90.00%" not in text
    assert "/home/me" not in text
    assert "| train | epochs=9 |" in text
    (result,) = metadata(text).eval_results
    assert (result.dataset_type, result.dataset_name, result.metric_value) == ("folder", "folder", 0.875)
    assert "No evaluation" in card(tmp_path, {"epoch": 8}, result=lines)
    assert "No evaluation" in card(tmp_path, {}, result=lines)


def test_metrics_of_an_unfinished_run_are_those_of_its_weights(tmp_path: Path) -> None:
    assert "| validation | 50.00% |  |" in card(tmp_path, {"epoch": 1, "accuracy": {"validation": 0.5}})
    assert "No evaluation" in card(tmp_path, {"accuracy": "high", "preset": 3})
    assert "No evaluation" in card(tmp_path, {"accuracy": {"test": "high"}})


def test_the_labels_of_cifar100_are_part_of_its_name(tmp_path: Path) -> None:
    settings = {"settings": {"data": {"name": "cifar100", "labels": "coarse"}}}
    text = card(tmp_path, {"accuracy": {"test": 0.5}}, settings=settings)
    assert [result.dataset_name for result in metadata(text).eval_results] == ["cifar100 (coarse labels)"]
    assert metadata(text).datasets == ["uoft-cs/cifar100"]


def test_a_recast_network_has_a_card(tmp_path: Path) -> None:
    settings = ResNetSettings(widths=(4,), blocks=(1,), image_size=8, classes=2)
    save_recast(tmp_path / "weights.safetensors", recast(build(settings)), settings, about=About())
    text = model_card("me/model", tmp_path, tmp_path / "weights.safetensors", "mit")
    assert "| model | kind=resnet, widths=[4], blocks=[1], image_size=8, " in text
    assert "| convolutions replaced with attention | alpha=null, only=null |" in text


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / 'result.json'))}: must be JSON, got "):
        card(tmp_path)
