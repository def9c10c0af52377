"""Files of recast networks: round trips, and errors for untrusted or mismatched files."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from attnconv.convert import recast
from attnconv.layers import SelfAttention
from attnconv.models.checkpoint import About, save_recast
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.settings import ResNetSettings

SETTINGS = ResNetSettings(widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1), image_size=16)
ABOUT = About(tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3)


def written(path: Path, **changes: Any) -> Path:
    """Write a small recast ResNet with changed metadata."""
    model = recast(build(SETTINGS).eval())
    save_recast(path, model, SETTINGS, about=ABOUT)
    with safetensors.safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, {**header, **{k: json.dumps(v) for k, v in changes.items()}})
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    model = recast(build(SETTINGS).double().eval())
    path, x = tmp_path / "new" / "w.safetensors", torch.randn(1, 3, 16, 16, dtype=torch.float64)
    save_recast(path, model, SETTINGS, about=ABOUT)
    state = torch.random.get_rng_state()
    found = load(path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (found.settings, found.classes, found.mean, found.std) == (
        SETTINGS,
        tuple("abcdefghij"),
        (0.5,) * 3,
        (0.25,) * 3,
    )
    torch.testing.assert_close(found.model(x), model(x), rtol=0, atol=0)
    assert any(isinstance(layer, SelfAttention) for layer in found.model.modules())


def test_other_versions_and_other_weights_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "v.safetensors", format_version=2)
    with pytest.raises(ValueError, match=r"checkpoint: .*got '2'"):
        load(path)
    path = written(tmp_path / "o.safetensors", only=["stem"])
    with pytest.raises(ValueError, match=r"checkpoint: .*got Error\(s\) in loading"):
        load(path)
    path = written(tmp_path / "m.safetensors", model=["resnet"])
    with pytest.raises(ValueError, match=r"checkpoint: .*got .*resnet"):
        load(path)
    path = written(tmp_path / "t.safetensors", model={"spec": 5, "settings": 7})
    with pytest.raises(ValueError, match=r"checkpoint: .*got 5"):
        load(path)
    path = written(tmp_path / "c.safetensors", classes=["a", "b"])
    with pytest.raises(ValueError, match=r"classes: .*got \['a', 'b'\]"):
        load(path)
    path = written(tmp_path / "n.safetensors", mean=[0.5, 0.5, float("nan")])
    with pytest.raises(ValueError, match=r"mean: .*got \[0\.5, 0\.5, nan\]"):
        load(path)
    path = written(tmp_path / "f.safetensors", model={"spec": "os:abort"})
    with pytest.raises(ValueError, match=r"checkpoint: .*got 'os:abort'"):
        load(path)
