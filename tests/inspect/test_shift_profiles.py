import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnconv.grid import BORDERS, Axis, Border, Grid
from attnconv.inspect import RunningShiftProfile, sample_queries, shift_profile
from attnconv.operators import AttentionOperator, Content, Dense, Shift
from attnconv.operators.base import WindowRows
from tests.laws import HEADS, OPERATORS, Layout
from tests.tolerances import tolerance

DOUBLE = torch.float64
GRIDS = {
    "one axis": Grid.make((7,)),
    "one key": Grid.make((1, 3)),
    "three axes": Grid.make((3, 4, 2), padding=1, border="zero"),
    "strided": Grid.make((6, 5), stride=(2, 3)),
    "queries early": Grid.make((6, 7), window=(3, 5)),
    "queries outside": Grid.make((4, 5), padding=2, border="zero", window=(2, 2)),
    "keys apart": Grid.transposed((3, 4), stride=(2, 3), padding=1, window=(3, 3)),
}


def reach_of(axis: Axis) -> tuple[int, int]:
    """Count queries per shift, and return the range of shifts that at least half of the largest count have."""
    extent, positions = axis.spacing * (axis.size - 1) + 1, axis.query_positions().tolist()
    count = {
        shift: sum(0 <= position + shift < extent for position in positions)
        for shift in range(-max(positions), extent - min(positions))
    }
    kept = [shift for shift, queries in count.items() if queries >= max(count.values()) / 2]
    return min(kept), max(kept)


