import dataclasses
import itertools
import math
import time

import pytest
import torch
from torch import Tensor

from attnconv.encodings import Quadratic
from attnconv.grid import BORDERS, Axis, Border, Grid
from attnconv.inspect import AttentionMoments, attention_moments, sample_queries
from attnconv.operators import AttentionOperator, Dense, Kronecker, Shift
from attnconv.operators.base import all_queries
from tests.laws import CASES, CHANNELS, HEADS, OPERATORS, Layout
from tests.tolerances import tolerance

every_case = pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
DOUBLE = torch.float64
BLOCK = "attnconv.inspect.chosen_queries.BLOCK"


def positions(axes: list[list[int]]) -> Tensor:
    return torch.tensor(list(itertools.product(*axes)), dtype=DOUBLE)


def brute_force(operator: AttentionOperator, queries: Tensor | None = None) -> dict[str, Tensor]:
    """Compute the definitions from the stored matrix."""
    grid = operator.grid
    every = all_queries(grid, operator.device)
    chosen = every if queries is None else queries
    matrix, padding = operator.to_dense().double().detach(), operator.padding_mass(every).double().detach()
    keys = positions([[axis.spacing * k for k in range(axis.size)] for axis in grid.axes])
    places = positions([axis.query_positions().tolist() for axis in grid.axes])
    shifts = keys - places[chosen, None]  # (n, m, d)
    seen = matrix[:, :, chosen].sum(-1) != 0  # (b, h, n): queries with mass on keys
    rows = matrix[:, :, chosen] / matrix[:, :, chosen].sum(-1, keepdim=True)

    def mean(values: Tensor) -> Tensor:
        """Average over the queries with mass, NaN if there are none: (b, h, n, ...) to (b, h, ...)."""
        mask = seen[(..., *(None,) * (values.dim() - 3))]
        return torch.where(mask, values, 0).sum(2) / mask.sum(2)

    centres = torch.einsum("bhnm,nmi->bhni", rows, shifts)
    around = shifts - centres[:, :, :, None]
    return {
        "padding_mass": padding[:, :, chosen].mean(-1),
        "centre": mean(centres),
        "covariance": mean(torch.einsum("bhnm,bhnmi,bhnmj->bhnij", rows, around, around)),
        "distance": mean((rows * shifts.norm(dim=-1)).sum(-1)),
        "entropy": mean(-torch.special.xlogy(rows, rows).sum(-1)),
    }


NAMES = ("centre", "covariance", "distance", "entropy")


def assert_moments(moments: AttentionMoments, expected: dict[str, Tensor], dtype: torch.dtype = DOUBLE) -> None:
    for name, value in expected.items():
        got = getattr(moments, name)
        assert got.dtype == DOUBLE

        def difference(said: str, name: str = name) -> str:  # lazy, because printing tensors is slow
            return f"{name}: {said}\ngot {getattr(moments, name)}, expected {expected[name]}"

        torch.testing.assert_close(got, value, **tolerance(dtype, scale=100), equal_nan=True, msg=difference)


