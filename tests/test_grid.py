"""Every rule of docs/grid.md."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from attnconv.encodings import Quadratic
from attnconv.grid import BORDERS, Axis, Border, Grid, padding_pairs
from attnconv.operators import Dense, Kronecker
from tests.spec import SpecAxis, spec_attention
from tests.tolerances import tolerance

axes = st.builds(
    lambda m, n, stride, offset, pads, border: Axis(m, n, stride, offset, pads, 1, border),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(-2, 3),
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.sampled_from(BORDERS),
) | st.builds(
    lambda m, n, pads, spacing: Axis(m, n, 1, 0, pads, spacing, "zero"),
    st.integers(1, 5),
    st.integers(1, 8),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(1, 3),
)


def spec(axis: Axis) -> SpecAxis:
    return SpecAxis(
        axis.size, axis.queries, axis.stride, axis.offset, axis.padding[0], axis.padding[1], axis.spacing, axis.border
    )


@given(axes)
def test_law_1_and_3_positions_and_lattice(axis: Axis) -> None:
    assert axis.query_positions().tolist() == spec(axis).queries()
    assert axis.lattice_positions().tolist() == spec(axis).lattice()
    assert axis.lattice_size == len(spec(axis).lattice())
    shifts = [[p - q for p in spec(axis).lattice()] for q in spec(axis).queries()]
    assert axis.shifts().tolist() == shifts


@given(axes)
def test_law_4_sources(axis: Axis) -> None:
    expected = [-1 if (key := spec(axis).source(p)) is None else key for p in spec(axis).lattice()]
    assert axis.sources(axis.lattice_positions()).tolist() == expected


@given(axes)
def test_all_shifts_hold_each_querys_window(axis: Axis) -> None:
    if axis.spacing > 1:
        return
    table = axis.all_shifts()
    assert table.shape == (axis.shift_count,)
    for i, row in enumerate(axis.shifts()):
        start = axis.stride * (axis.queries - 1 - i)
        torch.testing.assert_close(table[start : start + axis.lattice_size], row)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_law_2_free_layer_has_as_many_queries_as_a_strided_image(size: int, stride: int, padding: int) -> None:
    grid = Grid.make((size,), stride=stride, padding=padding, border="zero")
    assert grid.query_sizes == (len(range(0, size, stride)),)


@given(st.integers(4, 12), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 2))
def test_law_2_window_gives_the_convolutions_count(
    size: int, stride: int, pad: int, kernel: int, dilation: int
) -> None:
    window = dilation * (kernel - 1) + 1
    if size + 2 * pad < window:
        return
    expected = F.conv1d(torch.zeros(1, 1, size), torch.zeros(1, 1, kernel), None, stride, pad, dilation).shape[-1]
    grid = Grid.make((size,), stride=stride, padding=pad, border="zero", window=(window,))
    assert grid.query_sizes == (expected,)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 1))
def test_law_5_transposed_count_and_lattice(
    size: int, stride: int, pad: int, kernel: int, dilation: int, extra: int
) -> None:
    window = dilation * (kernel - 1) + 1
    if extra >= max(stride, dilation) or stride * (size - 1) + window - 2 * pad + extra < 1:
        return
    grid = Grid.transposed((size,), stride=stride, padding=pad, output_padding=extra, window=(window,))
    weight = torch.zeros(1, 1, kernel)
    made = F.conv_transpose1d(torch.zeros(1, 1, size), weight, None, stride, pad, extra, 1, dilation)
    assert grid.query_sizes == (made.shape[-1],)
    lattice = grid.axes[0].lattice_positions()
    assert lattice[0] == -max(window - 1 - pad, 0)
    assert lattice[-1] == stride * (size - 1) + max(window - 1 - pad + extra, 0)


@given(st.lists(axes, min_size=1, max_size=2), st.integers(0, 10))
def test_laws_4_to_7_dense_and_kronecker_equal_the_page(drawn: list[Axis], seed: int) -> None:
    grid = Grid(tuple(drawn))
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(2, grid.dims, generator=generator, dtype=torch.float64) * 2
    alpha = torch.rand(2, generator=generator, dtype=torch.float64) * 3
    expected, masses = spec_attention(
        [spec(axis) for axis in drawn],
        2,
        lambda h, shift: -float(alpha[h]) * sum((d - float(c)) ** 2 for d, c in zip(shift, centres[h], strict=True)),
    )
    encoding = Quadratic(2, grid.dims).double()
    with torch.no_grad():
        encoding.centres.copy_(centres)
        encoding.spread.copy_((2 * alpha).sqrt()[:, None])
    x = torch.zeros(1, *grid.sizes, 1, dtype=torch.float64)
    for operator in (encoding.operator(grid, x), Dense.from_scores(grid, encoding.terms(grid, x)["position-position"])):
        assert isinstance(operator, Kronecker | Dense)
        torch.testing.assert_close(operator.to_dense()[0].detach(), expected, **tolerance(torch.float64))
        every = torch.arange(grid.query_count)
        torch.testing.assert_close(operator.padding_mass(every)[0].detach(), masses, **tolerance(torch.float64))


def test_law_3_padding_changes_nothing_under_renormalise() -> None:
    assert Grid.make((5, 4), padding=3).lattice_sizes == Grid.make((5, 4)).lattice_sizes


def test_law_4_soft_heads_under_zero_have_the_row_sums_of_the_page() -> None:
    encoding = Quadratic(1, 1).double()
    with torch.no_grad():
        encoding.centres.fill_(-1)
        encoding.spread.fill_(1)
    grid = Grid.make((8,), padding=1, border="zero")
    sums = encoding.operator(grid, torch.zeros(1, 8, 1, dtype=torch.float64)).to_dense().sum(-1)[0, 0]
    assert [round(v, 2) for v in sums[:2].tolist()] == [0.43, 0.74]


@pytest.mark.parametrize("border", BORDERS)
def test_law_6_rows_in_the_padding_are_zero(border: Border) -> None:
    grid = Grid.make((3,), padding=4, border=border)
    encoding = Quadratic(1, 1)
    with torch.no_grad():
        encoding.centres.fill_(-1e6)
        encoding.spread.fill_(1e3)
    rows = encoding.operator(grid, torch.zeros(1, 3, 1)).to_dense()
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows.sum(-1), torch.full((1, 1, 3), 0.0 if border == "zero" else 1.0))


@pytest.mark.usefixtures("unhooked")
def test_bad_grids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes: .*got \(0, 3\)"):
        Grid.make((0, 3))
    with pytest.raises(ValueError, match=r"window: .*got window \(5,\)"):
        Grid.make((2,), window=(5,), padding=1, border="zero")
    with pytest.raises(ValueError, match=r"border: .*got 'mirror'"):
        Grid.make((2,), border="mirror")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"border: .*'circular'"):
        Axis(3, 3, spacing=2, border="circular")
    with pytest.raises(ValueError, match=r"padding: .*got padding \(3, 3\) cropped from 5 outputs"):
        Grid.transposed((2,), stride=2, padding=3, window=(3,))
    with pytest.raises(ValueError, match=r"sizes: .*got \(0,\)"):
        Grid.transposed((0,), window=(3,))
    with pytest.raises(ValueError, match=r"stride: .*got 0"):
        Grid.make((2,), stride=0)
    with pytest.raises(ValueError, match=r"padding: .* got -1"):
        padding_pairs(-1, 2)
    with pytest.raises(ValueError, match=r"padding: .* got \(1, 2, 3\)"):
        padding_pairs((1, 2, 3), 2)


def test_padding_comes_in_three_forms() -> None:
    assert padding_pairs(1, 2) == padding_pairs((1, 1), 2) == padding_pairs(((1, 1), (1, 1)), 2)


def test_unravel_is_row_major() -> None:
    grid = Grid.make((3, 4))
    rows, columns = grid.unravel(torch.arange(12))
    torch.testing.assert_close(rows * 4 + columns, torch.arange(12))
