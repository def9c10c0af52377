"""The trained models in the package and in the documentation, and the scripts that write them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from attnconv.explorer import example, read_payload
from tests.explorer.pages import place_stand_in

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name: str) -> ModuleType:
    """Load a script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trained_models_show_labelled_colour_images() -> None:
    files = sorted((DOCS / "models").glob("*.safetensors"))
    assert {file.stem for file in files} == {"learned", "learned-content"}
    assert len(example()) <= 120_000
    for content in (example(), *(file.read_bytes() for file in files)):
        found = read_payload(content)
        assert len(content) <= script("write_models").LARGEST
        assert (found.patch, found.random, len(found.layers)) == ((4, 4), False, 4)
        assert found.images.float().std(-1).mean() > 1
        assert None not in found.labels
        assert found.logits is not None
        best = [found.classes[index] for index in found.logits.argmax(-1).tolist()]
        right = [some == label for some, label in zip(best, found.labels, strict=True)]
        assert {True, False} == set(right)  # correct and wrong predictions
        for layer in found.layers:
            off, convolution = (
                (layer.tensors[f"{kind}_logits"] - found.logits[:, None]).norm() for kind in ("zero", "convolution")
            )
            assert 0 < convolution < off  # trained heads are closer to convolutions than to nothing


def test_the_page_lists_the_trained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_stand_in(tmp_path, monkeypatch)
    page = script("write_page").main(str(tmp_path / "site"))
    titles = re.findall(r'"title": "([^"]*)"', page.read_text(encoding="utf-8"))
    assert titles == ["Quadratic encoding", "Learned encoding", "Learned encoding with content"]
    assert sorted(file.name for file in (tmp_path / "site" / "models").iterdir()) == [
        "learned-content.js",
        "learned.js",
        "quadratic.js",
    ]


class Constant(nn.Module):
    """Predicts one class for every image."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.label = label

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.full((len(images),), self.label), 4).float()


def test_the_first_of_each_class_and_two_that_all_models_get_wrong() -> None:
    labels = torch.tensor([2, 0, 2, 3, 1, 0, 3, 2, 3, 3])
    models = [Constant(0), Constant(1), Constant(0)]
    chosen = script("write_models").choose(models, torch.zeros(10, 3, 2, 2), labels)
    assert chosen.tolist() == [1, 4, 0, 3, 2, 6]
