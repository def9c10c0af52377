"""`ablated` together with nnsight, as documented in docs/surgery.md."""

from typing import Any

import pytest
import torch

from attnconv.surgery import ablated
from experiments.small_vit import SmallViT
from tests.tolerances import tolerance


def test_activations_with_changed_heads() -> None:
    nnsight: Any = pytest.importorskip("nnsight", reason="nnsight is not installed")
    model, images = SmallViT(), torch.randn(2, 3, 32, 32)
    traced = nnsight.NNsight(model)
    with ablated(model, {"blocks.0.attn": [0, 2]}), traced.trace(images):
        last = traced.blocks[1].attn.output.save()
        logits = traced.output.save()
    attention = model.blocks[0].attn
    with torch.no_grad():
        attention.proj.weight.unflatten(1, (attention.num_heads, -1))[:, [0, 2]] = 0  # the columns that read the heads
    seen: list[torch.Tensor] = []
    model.blocks[1].attn.register_forward_hook(lambda *call: seen.append(call[-1]))
    torch.testing.assert_close(logits, model(images), **tolerance(torch.float32))
    torch.testing.assert_close(last, seen[0], **tolerance(torch.float32))
