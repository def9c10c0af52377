"""Wide heads along long axes: compression to polynomials equals the plain products, and only smooth factors use it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnconv import Quadratic, SelfAttention2d
from attnconv.encodings import Encoding
from attnconv.encodings.learned_relative import LearnedRelative
from attnconv.grid import BORDERS, Border, Grid
from attnconv.operators import kronecker
from attnconv.operators.kernels.kronecker_wide import Compressed, basis, compress
from attnconv.operators.kronecker import Kronecker, contract_plainly
from tests.tolerances import tolerance

DOUBLE = torch.float64


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Compressed | None]:
    """Return the list of the results of all later calls of `compress`."""
    results: list[Compressed | None] = []

    def watched(factors: Any, values: int) -> Compressed | None:
        results.append(compress(factors, values))
        return results[-1]

    monkeypatch.setattr(kronecker, "compress", watched)
    return results


def quadratic(heads: int, alpha: float, *, dims: int = 2) -> Quadratic:
    """Return heads near the query, the last one with a sharpness of 0.5."""
    encoding = Quadratic(heads, dims, centre_std=3.0).double()
    with torch.no_grad():
        encoding.spread.fill_((2 * alpha) ** 0.5)
        encoding.spread[-1] = 1.0
    return encoding


def operator_of(encoding: Encoding, grid: Grid, x: Tensor | None = None) -> Kronecker:
    sizes = [axis.size for axis in grid.axes]
    operator = encoding.operator(grid, torch.zeros(1, *sizes, 1, dtype=DOUBLE) if x is None else x)
    assert isinstance(operator, Kronecker)
    return operator


def compare(
    encoding: Encoding, grid: Grid, dtype: torch.dtype, channels: tuple[int, int] = (4, 5), groups: int = 1
) -> None:
    """Compare outputs and gradients with those of plain products in float64."""
    sizes = [axis.size for axis in grid.axes]
    x = torch.randn(2 if math.prod(sizes) > 10_000 else 128, *sizes, channels[0], dtype=DOUBLE)
    weight = torch.randn(encoding.heads, channels[0] // groups, channels[1], dtype=DOUBLE)
    results: list[list[Tensor]] = []
    for kind in (dtype, DOUBLE):
        encoding.to(kind)
        inputs = [part.detach().to(kind).requires_grad_() for part in (x, weight)] + list(encoding.parameters())
        operator = operator_of(encoding, grid, inputs[0])
        if kind == dtype and not results:
            out = operator.contract(inputs[0], inputs[1], groups)
        else:
            out = contract_plainly(inputs[0], inputs[1], *operator.factors)
        results.append([out, *torch.autograd.grad(out.square().mean(), inputs)])
    for got, expected in zip(*results, strict=True):
        got, expected = got.detach().double(), expected.detach()
        error = float((got - expected).norm() / expected.norm())
        assert error < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_every_border(border: Border, dtype: torch.dtype, found: list[Compressed | None]) -> None:
    grid = Grid.make((200, 180), padding=2, border=border)
    compare(quadratic(5, 0.00005), grid, dtype)
    assert len(found) == 2  # in the forward and in the backward pass
    for one in found:
        assert one is not None
        assert (one.heads, one.others) == ([0, 1, 2, 3], [4])


def test_wide_padding_is_not_compressed() -> None:
    grid = Grid.make((200, 180), padding=20, border="reflect")
    factors = operator_of(quadratic(5, 0.00005), grid).factors
    assert compress(factors, 2**20) is None


@pytest.mark.parametrize("sizes", [(300,), (6, 300), (300, 6), (3, 120, 110)])
@pytest.mark.parametrize("stride", [1, 3])
def test_any_number_of_axes_long_and_short(sizes: tuple[int, ...], stride: int, found: list[Compressed | None]) -> None:
    compare(quadratic(4, 0.00005, dims=len(sizes)), Grid.make(sizes, stride=stride), torch.float32)
    assert all(one is not None for one in found)


@pytest.mark.parametrize(("channels", "groups"), [((6, 2), 1), ((2, 6), 1), ((4, 6), 2)])
def test_channels_and_groups(channels: tuple[int, int], groups: int, found: list[Compressed | None]) -> None:
    compare(quadratic(4, 0.00005), Grid.make((200, 180)), torch.float32, channels, groups)
    assert all(one is not None for one in found)


@pytest.mark.parametrize("sizes", [(211, 199), (300, 180), (192, 320)])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_panels(sizes: tuple[int, int], dtype: torch.dtype, found: list[Compressed | None]) -> None:
    compare(quadratic(9, 0.002), Grid.make(sizes), dtype)
    blocks = [one.keys[axis] for one in found if one is not None for axis in range(2)]
    assert len(blocks) == 4
    assert all(
        (block is not None and len(block) < size) == (sizes != (211, 199))
        for block, size in zip(blocks, 2 * sizes, strict=False)
    )


@pytest.mark.parametrize("stride", [10, 30])
def test_few_queries_with_folded_padding(stride: int) -> None:
    compare(quadratic(9, 0.00005, dims=1), Grid.make((300,), stride=stride, padding=2, border="reflect"), DOUBLE)


@pytest.mark.parametrize(("size", "alpha", "block", "most"), [(512, 0.001, 256, 80), (1024, 0.01, 64, 450)])
def test_the_coarse_grid_is_much_smaller(size: int, alpha: float, block: int, most: int) -> None:
    factors = operator_of(quadratic(9, alpha).float(), Grid.make((size, size)), torch.zeros(1, size, size, 1)).factors
    wide = compress(factors, 64 * size**2)
    assert wide is not None
    assert all(max(factor.shape[1:]) <= most for factor in wide.factors)
    assert all(keys is not None and len(keys) == block for keys in wide.keys)


def test_nan_stays_nan() -> None:
    layer = SelfAttention2d(2, 3, 2)
    with torch.no_grad():
        layer.encoding.get_parameter("spread").copy_(torch.tensor([[1e-3], [math.nan]]))
    x = torch.randn(1, 2, 200, 4, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None
    assert bool(out.isnan().all() and x.grad.isnan().all())


def test_narrow_heads_are_not_compressed() -> None:
    factors = operator_of(quadratic(9, 0.05), Grid.make((300, 300))).factors
    assert compress(factors, 2**20) is None


def test_only_smooth_encodings_are_compressed_in_training(found: list[Compressed | None]) -> None:
    layer = SelfAttention2d(2, 2, 3, encoding=LearnedRelative(3, channels=2, max_shift=200))
    x = torch.randn(1, 2, 200, 200)
    layer(x).sum().backward()
    assert found == []
    with torch.no_grad():
        layer(x)
    assert len(found) == 1


def test_bfloat16(found: list[Compressed | None]) -> None:
    layer = SelfAttention2d(8, 8, 3, encoding=quadratic(3, 0.0005).float())
    x = torch.randn(1, 8, 300, 300)
    exact = layer(x)
    low: Tensor = layer.to(torch.bfloat16)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert all(one is not None for one in found)
    torch.testing.assert_close(low.float(), exact, **tolerance(torch.bfloat16))


def test_second_derivatives(found: list[Compressed | None]) -> None:
    encoding, x = quadratic(3, 0.00005), torch.randn(1, 200, 180, 4, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(3, 4, 2, dtype=DOUBLE)
    operator = operator_of(encoding, Grid.make((200, 180)), x)
    results = []
    for out in (operator.contract(x, weight), contract_plainly(x, weight, *operator.factors)):
        (first,) = torch.autograd.grad(out.square().sum(), encoding.spread, create_graph=True)
        results.append(torch.autograd.grad(first.sum(), encoding.centres, retain_graph=True)[0])
    assert found[0] is not None
    torch.testing.assert_close(*results, **tolerance(DOUBLE, scale=1e4))


@pytest.mark.parametrize("ends", [0, 8])
def test_the_basis_is_orthonormal_and_contains_polynomials(ends: int) -> None:
    functions = basis(300, 100, ends, DOUBLE, torch.device("cpu"))
    torch.testing.assert_close(functions.mT @ functions, torch.eye(100 + 2 * ends, dtype=DOUBLE), **tolerance(DOUBLE))
    ramp, some = torch.linspace(-1, 1, 300, dtype=DOUBLE), functions[:, : 2 * ends + 2]
    torch.testing.assert_close(some @ (some.mT @ ramp), ramp, **tolerance(DOUBLE))
