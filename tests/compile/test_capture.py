"""Attention of compiled models, and head replacement in them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnconv.inspect import attention_operators
from attnconv.surgery import replace_heads
from tests.inspect.sharp_vit import images, sharp


class Attention(nn.Module):
    """Fused self-attention over the pixels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


@pytest.mark.compile
def test_a_compiled_model_is_read_as_it_was_written() -> None:
    model, images = Attention(), torch.randn(1, 2, 3, 3)
    compiled: Any = torch.compile(model, backend="eager")
    (operator,) = attention_operators(compiled, images).values()
    (expected,) = attention_operators(model, images).values()
    torch.testing.assert_close(operator.to_dense(), expected.to_dense())


@pytest.mark.compile
def test_replaced_heads_run_in_one_graph() -> None:
    changed = replace_heads(sharp(), images(), count=3).model
    compiled: Any = torch.compile(changed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), changed(images()))
