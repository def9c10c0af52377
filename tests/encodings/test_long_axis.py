"""Tests of a single long axis: scores of shifts replace the factor, with equal outputs and gradients."""

from collections.abc import Callable

import pytest
import torch

from attnconv.encodings import Encoding, LearnedRelative, Quadratic, Relative
from attnconv.grid import BORDERS, Border, Grid
from attnconv.operators import Kronecker, Toeplitz
from attnconv.operators.kernels import block_sizes
from tests.tolerances import tolerance

DOUBLE = torch.float64
MAKERS: dict[str, Callable[[int], Encoding]] = {
    "quadratic": lambda dims: Quadratic(3, dims),
    "learned": lambda dims: LearnedRelative(3, dims, channels=5),
    "sinusoidal": lambda dims: Relative(2, 3, dims, terms=("position-position",)),
}


def both(encoding: Encoding, grid: Grid, x: torch.Tensor) -> tuple[Toeplitz, Kronecker]:
    """Return the operator without a stored factor and with one."""
    stored = encoding.operator(grid, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sizes, "ALL_ROWS", 1000)
        lean = encoding.operator(grid, x)
    assert isinstance(lean, Toeplitz)
    assert isinstance(stored, Kronecker)
    return lean, stored


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("sizes", [(300,), (1, 300), (290, 1)])
def test_outputs_and_gradients_equal_those_of_a_stored_factor(
    name: str, border: Border, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = MAKERS[name](len(sizes)).double()
    grid = Grid.make(sizes, border=border, padding=3 if border == "zero" or sizes == (300,) else 0)
    x = torch.randn(1, *sizes, 2, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(3, 2, 2, dtype=DOUBLE, requires_grad=True)
    leaves = [x, weight, *encoding.parameters()]
    found, operators = [], both(encoding, grid, x)
    monkeypatch.setattr(block_sizes, "ALL_ROWS", 1000)
    for operator in operators:
        out = operator.contract(x, weight)
        rows = operator.rows(torch.tensor([0, 7, grid.query_count - 1]))
        found.append([out, rows, *torch.autograd.grad(out.square().sum(), leaves)])
    for lean, stored in zip(*found, strict=True):
        scale = 10 * float(stored.detach().abs().max().clamp_min(1))
        torch.testing.assert_close(lean, stored, **tolerance(DOUBLE, scale=scale))


def test_images_of_two_long_axes_keep_their_factors() -> None:
    assert isinstance(Quadratic(9).operator(Grid.make((64, 1400)), torch.zeros(1, 64, 1400, 1)), Kronecker)
