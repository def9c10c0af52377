"""Kronecker equals Dense, values and all gradients: 300 random layers at full scale."""

import random

import pytest
import torch

from attnconv import Dense, Grid, LearnedRelative, Quadratic
from attnconv.encodings import SeparableEncoding
from attnconv.grid import BORDERS

CASES = 300
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # largest difference over largest reference value


def drawn(case: int) -> tuple[Grid, SeparableEncoding]:
    """Return a random grid and encoding: 1 to 3 axes, all border rules, strides, paddings, alpha from 0.005 to 50."""
    draw = random.Random(case)
    torch.manual_seed(case)
    dims = draw.randint(1, 3)
    grid = Grid.make(
        [draw.randint(1, (12, 8, 4)[dims - 1]) for _ in range(dims)],
        stride=[draw.randint(1, 3) for _ in range(dims)],
        padding=[(draw.randint(0, 3), draw.randint(0, 3)) for _ in range(dims)],
        border=draw.choice(BORDERS),
    )
    heads = draw.randint(1, 5)
    if draw.random() < 0.3:
        return grid, LearnedRelative(heads, dims, channels=8, max_shift=draw.randint(0, 6))
    encoding = Quadratic(heads, dims, diagonal=draw.random() < 0.5, centre_std=draw.choice((0.5, 2.0, 20.0)))
    with torch.no_grad():
        encoding.spread.copy_(10 ** (torch.rand_like(encoding.spread) * 2 - 1))
    return grid, encoding


def values_and_gradients(
    grid: Grid, encoding: SeparableEncoding, dtype: torch.dtype, *, dense: bool
) -> list[torch.Tensor]:
    encoding = encoding.to(dtype)
    torch.manual_seed(0)
    x = torch.randn(2, *grid.sizes, 4, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(encoding.heads, 4, 6, dtype=torch.float64).to(dtype).requires_grad_()
    operator = encoding.operator(grid, x)
    chosen = Dense.from_scores(grid, encoding.terms(grid, x)["position-position"]) if dense else operator
    out = chosen.contract(x, weight)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, weight, *encoding.parameters()], gradient)]


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_kronecker_equals_dense(dtype: torch.dtype, verify_scale: float) -> None:
    worst = 0.0
    cases = max(1, round(CASES * verify_scale))
    for case in range(cases):
        grid, encoding = drawn(case)
        fast = values_and_gradients(grid, encoding, dtype, dense=False)
        slow = values_and_gradients(grid, encoding, dtype, dense=True)
        # Values that cancel, such as the gradient of a constant score, are compared with a tenth of the layer's
        # largest value, or with 1e-6 if all keys are zero padding, where Kronecker skips weights below eps^2.
        floor = max(0.1 * max(float(value.abs().max()) for value in slow), 1e-6)
        errors = [
            float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in zip(fast, slow, strict=True)
        ]
        worst = max(worst, *errors)
        assert max(errors) <= LIMITS[dtype], f"case {case}: {grid}, {encoding}: {errors}"
    print(f"Kronecker against Dense, {dtype}: {cases} cases, largest relative difference {worst:.1e}")