@every_case
def test_moments_equal_their_definition(name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (1, 3):
        operator, _ = OPERATORS[name](layout.grid(), DOUBLE, batch)
        moments = attention_moments(operator)
        assert moments.entropy.shape == (operator.batch, HEADS)
        assert not moments.centre.requires_grad
        expected = brute_force(operator)
        assert_moments(moments, expected)
        block = max(2, operator.grid.query_count // 3)  # three blocks and the remainder
        with monkeypatch.context() as few:
            few.setattr(BLOCK, block * operator.batch * operator.heads * operator.grid.lattice_count)
            assert_moments(attention_moments(operator), expected)


@pytest.mark.parametrize("name", list(OPERATORS))
@pytest.mark.parametrize("border", BORDERS)
def test_of_chosen_queries(name: str, border: Border) -> None:
    operator, _ = OPERATORS[name](Layout((5, 4), border, 2).grid(), DOUBLE, 2)
    queries = torch.tensor([5, 0, 3])
    assert_moments(attention_moments(operator, queries=queries), brute_force(operator, queries))


@pytest.mark.parametrize("name", list(OPERATORS))
@pytest.mark.parametrize("border", BORDERS)
def test_in_float32(name: str, border: Border) -> None:
    found = []
    for dtype in (DOUBLE, torch.float32):
        torch.manual_seed(1)
        operator, _ = OPERATORS[name](Layout((6, 5), border, 2).grid(), dtype, 2)
        found.append(attention_moments(operator))
    double, single = found
    assert_moments(single, {n: getattr(double, n) for n in (*NAMES, "padding_mass")}, torch.float32)


@pytest.mark.parametrize("name", ["dense", "content", "learned-content"])
def test_content_share_is_the_part_of_the_variance_that_images_explain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, _ = OPERATORS[name](Layout((4, 3), "zero").grid(), DOUBLE, 3)
    matrix = operator.to_dense().detach()
    within, between = torch.zeros(HEADS, dtype=DOUBLE), torch.zeros(HEADS, dtype=DOUBLE)
    for head, query in itertools.product(range(HEADS), range(12)):
        rows = matrix[:, head, query]
        within[head] += rows.var(0, correction=1).mean()
        between[head] += rows.mean(0).var(correction=0)
    monkeypatch.setattr(BLOCK, 5 * operator.batch * HEADS * operator.grid.lattice_count)
    share = attention_moments(operator).content_share
    between = (between - within / len(matrix)).clamp_min(0)
    torch.testing.assert_close(share, within / (within + between), **tolerance(DOUBLE))


@pytest.mark.parametrize("images", [2, 8])
def test_content_share_does_not_depend_on_the_number_of_images(images: int) -> None:
    chance = torch.randn(images, 2, 49, 49, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    fixed = torch.randn(1, 2, 49, 49, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    grid = Grid.make((7, 7))
    content = attention_moments(Dense(grid, (chance / 4).softmax(-1))).content_share
    both = attention_moments(Dense(grid, ((chance + fixed) / 16).softmax(-1))).content_share
    assert content is not None
    assert both is not None
    assert float(content.min()) > 0.98  # position explains nothing
    torch.testing.assert_close(both, torch.full_like(both, 0.5), atol=0.03, rtol=0)


def test_content_share_at_its_ends() -> None:
    grid = Grid.make((2,))
    one = torch.rand(1, 1, 2, 2, dtype=DOUBLE).softmax(-1)
    assert attention_moments(Dense(grid, one)).content_share is None
    same = attention_moments(Dense(grid, one.expand(3, -1, -1, -1))).content_share
    torch.testing.assert_close(same, torch.zeros(1, dtype=DOUBLE), **tolerance(DOUBLE))
    opposite = torch.eye(2, dtype=DOUBLE)[:, None, None].expand(2, 1, 2, 2)  # the images attend to different positions
    share = attention_moments(Dense(grid, opposite)).content_share
    torch.testing.assert_close(share, torch.ones(1, dtype=DOUBLE), **tolerance(DOUBLE))
    uniform = attention_moments(Dense(grid, torch.full((2, 1, 2, 2), 0.5))).content_share
    torch.testing.assert_close(uniform, torch.zeros(1, dtype=DOUBLE), **tolerance(DOUBLE))


def quadratic(grid: Grid, *, alpha: float, centre: tuple[float, float]) -> AttentionOperator:
    encoding = Quadratic(1, dims=2).double()
    with torch.no_grad():
        encoding.centres.copy_(torch.tensor([centre]))
        encoding.spread.fill_(math.sqrt(2 * alpha))
    return encoding.operator(grid, torch.zeros(1, *grid.sizes, CHANNELS, dtype=DOUBLE))


def test_a_gaussian_head_inside_the_image() -> None:
    operator = quadratic(Grid.make((31, 33)), alpha=0.5, centre=(2.0, -1.0))
    inside = torch.tensor([row * 33 + column for row in range(13, 17) for column in range(14, 19)])
    moments = attention_moments(operator, queries=inside)
    # Sampled at integer positions, a Gaussian of variance 1 keeps its moments to 1e-7 (Poisson summation).
    centre = torch.tensor([[[2.0, -1.0]]], dtype=DOUBLE)
    torch.testing.assert_close(moments.centre, centre, **tolerance(DOUBLE))
    torch.testing.assert_close(moments.covariance[0, 0], torch.eye(2, dtype=DOUBLE), rtol=1e-6, atol=1e-6)
    entropy = torch.full((1, 1), math.log(2 * math.pi * math.e), dtype=DOUBLE)
    torch.testing.assert_close(moments.entropy, entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.02, 0.5, 40.0])
@pytest.mark.parametrize("border", BORDERS)
def test_a_gaussian_head_over_a_whole_image(border: Border, alpha: float) -> None:
    operator = quadratic(Grid.make((6, 7), padding=3, border=border), alpha=alpha, centre=(1.4, -2.0))
    assert isinstance(operator, Kronecker)
    assert_moments(attention_moments(operator), brute_force(operator))


def test_sharp_heads_do_not_cancel_far_from_the_origin() -> None:
    grid = Grid.make((4000,))
    rows = torch.zeros(1, 1, 4000, 4000, dtype=DOUBLE)
    rows[..., 0] = 1e-12
    rows[..., 1] = 1 - 1e-12  # every query attends to key 1, with variance 1e-12
    moments = attention_moments(Dense(grid, rows))
    torch.testing.assert_close(moments.covariance.flatten(), torch.tensor([1e-12], dtype=DOUBLE), rtol=1e-3, atol=0)


@pytest.mark.parametrize("split", [False, True])
def test_queries_without_mass_count_as_none(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BLOCK, 1)  # one row at a time
    grid = Grid.make((2, 3), padding=3, border="zero")
    operator: AttentionOperator = Shift(grid, [(0, 2), (0, 3)], torch.zeros((), dtype=DOUBLE))
    moments = attention_moments(operator if split else Dense.of(operator))
    assert moments.centre[0, 0].tolist() == [0.0, 2.0]  # only queries in the first column have a pixel at this shift
    assert moments.distance[0, 0].item() == 2.0
    torch.testing.assert_close(moments.padding_mass, torch.tensor([[2 / 3, 1.0]], dtype=DOUBLE), **tolerance(DOUBLE))
    for name in NAMES:
        assert not getattr(moments, name)[0, 0].isnan().any()
        assert getattr(moments, name)[0, 1].isnan().all()


def test_broken_probabilities_are_seen() -> None:
    rows = torch.full((1, 1, 3, 3), 1 / 3)
    rows[0, 0, 1, 2] = math.nan
    assert attention_moments(Dense(Grid.make((3,)), rows)).entropy.isnan().all()


@pytest.mark.parametrize("name", ["kronecker", "shift", "quadratic"])
@pytest.mark.parametrize("sizes", [(4, 6), (3, 2, 4)])
def test_products_over_axes_never_make_a_joint_row(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, _ = OPERATORS[name](Layout(sizes, "zero").grid(), DOUBLE, 1)
    expected = brute_force(operator)
    rows, seen = type(operator).rows, []

    def counted(self: AttentionOperator, queries: Tensor) -> Tensor:
        seen.append(self.grid.dims)
        return rows(self, queries)

    monkeypatch.setattr(type(operator), "rows", counted)
    assert_moments(attention_moments(operator), expected)
    monkeypatch.setattr(
        "attnconv.inspect.moments.BLOCK", 3 * math.prod(2 * size for size in sizes[1:])
    )  # some shifts at a time
    assert_moments(attention_moments(operator), expected)
    assert set(seen) == {1}


def test_rows_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, _ = OPERATORS["dense"](Layout((4, 6), "zero").grid(), DOUBLE, 2)
    rows, seen = Dense.rows, []

    def counted(self: Dense, queries: Tensor) -> Tensor:
        seen.append(len(queries))
        return rows(self, queries)

    monkeypatch.setattr(Dense, "rows", counted)
    monkeypatch.setattr(BLOCK, 5 * 2 * HEADS * operator.grid.lattice_count)
    attention_moments(operator)
    assert seen == [5, 5, 5, 5, 4]


def test_a_large_image_takes_moments() -> None:
    grid = Grid.make((256, 256))
    scores = [torch.randn(9, 256, 256) for _ in range(2)]
    start = time.perf_counter()
    moments = attention_moments(Kronecker.from_scores(grid, scores))
    assert time.perf_counter() - start < 20  # about 0.2 s; a pass over 9 x 65536 x 65536 rows takes minutes
    some = attention_moments(Kronecker.from_scores(grid, scores), queries=sample_queries(grid, 64))
    torch.testing.assert_close(moments.distance, some.distance, rtol=0.2, atol=0.0)


def test_one_off_keys_and_queries() -> None:
    axis = Axis(size=3, queries=4, stride=2, offset=-3, padding=(1, 2), spacing=2, border="zero")
    other = Axis(size=2, queries=2, offset=5)
    grid = Grid((axis, other))
    for operator in (OPERATORS["kronecker"](grid, DOUBLE, 1)[0], OPERATORS["toeplitz"](grid, DOUBLE, 1)[0]):
        assert_moments(attention_moments(operator), brute_force(operator))


@pytest.mark.parametrize("sizes", [(7,), (1,), (4, 6), (3, 100), (1, 1), (256, 256), (3, 4, 5), (1000, 2)])
@pytest.mark.parametrize("count", [1, 2, 5, 24, 100, 10**6])
@pytest.mark.parametrize("seed", [0, None])
def test_sampled_queries(sizes: tuple[int, ...], count: int, seed: int | None) -> None:
    grid = Grid.make(sizes)
    queries = sample_queries(grid, count, seed=seed)
    assert queries.dtype == torch.int64
    assert queries.tolist() == sorted(set(queries.tolist()))
    assert len(queries) <= min(count, grid.query_count)
    assert len(queries) > min(count, grid.query_count) / 2
    assert 0 <= int(queries[0]) <= int(queries[-1]) < grid.query_count
    assert one_per_cell(grid, queries)


def one_per_cell(grid: Grid, queries: Tensor) -> bool:
    """Return whether the grid can be divided into as many equal cells as there are queries, with one query in each."""
    divisions = [range(1, size + 1) for size in grid.query_sizes[:-1]]
    for counts in itertools.product(*divisions):
        last, rest = divmod(len(queries), math.prod(counts))
        if rest or not 1 <= last <= grid.query_sizes[-1]:
            continue
        cell = torch.zeros_like(queries)
        for size, index, taken in zip(grid.query_sizes, grid.unravel(queries), (*counts, last), strict=True):
            edges = torch.tensor([number * size // taken for number in range(1, taken)], dtype=torch.int64)
            cell = cell * taken + torch.bucketize(index, edges, right=True)
        if len(cell.unique()) == len(queries):
            return True
    return False


def test_sampled_queries_meet_every_place_of_a_window() -> None:
    rows, columns = Grid.make((56, 56)).unravel(sample_queries(Grid.make((56, 56)), 256))
    places = torch.bincount(rows % 7 * 7 + columns % 7, minlength=49)  # 5.2 are expected
    assert int(places.min()) > 0
    assert int(places.max()) < 16
    lattice = sample_queries(Grid.make((512,)), 64) % 8  # cells of 8: a regular lattice would sample a single offset
    assert len(lattice.unique()) == 8


@pytest.mark.parametrize(("sizes", "count"), [((14, 14), 56), ((5, 7), 12), ((1, 9), 4), ((32, 32), 30)])
def test_middles_of_cells_leave_no_query_far_from_them(sizes: tuple[int, int], count: int) -> None:
    grid = Grid.make(sizes)
    chosen = grid.unravel(sample_queries(grid, count, seed=None))
    for size, places in zip(sizes, chosen, strict=True):
        known = places.unique()
        far = (torch.arange(size)[:, None] - known).abs().amin(1).max()
        assert int(far) <= math.ceil(size / len(known)) // 2
    assert len(chosen[0].unique()) * len(chosen[1].unique()) == len(chosen[0])


def test_queries_without_a_seed_are_the_middles_of_their_cells() -> None:
    assert sample_queries(Grid.make((4, 6)), 6, seed=None).tolist() == [7, 9, 11, 19, 21, 23]


def test_sampled_queries_are_those_of_the_seed() -> None:
    grid = Grid.make((30, 40))
    assert torch.equal(sample_queries(grid, 50), sample_queries(grid, 50))
    assert torch.equal(sample_queries(grid, 50, seed=1), sample_queries(grid, 50, seed=1))
    assert not torch.equal(sample_queries(grid, 50), sample_queries(grid, 50, seed=1))


@pytest.mark.usefixtures("unhooked")
def test_bad_input() -> None:
    operator, _ = OPERATORS["dense"](Grid.make((3,)), DOUBLE, 1)
    with pytest.raises(ValueError, match=r"queries: .*got 0"):
        attention_moments(operator, queries=torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"queries: .*got values from 0 to 3"):
        attention_moments(operator, queries=torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"queries: .*got list"):
        attention_moments(operator, queries=[0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"count: .*got 0"):
        sample_queries(operator.grid, 0)


def test_moments_are_frozen() -> None:
    operator, _ = OPERATORS["dense"](Grid.make((3,)), DOUBLE, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        attention_moments(operator).entropy = torch.zeros(1)  # type: ignore[misc]
