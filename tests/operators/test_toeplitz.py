"""Tests of mixing by scores of shifts: windows and spectrum equal the whole matrix, and their costs."""

import math

import pytest
import torch
from torch import Tensor

from attnconv.encodings import GeneralizedQuadratic
from attnconv.grid import Grid
from attnconv.operators import Toeplitz, toeplitz
from attnconv.operators.kernels import block_sizes
from attnconv.operators.toeplitz import mix_by_shift, mix_plainly
from tests.laws import CHANNELS, HEADS, contracted, images
from tests.tolerances import tolerance

DOUBLE = torch.float64
GRIDS = {
    "line": Grid.make((37,)),
    "square": Grid.make((20, 13)),
    "stride": Grid.make((23, 18), stride=(2, 3)),
    "zero": Grid.make((17, 12), padding=((1, 3), (2, 0)), border="zero"),
    "reflect": Grid.make((17, 12), padding=2, border="reflect"),
    "transposed": Grid.transposed((7, 6), stride=2, padding=1, window=(3, 3)),
    "cube": Grid.make((5, 9, 6)),
}
HEADS_OF = {  # centre, root of the precision along each axis, coupling of the axes
    "local": (1.0, 1.0, 0.4),
    "sharp": (-2.0, 9.0, 0.0),
    "wide": (0.0, 0.05, 0.5),
    "beyond": (40.0, 0.7, 0.5),
    "far beyond": (-3000.0, 0.9, 0.2),
}


def table_of(grid: Grid, name: str, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Return the scores of a head with a full covariance."""
    centre, root, coupling = HEADS_OF[name]
    encoding = GeneralizedQuadratic(1, grid.dims).to(dtype)
    with torch.no_grad():
        encoding.centres.fill_(centre)
        encoding.root_precision.copy_(
            root * (torch.eye(grid.dims) + coupling * torch.ones(grid.dims, grid.dims).tril(-1))
        )
    operator = encoding.operator(grid, torch.zeros(1, *grid.sizes, 1, dtype=dtype))
    assert isinstance(operator, Toeplitz)
    return operator.table[0].detach()


def inputs_of(grid: Grid, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.randn(grid.lattice_count, 2, 3, dtype=dtype, requires_grad=True)
    return values, table.clone().requires_grad_()


def both(grid: Grid, values: Tensor, table: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results and gradients: the fast form, and the plain form in float64."""
    found = []
    for out in (mix_by_shift(grid, values, table), mix_plainly(grid, values.double(), table).to(values.dtype)):
        gradients = torch.autograd.grad(
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), [values, table]
        )
        found.append((out, *gradients))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("head", [*HEADS_OF, "any"])
@pytest.mark.parametrize("name", GRIDS)
def test_windows_equal_the_matrix(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "WINDOW_TILE", 8)
    monkeypatch.setattr(block_sizes, "WINDOW_BLOCK", 4000)
    grid = GRIDS[name]
    any_table = torch.randn([axis.shift_count for axis in grid.axes], dtype=DOUBLE) * 30
    table = any_table if head == "any" else table_of(grid, head)
    for fast, plain in both(grid, *inputs_of(grid, table, DOUBLE)):
        torch.testing.assert_close(fast, plain, **tolerance(DOUBLE, scale=100))


@pytest.mark.parametrize("head", HEADS_OF)
@pytest.mark.parametrize("name", GRIDS)
def test_spectrum_equals_the_matrix(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toeplitz, "_prefers_spectrum", lambda *_: True)
    monkeypatch.setattr(block_sizes, "SPECTRUM_BLOCK", 24000)
    monkeypatch.setattr(block_sizes, "ROWS_BLOCK", 80000)
    grid = GRIDS[name]
    table = table_of(grid, head)
    for fast, plain in both(grid, *inputs_of(grid, table, torch.float32)):
        torch.testing.assert_close(fast, plain, **tolerance(torch.float32, scale=10))


def test_each_head_goes_the_cheaper_way() -> None:
    grid, values = Grid.make((96, 96)), torch.zeros(96 * 96, 64)
    ways = {}
    for name in HEADS_OF:
        table = table_of(grid, name)
        ways[name] = toeplitz._prefers_spectrum(grid, toeplitz.tiles_of(grid, table, values.dtype), values, table)
    assert ways == {"local": False, "sharp": False, "wide": True, "beyond": False, "far beyond": False}
    wide = table_of(grid, "wide")
    tiles = toeplitz.tiles_of(grid, wide, DOUBLE)
    assert not toeplitz._prefers_spectrum(grid, tiles, values.double(), wide)  # float64 needs windows
    assert not toeplitz._prefers_spectrum(grid, tiles, values, wide.float())