def at_shift(rows: Tensor, sizes: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """Return A[q, q + delta] of every query q that has the shift."""
    places = torch.cartesian_prod(*map(torch.arange, sizes))
    there = places + torch.tensor(shift)
    inside = ((there >= 0) & (there < torch.tensor(sizes))).all(-1)
    to_flat = torch.tensor([sizes[1], 1])
    return rows[..., places[inside] @ to_flat, there[inside] @ to_flat]


def brute_force(operators: list[AttentionOperator], queries: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute profile (h, s), counts (s,) and constancy (h,) by the documented formulas, one probability at a time."""
    grid = operators[0].grid
    extents = [axis.spacing * (axis.size - 1) + 1 for axis in grid.axes]
    shifts = list(itertools.product(*(range(least, most + 1) for least, most in map(reach_of, grid.axes))))
    keys = list(itertools.product(*([axis.spacing * k for k in range(axis.size)] for axis in grid.axes)))
    places = list(itertools.product(*(axis.query_positions().tolist() for axis in grid.axes)))
    middles = [min(max(0, least), most) for least, most in shift_profile(operators[0]).middle]
    heads = operators[0].heads
    profile, counts = torch.zeros(heads, len(shifts), dtype=DOUBLE), torch.zeros(len(shifts), dtype=torch.int64)
    constancy = torch.zeros(heads, dtype=DOUBLE)
    matrices = [
        operator.to_dense()[image].detach().double() for operator in operators for image in range(operator.batch)
    ]
    for head in range(heads):
        explained = squares = 0.0
        for number, shift in enumerate(shifts):
            seen: list[float] = []
            for matrix in matrices:
                inner: list[float] = []
                for query in range(grid.query_count) if queries is None else queries:
                    point = tuple(p + d for p, d in zip(places[query], shift, strict=True))
                    if point not in keys:
                        continue
                    seen.append(float(matrix[head, query, keys.index(point)]))
                    if all(
                        extent // 4 <= place + middle <= extent - 1 - extent // 4
                        for place, middle, extent in zip(places[query], middles, extents, strict=True)
                    ):
                        inner.append(seen[-1])
                if inner:
                    explained += sum(inner) ** 2 / len(inner)
                    squares += sum(value**2 for value in inner)
            counts[number] = len(seen)
            profile[head, number] = sum(seen) / max(1, len(seen))
        constancy[head] = explained / squares if squares else math.nan
    return profile, counts, constancy


def assert_profile(operator: AttentionOperator, queries: Tensor | None = None) -> None:
    got = shift_profile(operator, queries=queries)
    mass, counts, constancy = brute_force([operator], None if queries is None else queries.tolist())
    torch.testing.assert_close(got.mass.flatten(1), mass, **tolerance(DOUBLE))
    assert torch.equal(got.counts.flatten(), counts)
    torch.testing.assert_close(got.constancy, constancy, **tolerance(DOUBLE), equal_nan=True)
    assert not got.mass.requires_grad


@pytest.mark.parametrize("name", list(OPERATORS))
@pytest.mark.parametrize("border", BORDERS)
def test_equals_its_definition(name: str, border: Border) -> None:
    operator, _ = OPERATORS[name](Layout((5, 4), border, 2).grid(), DOUBLE, 2)
    assert_profile(operator)


@pytest.mark.parametrize("name", list(GRIDS))
@pytest.mark.parametrize("kind", ["dense", "shift"])
def test_on_other_grids(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, _ = OPERATORS[kind](GRIDS[name], DOUBLE, 2)
    assert_profile(operator)
    monkeypatch.setattr("attnconv.inspect.chosen_queries.BLOCK", 1)  # one row at a time
    assert_profile(operator, queries=torch.tensor([1, 0]))


def test_shifts_name_the_entries_of_the_mass() -> None:
    wanted = (2, -1)
    profile = shift_profile(Shift(Grid.make((6, 5), padding=2, border="zero"), [wanted], torch.zeros(())))
    assert profile.reach == ((-3, 3), (-2, 2))
    assert profile.middle == ((0, 0), (0, 0))
    assert profile.mass.shape == (1, 7, 5)
    assert profile.shifts[profile.mass.flatten(1).argmax()].tolist() == list(wanted)
    torch.testing.assert_close(profile.mass.sum(), torch.ones((), dtype=DOUBLE), **tolerance(DOUBLE))


@pytest.mark.parametrize("images", [1, 3])
def test_noise_is_the_variance_of_a_mean_over_the_queries_of_one_image(images: int) -> None:
    rows = torch.rand(images, 2, 30, 30, dtype=DOUBLE).softmax(-1)
    profile = shift_profile(Dense(Grid.make((5, 6)), rows))
    for shift, noise in zip(profile.shifts.tolist(), profile.noise.flatten(1).T, strict=True):
        taken = at_shift(rows, (5, 6), (shift[0], shift[1])).transpose(0, 1)  # (h, b, q)
        expected = taken.flatten(1).var(1, unbiased=False) / (taken.shape[-1] - 1)
        torch.testing.assert_close(noise, expected, **tolerance(DOUBLE))


def test_a_convolution_has_no_noise() -> None:
    profile = shift_profile(Shift(Grid.make((6, 5), padding=1, border="zero"), [(1, 0), (0, -1)], torch.zeros(())))
    assert float(profile.noise.max()) == 0


@pytest.mark.parametrize(
    ("make", "reach", "middle"),
    [
        (lambda: Grid.make((14,)), (-7, 7), (0, 0)),
        (lambda: Grid.make((13,)), (-6, 6), (0, 0)),
        (lambda: Grid.make((14,), window=(3,)), (-6, 8), (1, 1)),  # 12 queries at 0 .. 11
        (lambda: Grid.make((14,), window=(9,)), (-3, 11), (4, 4)),
        (lambda: Grid.make((14,), window=(14,)), (0, 13), (6, 6)),  # a single query at 0
        (lambda: Grid.make((14,), padding=5, border="zero", window=(3,)), (-15, 7), (-4, -4)),
        (lambda: Grid.make((4,), padding=6, border="zero", window=(3,)), (-12, 2), (-5, -5)),
        (lambda: Grid.make((14,), stride=2), (-6, 7), (0, 0)),
        (lambda: Grid.make((12,), stride=3, window=(3,)), (-6, 8), (0, 1)),
        (lambda: Grid.transposed((7,), stride=2, padding=1, window=(3,)), (-6, 6), (0, 0)),
    ],
)
def test_reach_and_middle_follow_the_queries(
    make: Callable[[], Grid], reach: tuple[int, int], middle: tuple[int, int]
) -> None:
    grid = make()
    profile = shift_profile(Shift(grid, [(0,)], torch.zeros(())))
    assert (profile.reach, profile.middle) == ((reach,), (middle,))
    assert reach_of(grid.axes[0]) == reach
    assert profile.mass.shape[1:] == profile.counts.shape == (reach[1] - reach[0] + 1,)
    assert profile.shifts.flatten().tolist() == list(range(reach[0], reach[1] + 1))


@pytest.mark.parametrize("block", [1, 3, 100])
def test_batches_and_blocks_add_up(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid.make((4, 5))
    monkeypatch.setattr("attnconv.inspect.chosen_queries.BLOCK", block * HEADS * grid.lattice_count)
    operators: list[AttentionOperator] = []
    running, other = RunningShiftProfile(), RunningShiftProfile()
    for batch in (1, 3, 2):
        operators.append(OPERATORS["content"](grid, DOUBLE, batch)[0])
        (running if batch == 3 else other).add(operators[-1])
    other.merge(RunningShiftProfile())
    running.merge(other)
    mass, counts, constancy = brute_force(operators)
    got = running.result()
    torch.testing.assert_close(got.mass.flatten(1), mass, **tolerance(DOUBLE))
    assert torch.equal(got.counts.flatten(), counts)
    torch.testing.assert_close(got.constancy, constancy, **tolerance(DOUBLE))


def test_a_result_is_not_changed_by_what_is_added_later() -> None:
    running = RunningShiftProfile()
    running.add(OPERATORS["dense"](Grid.make((5,)), DOUBLE, 1)[0])
    first = running.result()
    mass, counts = first.mass.clone(), first.counts.clone()
    running.add(OPERATORS["dense"](Grid.make((5,)), DOUBLE, 2)[0])
    torch.testing.assert_close(first.mass, mass, rtol=0, atol=0)
    assert torch.equal(first.counts, counts)


class TestConstancy:
    def test_is_one_for_soft_taps_where_no_border_is_felt(self) -> None:
        grid = Grid.make((12, 12), border="circular")
        place = torch.arange(12)
        line = torch.exp(-0.9 * ((place[None, :] - place[:, None] + 6) % 12 - 7.0).square())  # centre 1
        soft = torch.kron(line, line).double()
        profile = shift_profile(Dense(grid, (soft / soft.sum(-1, keepdim=True))[None, None]))
        torch.testing.assert_close(profile.constancy, torch.ones(1, dtype=DOUBLE), **tolerance(torch.float32))

    def test_of_rows_that_share_no_shift_is_one_over_their_number(self) -> None:
        grid = Grid.make((8,))  # the inner queries 2 .. 5 each attend at a different shift: -2, -1, 1, 2
        keys = torch.tensor([0, 0, 0, 2, 5, 7, 7, 7])
        profile = shift_profile(Dense(grid, torch.eye(8, dtype=DOUBLE)[keys][None, None]))
        torch.testing.assert_close(profile.constancy, torch.tensor([0.25], dtype=DOUBLE), **tolerance(DOUBLE))

    def test_of_random_rows_is_about_nothing(self) -> None:
        rows = torch.eye(256)[torch.randint(256, (1, 4, 256))]
        assert float(shift_profile(Dense(Grid.make((16, 16)), rows)).constancy.max()) < 0.1

    def test_of_a_pattern_that_each_image_has_for_itself_is_one(self) -> None:
        grid = Grid.make((9, 9), padding=2, border="zero")
        images = [Shift(grid, [shift], torch.zeros(())).to_dense() for shift in ((0, 1), (2, -1))]
        profile = shift_profile(Dense(grid, torch.cat(images)))
        torch.testing.assert_close(profile.constancy, torch.ones(1, dtype=DOUBLE), **tolerance(DOUBLE))
        assert profile.mass.max() == 0.5

    def test_of_windows_uses_the_shifts_of_the_profile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        maps = torch.rand(1, 2, 16, 16, dtype=DOUBLE)
        operator = Dense(Grid.make((16, 1)), maps)

        def in_windows_of_four(queries: Tensor) -> WindowRows:
            keys = queries[:, None] // 4 * 4 + torch.arange(4)
            rows = operator.rows(queries).gather(3, keys.expand(1, 2, -1, -1))[..., None]
            shifts = keys - queries[:, None], torch.zeros_like(queries)[:, None]
            return WindowRows(rows, shifts, torch.ones_like(keys, dtype=torch.bool)[..., None])

        monkeypatch.setattr(operator, "window_rows", in_windows_of_four)
        profile, explained, squares = shift_profile(operator), torch.zeros(2), torch.zeros(2)
        kept = profile.shifts[profile.counts.flatten() > 0, 0].tolist()
        assert kept == [-2, -1, 0, 1, 2]  # those of at least half of the four queries of a window
        for shift in kept:
            inner = [q for q in range(4, 12) if (q + shift) // 4 == q // 4]
            taken = maps[0, :, inner, [q + shift for q in inner]]
            explained = explained + len(inner) * taken.mean(1).square()
            squares = squares + taken.square().sum(1)
        torch.testing.assert_close(profile.constancy, explained / squares, **tolerance(DOUBLE))

    def test_without_mass_is_not_a_number(self) -> None:
        assert shift_profile(Dense(Grid.make((6,)), torch.zeros(1, 2, 6, 6))).constancy.isnan().all()


def test_samples_of_a_convolution_show_its_taps() -> None:
    grid = Grid.make((32, 24), padding=1, border="zero")
    operator = Shift(grid, [(1, 1), (-1, 0)], torch.zeros(()))
    sampled = shift_profile(operator, queries=sample_queries(grid, 60))
    assert int(sampled.counts.max()) <= 60
    torch.testing.assert_close(sampled.mass, shift_profile(operator).mass, **tolerance(DOUBLE))


@pytest.mark.usefixtures("unhooked")
def test_bad_input() -> None:
    operator = OPERATORS["dense"](Grid.make((3,)), DOUBLE, 1)[0]
    with pytest.raises(ValueError, match=r"queries: .*got 0"):
        shift_profile(operator, queries=torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"queries: .*got values from 0 to 3"):
        shift_profile(operator, queries=torch.tensor([0, 3]))
    running = RunningShiftProfile()
    with pytest.raises(ValueError, match=r"operator: .*got none"):
        running.result()
    running.add(operator)
    with pytest.raises(
        ValueError, match=rf"operator: .* number of heads \({HEADS}\) as the first operator, got {HEADS} heads on"
    ):
        running.add(OPERATORS["dense"](Grid.make((4,)), DOUBLE, 1)[0])
    other = RunningShiftProfile()
    other.add(OPERATORS["dense"](Grid.make((4,)), DOUBLE, 1)[0])
    with pytest.raises(ValueError, match=rf"other: .* got {HEADS} heads on .*4"):
        running.merge(other)
    with pytest.raises(ValueError, match=r"operator: .* got 1 heads"):
        running.add(Dense(Grid.make((3,)), torch.zeros(1, 1, 3, 3)))


def test_content_is_read_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    rows = Content.rows

    def counted(self: Content, queries: Tensor) -> Tensor:
        asked.append(len(queries))
        return rows(self, queries)

    monkeypatch.setattr(Content, "rows", counted)
    monkeypatch.setattr("attnconv.inspect.chosen_queries.BLOCK", 2 * HEADS * 20 * 3)
    operator = OPERATORS["content"](Grid.make((4, 5)), DOUBLE, 2)[0]
    shift_profile(operator)
    assert (max(asked), sum(asked)) == (3, 20)


@pytest.mark.parametrize("sizes", [(5, 7), (1, 4), (6, 2)])
def test_all_rows_at_once_give_the_same_profile(sizes: tuple[int, int]) -> None:
    count = sizes[0] * sizes[1]
    rows = torch.rand(2, 3, count, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    profile = shift_profile(Dense(Grid.make(sizes), rows))
    for shift, mass in zip(profile.shifts.tolist(), profile.mass.flatten(1).T, strict=True):
        taken = at_shift(rows, sizes, (shift[0], shift[1]))
        torch.testing.assert_close(taken.mean((0, 2)), mass, **tolerance(torch.float64))
