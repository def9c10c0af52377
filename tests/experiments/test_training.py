"""`experiments.training` and the scripts that use it, at a tiny size."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.data.image_set import ImageSet, Splits
from attnconv.layers import SelfAttention
from attnconv.training.loop import TrainingLoop
from attnconv.training.settings import TrainSettings
from experiments import attention_only, gated_recast, starts, training
from experiments.resnet20 import ResNet20
from experiments.small_vit import SmallViT
from experiments.training import trained
from tests.tolerances import tolerance


def images(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(count)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.arange(count) % 10)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Return random images in place of CIFAR-10."""
    made = Splits(images(24), images(0), images(16), tuple("0123456789"), (0.5,) * 3, (0.25,) * 3, "made")
    monkeypatch.setattr(training, "load_data", lambda _: made)
    return made


def test_an_interrupted_run_continues_as_if_it_had_not_been(
    data: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = starts.recipe(starts.ROWS["default"], starts.Settings(tmp_path))
    recipe = replace(recipe, train=replace(recipe.train, epochs=10, batch_size=8, accelerator="cpu"))

    def make() -> SmallViT:
        torch.manual_seed(0)
        return SmallViT(patch=8, dim=8, depth=1, num_heads=2, prefix=0)

    def train(folder: str) -> dict[str, Any]:
        return trained(tmp_path / folder, "a model", [], make, recipe.settings(tmp_path, 0), data)

    whole, first_epoch = train("whole"), TrainingLoop.train_epoch

    def stop(loop: TrainingLoop, on_step: Any) -> None:
        if loop.epoch == 1:
            raise KeyboardInterrupt
        first_epoch(loop, on_step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "train_epoch", stop)
        with pytest.raises(KeyboardInterrupt):
            train("parts")
    assert len(list((tmp_path / "parts").glob("*/a-model.state"))) == 1
    parts = train("parts")
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    assert parts["environment"]["versions"]["torch"] == torch.__version__
    assert len(parts["seconds"]) == 10
    assert len(parts["test_accuracy"]) == 5  # after every second epoch
    monkeypatch.setattr(training, "_train", None)  # a call would fail
    assert train("parts") == parts


def test_starts_from_beginning_to_end(data: Splits, tmp_path: Path) -> None:
    made = starts.Settings(
        tmp_path,
        out=tmp_path / "out",
        kept=tmp_path / "kept",
        rows=("default", "impulse", "convolution, writers not projected"),
        seeds=(0, 1),
        width=32,
        heads=2,
        depth=1,
        patch=8,
        epochs=1,
        batch_size=8,
        device="cpu",
    )
    starts.main(made)
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["row"] for run in record["runs"]] == 2 * list(made.rows)
    assert "| impulse |" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "test-accuracy.svg").is_file()


@pytest.mark.parametrize("name", attention_only.ROWS)
def test_attention_only_models(name: str, tmp_path: Path) -> None:
    row = attention_only.ROWS[name]
    model: Any = attention_only.model_of(row, 0, attention_only.Settings(tmp_path, width=36))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    for block in () if row.resnet else model.blocks:
        if row.values in ("+I", "-I"):
            total = block.attention.weight.sum(0)
            torch.testing.assert_close(total, torch.eye(*total.shape) * (1 if row.values == "+I" else -1))
        if row.spread is not None:
            assert set(block.attention.encoding.spread.flatten().tolist()) == {row.spread}
        if row.anywhere:
            assert float(block.attention.encoding.centres.detach().abs().max()) > 2


class TestGatedRecast:
    @pytest.fixture
    def made(self, tmp_path: Path) -> gated_recast.Settings:
        torch.manual_seed(0)
        state = {f"module.{name}": tensor for name, tensor in ResNet20().state_dict().items()}
        torch.save({"state_dict": state}, tmp_path / "cnn.th")
        return gated_recast.Settings(tmp_path / "cnn.th", tmp_path, out=tmp_path / "out", kept=tmp_path / "kept")

    def test_from_beginning_to_end(self, made: gated_recast.Settings, data: Splits, tmp_path: Path) -> None:
        recipe = replace(made.recipe, train=TrainSettings(epochs=1, batch_size=8, accelerator="cpu"))
        gated_recast.main(replace(made, seeds=(0,), recipe=recipe))
        record = json.loads((tmp_path / "out" / "results.json").read_text())
        assert [run["row"] for run in record["runs"]] == ["CNN", "gated attention"]

    def test_closed_gates_are_the_cnn_and_open_gates_attend_to_content(self, made: gated_recast.Settings) -> None:
        x, cnn = torch.randn(2, 3, 32, 32), gated_recast.build("CNN", 0, made).eval()
        closed = gated_recast.build("gated attention", 0, replace(made, gate=-100.0)).eval()
        torch.testing.assert_close(closed(x), cnn(x), **tolerance(torch.float32))
        layers = [layer for layer in closed.modules() if isinstance(layer, SelfAttention)]
        assert len(layers) == 5
        layer, pixels = layers[0], torch.randn(1, 64, 4, 4)
        with torch.no_grad():
            layer.encoding.get_parameter("gate").fill_(100.0)
        first = layer.operator(pixels).to_dense()
        torch.testing.assert_close(
            first.sum(-1), torch.ones(1, 9, 16), **tolerance(torch.float32)
        )  # no attention to the padding
        assert not torch.allclose(first, layer.operator(pixels + torch.randn_like(pixels)).to_dense())

    def test_gradients_reach_gates_queries_and_keys(self, made: gated_recast.Settings) -> None:
        model = gated_recast.build("gated attention", 0, made)
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        gates = [part for part in model.modules() if isinstance(part, gated_recast.Gated)]
        assert all(part.gate.grad is not None and bool(part.gate.grad.abs().sum() > 0) for part in gates)
        assert all(float(part.query_key.weight.grad.abs().sum()) > 0 for part in gates)  # type: ignore[union-attr]
