"""Checkpoints: round trips, and errors for invalid files."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import attnconv
from attnconv.models.checkpoint import About, load_weights, read_checkpoint, read_weights, save_weights, weights_bytes
from attnconv.models.classifiers import build
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings

TINY = AttentionSettings(layers=1, heads=3, width=8, mlp_width=8, image_size=8, classes=2)
TINY_RESNET = ResNetSettings(widths=(4, 8), blocks=(1, 1), image_size=8, classes=2)


def written(tmp_path: Path, settings: ModelSettings = TINY) -> tuple[Path, nn.Module]:
    model = build(settings)
    path = tmp_path / "weights.safetensors"
    save_weights(path, model, settings)
    return path, model


def rewrite(
    path: Path, *, metadata: Mapping[str, str | None] | None = None, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Change metadata of a checkpoint (None removes an entry) or replace its tensors."""
    with safetensors.safe_open(path, "pt") as file:
        strings: dict[str, str | None] = dict(file.metadata())
    strings |= {} if metadata is None else metadata
    found = safetensors.torch.load_file(path) if tensors is None else dict(tensors)
    kept = {name: text for name, text in strings.items() if text is not None}
    path.write_bytes(safetensors.torch.save(found, kept))


@pytest.mark.parametrize("settings", [TINY, TINY_RESNET, replace(TINY, encoding="learned-content", head_channels=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_written_is_read(tmp_path: Path, settings: ModelSettings, dtype: torch.dtype) -> None:
    model = build(settings).to(dtype)
    path = tmp_path / "new" / "folder" / "weights.safetensors"
    save_weights(
        path,
        model,
        settings,
        classes=("cat", "dög"),
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 2.0, 3.0),
        extra={"epoch": 3, "accuracy": 0.5},
    )
    found = read_checkpoint(path)
    assert found.settings == settings
    assert (found.classes, found.mean, found.std) == (("cat", "dög"), (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    assert (found.extra, found.source) == ({"epoch": 3, "accuracy": 0.5}, str(path))
    assert read_weights(path).metadata["attnconv_version"] == attnconv.__version__
    state = model.state_dict()
    assert found.tensors.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_restores_a_model(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    other = build(TINY)
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(images), other(images))
    load_weights(other, read_checkpoint(path))
    torch.testing.assert_close(other.eval()(images), model.eval()(images), rtol=0, atol=0)


def test_tensors_that_are_not_contiguous_are_written(tmp_path: Path) -> None:
    model = build(TINY_RESNET)
    model.get_parameter("stem.weight").data = torch.randn(3, 4, 3, 3).transpose(0, 1)
    save_weights(tmp_path / "w.safetensors", model, TINY_RESNET)
    read = read_checkpoint(tmp_path / "w.safetensors")
    torch.testing.assert_close(read.tensors["stem.weight"], model.state_dict()["stem.weight"], rtol=0, atol=0)


def test_a_checkpoint_of_another_preset_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    message = r"checkpoint: .*got .*Missing.*stem\.weight.*Unexpected"
    with pytest.raises(ValueError, match=message):
        load_weights(build(TINY_RESNET), read_checkpoint(path))
    wider = build(replace(TINY, mlp_width=16))
    message = r"got .*blocks\.0\.mlp_in\.weight.* shape torch\.Size\(\[8, 8\]\) .*\[16, 8\].*different preset"
    with pytest.raises(ValueError, match=message):
        load_weights(wider, read_checkpoint(path))


def test_a_model_that_is_not_of_its_settings_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model: .*got .*size mismatch"):
        save_weights(tmp_path / "w.safetensors", build(TINY), replace(TINY, heads=4))
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_of_the_written_settings_are_refused(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    tensors = dict(model.state_dict())
    del tensors["head.bias"]
    rewrite(path, tensors=tensors)
    with pytest.raises(ValueError, match=rf"got .*head\.bias.*{re.escape(str(path))}"):
        read_checkpoint(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    path, model = written(tmp_path)
    before = path.read_bytes()
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp_in.weight")[2, 1] = value
    message = r"must have only finite values, got NaN or infinity in blocks\.0\.mlp_in\.weight"
    with pytest.raises(ValueError, match="model: " + message):
        save_weights(path, model, TINY)
    assert path.read_bytes() == before
    rewrite(path, tensors=model.state_dict())
    with pytest.raises(ValueError, match="checkpoint: " + message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"classes": ("a",)}, r"classes: must be 2 names, got \['a'\]"),
        ({"mean": (0.0,) * 3, "std": (1.0, 1.0, float("nan"))}, r"std: .*above 0.*nan"),
    ],
)
def test_classes_and_normalisation_that_do_not_fit_are_not_written(
    about: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        save_weights(tmp_path / "w.safetensors", build(TINY), TINY, **about)
    assert list(tmp_path.iterdir()) == []


def test_extra_must_be_plain(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"PosixPath|WindowsPath"):
        save_weights(tmp_path / "w.safetensors", build(TINY), TINY, extra={"path": Path("x")})


def test_a_failed_save_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = written(tmp_path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_weights(path, build(TINY), TINY)
    monkeypatch.undo()
    assert path.read_bytes() == before
    load_weights(model, read_checkpoint(path))


def test_weights_of_another_library_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"checkpoint: .*attnconv.*got .*\[\]"):
        read_checkpoint(path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"must be written by attnconv, got a safetensors file with .*'format'"):
        read_checkpoint(path)


def test_a_file_whose_tensors_overlap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"checkpoint: .*safetensors.*got "):
        read_checkpoint(path)


def test_a_newer_version_is_refused_in_words(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    rewrite(path, metadata={"format_version": "2", "attnconv_version": "9.9"})
    with pytest.raises(ValueError, match=r"must have format version 1, got '2' .*written by attnconv 9\.9"):
        read_checkpoint(path)


@pytest.mark.parametrize("version", ["", "one", "-1", "0", "1.5", "²"])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: str) -> None:
    path, _ = written(tmp_path)
    rewrite(path, metadata={"format_version": version})
    with pytest.raises(ValueError, match=rf"checkpoint: .*got '{version}'"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"settings": "{"}, "under 'settings', got '{'"),
        ({"settings": None}, "under 'settings', got ''"),
        ({"settings": '{"kind": "attention", "heads": 0}'}, "got 0 (from"),
        ({"settings": '{"kind": "attention", "tails": 0}'}, "model.tails: ... got 0 (from"),
        ({"classes": "{}"}, "under 'classes', got '{}'"),
        ({"classes": "[" * 100_000}, "under 'classes', got '[[[["),
        ({"classes": "[1, 2]"}, "classes: must be 2 names, got [1, 2]"),
        ({"classes": '["a"]'}, "classes: must be 2 names, got ['a']"),
        ({"mean": '["x"]'}, "mean: ... got ['x']"),
        ({"mean": "[0, 0, NaN]", "std": "[1, 1, 1]"}, "mean: ... got [0, 0, nan]"),
        ({"mean": "[0, 0, 0]", "std": "[1, 1, Infinity]"}, "std: ... got [1, 1, inf]"),
        ({"mean": "[0, 0, 0]", "std": "[1, 1, 0]"}, "got [1, 1, 0]"),
        ({"mean": "[0]", "std": "[1]"}, "mean: ... got [0]"),
        ({"mean": "[0, 0, 0]"}, "mean: must be finite numbers, one per image channel (3)"),
        ({"settings": '{"kind": "attention", "layers": 100000}'}, "got 100000 (from"),
        ({"settings": '{"kind": "attention", "width": 1000000000}'}, "got 1000000000 (from"),
        ({"settings": "[" * 100_000}, "under 'settings'"),
        ({"extra": "[]"}, "under 'extra', got '[]'"),
    ],
)
def test_metadata_that_is_not_what_it_should_be_is_refused(tmp_path: Path, metadata: Any, message: str) -> None:
    path, _ = written(tmp_path)
    rewrite(path, metadata=metadata)
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):  # dots match any text
        read_checkpoint(path)


def test_equal_weights_are_equal_bytes_in_every_process() -> None:
    """The safetensors writer orders metadata by a hash that differs between processes."""
    model = build(TINY)
    files = {weights_bytes(model, TINY, About(("a", "ü"))) for _ in range(8)}
    assert len(files) == 1
    (content,) = files
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert safetensors.torch.load(content).keys() == model.state_dict().keys()