def test_windows_cost_the_same_per_pixel_on_any_image() -> None:
    costs = []
    for side in (128, 512):
        grid = Grid.make((side, side))
        costs.append(toeplitz.work_of(toeplitz.tiles_of(grid, table_of(grid, "local"), torch.float32)) / side**2)
    assert costs[1] < 1.1 * costs[0]
    assert costs[1] < 1000  # of 65,536 keys


@pytest.mark.parametrize("name", ["square", "zero", "stride"])
def test_derivatives_of_every_kind(name: str) -> None:
    grid = {
        "square": Grid.make((4, 3)),
        "zero": Grid.make((3, 3), padding=1, border="zero"),
        "stride": Grid.make((5, 3), stride=2),
    }[name]
    values, table = inputs_of(grid, table_of(grid, "local"), DOUBLE)

    def mix(values: Tensor, table: Tensor) -> Tensor:
        return mix_by_shift(grid, values, table)

    assert torch.autograd.gradcheck(mix, (values, table), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(mix, (values, table), fast_mode=True)
    many = torch.stack([table, table / 2]).detach()
    got = torch.func.vmap(mix, in_dims=(None, 0))(values.detach(), many)
    torch.testing.assert_close(got[1], mix_plainly(grid, values, table / 2))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("outputs", [6, 24])
@pytest.mark.parametrize("name", ["square", "zero", "reflect", "stride", "line", "cube"])
def test_large_problems_go_head_by_head(name: str, outputs: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "ALL_ROWS", 0)
    grid = GRIDS[name]
    tables = torch.stack([table_of(grid, head) for head in ("local", "wide", "beyond")]).requires_grad_()
    operator = Toeplitz(grid, tables)
    x = images(grid, DOUBLE, 2).requires_grad_()
    weight = torch.randn(HEADS, CHANNELS // groups, outputs, dtype=DOUBLE, requires_grad=True)
    outs = (operator.contract(x, weight, groups), contracted(operator, x, weight, groups))
    results = [(out, *torch.autograd.grad(out.square().sum(), [x, weight, tables])) for out in outs]
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, **tolerance(DOUBLE, scale=1000))
    values = torch.randn(2, HEADS, *grid.sizes, 4, dtype=DOUBLE)
    mixed = (operator.to_dense() @ values.flatten(2, -2)).unflatten(2, grid.query_sizes)
    torch.testing.assert_close(operator.apply(values), mixed, **tolerance(DOUBLE, scale=100))


def test_half_precision_follows_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "ALL_ROWS", 0)
    grid = GRIDS["square"]
    operator = Toeplitz(
        grid, torch.stack([table_of(grid, head) for head in ("local", "wide", "sharp")]), dtype=torch.float32
    )
    x, weight = images(grid, torch.float32, 2), torch.randn(HEADS, CHANNELS, 24) / math.sqrt(HEADS * CHANNELS)
    exact = operator.contract(x, weight)
    half = operator.contract(x.bfloat16(), weight.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, **tolerance(torch.bfloat16, scale=10))
    with torch.autocast("cpu", torch.bfloat16):
        auto = operator.contract(x, weight)
    assert auto.dtype == torch.bfloat16


def line_of(root: float, centre: float, size: int) -> Tensor:
    """Return the scores of a Gaussian head on one axis."""
    return -0.5 * (root * (torch.arange(1.0 - size, size, dtype=DOUBLE) - centre)).square()


def test_a_bright_pixel_that_no_query_sees_leaves_the_spectrums_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform spreads rounding errors over all rows, and rows of a head that points outside have tiny sums."""
    monkeypatch.setattr(toeplitz, "_prefers_spectrum", lambda *_: True)
    values = torch.randn(400, 1)
    values[0] = 1e5
    grid, table = Grid.make((400,)), line_of(0.05, 300.0, 400)
    plain = mix_plainly(grid, values, table)
    assert plain.abs().max() < 10
    torch.testing.assert_close(mix_by_shift(grid, values, table), plain, **tolerance(torch.float32))


def test_a_wide_head_that_points_to_one_side_needs_no_row_of_its_own() -> None:
    line = line_of(0.05, 40.0, 96)
    _, _, trusted = toeplitz._weights(Grid.make((96, 96)), line[:, None] + line)
    assert bool(trusted.all())
