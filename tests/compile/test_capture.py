"""Attention of compiled models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnconv.inspect import attention_operators


class Attention(nn.Module):
    """Fused attention of an image's pixels over themselves."""

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
