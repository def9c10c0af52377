"""Large problems go block by block; values and gradients are those of one block, and memory is not the matrix's."""

import pytest
import torch

from attnconv.operators import blockwise
from tests.laws import CHANNELS, HEADS, OPERATORS, Layout, images
from tests.tolerances import tolerance


@pytest.mark.parametrize("name", ["toeplitz", "content", "quadratic-generalized", "learned-content"])
@pytest.mark.parametrize("block", [1, 300, 5000])
def test_blocks_change_nothing(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, leaves = OPERATORS[name](Layout((5, 4), "zero", 2).grid(), torch.float64, 2)
    x = images(operator.grid, torch.float64, 2).requires_grad_()
    weight = torch.randn(HEADS, CHANNELS, 5, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, HEADS, 5, 4, 3, dtype=torch.float64)
    results = []
    for elements in (blockwise.BLOCK_ELEMENTS, block):
        monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
        out = operator.contract(x, weight)
        gradients = torch.autograd.grad(out.square().sum(), [x, weight, *leaves], retain_graph=True)
        results.append([out, operator.apply(values), *gradients])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, **tolerance(torch.float64, scale=10))
