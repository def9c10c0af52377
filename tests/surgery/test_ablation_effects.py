"""Effects of single heads: equal to loops over `ablated`, with accuracy on a model whose predictions are known."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv import SelfAttention2d
from attnconv.layers import GatedPositionalAttention
from attnconv.models import build
from attnconv.surgery import ablated, head_effects
from attnconv.surgery.head_ablation import HeadChange
from experiments.small_vit import Attention, PoolingViT, SmallViT


@pytest.mark.parametrize("to", get_args(HeadChange))
def test_equal_to_a_loop(to: HeadChange) -> None:
    model, images = SmallViT(prefix=2).double(), torch.randn(5, 3, 32, 32, dtype=torch.float64)
    model.train()
    labels = torch.tensor([3, 1, 4, 1, 5])
    found = head_effects(model, images, labels=labels, to=to, batch=2)
    assert model.training
    assert [(row["layer"], row["head"]) for row in found.rows()] == [
        (f"blocks.{layer}.attn", head) for layer in range(2) for head in range(4)
    ]
    assert (found.to, found.images) == (to, 5)
    with torch.no_grad():
        before = model(images)
        for row in found.rows():
            with ablated(model, {row["layer"]: [row["head"]]}, to=to):
                after = torch.cat([model(some) for some in images.split(2)])
            assert row["output_change"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
            assert row["accuracy"] == float((after.argmax(1) == labels).double().mean())
        assert found.accuracy == float((before.argmax(1) == labels).double().mean())


class Halves(nn.Module):
    """Classify an image by its brighter half: head 0 votes for class 0 or 1, and head 1 does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention2d(1, 2, heads=2, bias=False)
        assert self.attention.weight is not None
        with torch.no_grad():
            self.attention.weight.copy_(torch.tensor([[[1.0, -1.0]], [[0.0, 0.0]]]))

    def forward(self, images: Tensor) -> Tensor:
        left, right = self.attention(images).mean(2).chunk(2, -1)
        out: Tensor = (left - right).mean(-1)
        return out


def test_accuracy_of_a_known_model() -> None:
    images = torch.zeros(4, 1, 6, 6)
    for index, columns in enumerate((slice(3), slice(3, 6)) * 2):
        images[index, :, :, columns] = 1.0
    batches = list(images.split(3))
    found = head_effects(Halves(), batches, labels=torch.tensor([0, 1, 0, 1]), layers=["attention"])
    first, second = found.heads
    assert (found.accuracy, first.accuracy, second.accuracy) == (1.0, 0.5, 1.0)  # ties are predicted as class 0
    assert (first.output_change, second.output_change) == (1.0, 0.0)
    assert str(found).splitlines() == [
        "layer      head  output change  accuracy",
        "attention     0         1.0000    0.5000",
        "attention     1         0.0000    1.0000",
        "Accuracy without changes: 1.0000",
    ]
    plain = head_effects(Halves(), images)
    assert (plain.accuracy, plain.heads[0].accuracy) == (None, None)
    assert str(plain).splitlines()[-1] == "attention     1         0.0000"


def test_unreadable_layers_are_listed() -> None:
    model, images = PoolingViT(), torch.randn(2, 3, 32, 32)
    with pytest.warns(UserWarning, match="head_effects: .*: attn_pool$"):
        found = head_effects(model, images)
    assert list(dict.fromkeys(effect.layer for effect in found.heads)) == ["blocks.0.attn", "blocks.1.attn"]
    assert list(found.left_out) == ["attn_pool"]
    assert str(found).splitlines()[-1].startswith("Left out attn_pool: ")
    assert {effect.layer for effect in head_effects(model, images, layers=["blocks.1.attn"]).heads} == {"blocks.1.attn"}
    with pytest.raises(ValueError, match="model: the attention of module 'attn_pool' must be readable"):
        head_effects(model, images, layers=["attn_pool"])


class PartlyReadable(nn.Module):
    """Attention among tokens, and to a learned memory, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Memory(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x)
        return out


class Memory(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query = torch.randn(1, 1, 5, 24, generator=torch.Generator().manual_seed(0)).expand(len(x), -1, -1, -1)
        memory = F.scaled_dot_product_attention(query, x[:, None], x[:, None])
        return super().forward(x) + memory.mean((1, 2))[:, None]


def test_partly_readable_modules_are_listed() -> None:
    model, tokens = nn.Sequential(PartlyReadable(), Attention(24, 3)), torch.randn(2, 9, 24)
    with pytest.warns(UserWarning, match="left out: 0.attention$"):
        found = head_effects(model, tokens, grid=(3, 3))
    assert {effect.layer for effect in found.heads} == {"1"}


def test_gated_attention_is_listed() -> None:
    model = nn.Sequential(GatedPositionalAttention(24, 2), Attention(24, 2))
    with pytest.warns(UserWarning, match="left out: 0$"):
        found = head_effects(model, torch.randn(2, 9, 24), grid=(3, 3))
    assert {effect.layer for effect in found.heads} == {"1"}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vit"}, "model: .*got str"),
        ({"images": []}, "images: .*got 0"),
        ({"images": torch.zeros(1, 1, 8, 8)}, "images: .*constant"),
        ({"images": torch.rand(1, 3, 8, 8)}, r"images: .*got shape \(1, 3, 8, 8\)"),
        ({"to": "half"}, "to: .*got 'half'"),
        ({"batch": 0}, "batch: .*got 0"),
        ({"layers": ["head"]}, r"layers: .*got \['head'\]"),
        ({"labels": torch.tensor([0])}, r"labels: .*\(2\), got 1"),
        ({"labels": [0, 1]}, "labels: must be an int64 tensor .*got list"),
        ({"labels": torch.tensor([0.0, 1.0])}, r"labels: must be an int64 tensor .*got \(2,\) torch.float32"),
        ({"labels": torch.tensor([0, 1, 2])}, r"labels: .*\(2\), got 3"),
        ({"labels": torch.tensor([0, 10])}, r"labels: .*shape \(2, 10\), got \[0, 10\]"),
        ({"options": {"mask": 1}}, "options: .*got mask"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": build("quadratic-digits", layers=1), "images": torch.rand(2, 1, 8, 8), **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        head_effects(**arguments)
