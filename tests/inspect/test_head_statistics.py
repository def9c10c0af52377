import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from attnconv.encodings import Quadratic
from attnconv.grid import Grid
from attnconv.inspect import RunningStatistics, attention_moments, layer_statistics, sample_queries, shift_profile
from attnconv.inspect.head_statistics import gaussian_overlap, receptive_field, redundancy
from attnconv.operators import AttentionOperator, Content, Dense, Shift
from attnconv.operators.base import all_queries
from tests.laws import HEADS, OPERATORS
from tests.tolerances import tolerance

DOUBLE = torch.float64
GRIDS = [Grid.make((7,)), Grid.make((4, 5), padding=1, border="zero"), Grid.make((3, 4, 2), stride=2)]
TAPS = list(itertools.product((-1, 0, 1), repeat=2))


def brute_overlap(profile: Tensor, shifts: Tensor) -> float:
    """Compare a head's profile with the Gaussian of its moments, by the documented formula and a matrix inverse."""
    weights = profile / profile.sum()
    mean = sum(w * s for w, s in zip(weights, shifts, strict=True))
    covariance = sum(w * torch.outer(s - mean, s - mean) for w, s in zip(weights, shifts, strict=True))
    inverse = torch.linalg.inv(torch.as_tensor(covariance))
    heights = torch.stack([torch.exp(-0.5 * (s - mean) @ inverse @ (s - mean)) for s in shifts])
    return sum(min(float(w), float(g)) for w, g in zip(weights, heights / heights.sum(), strict=True))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: str(grid.sizes))
@pytest.mark.parametrize("name", ["dense", "content", "kronecker"])
def test_equal_their_definitions(grid: Grid, name: str) -> None:
    operator, _ = OPERATORS[name](grid, DOUBLE, 3)
    got = layer_statistics(operator)
    profile = shift_profile(operator)
    flat, shifts = profile.mass.flatten(1), profile.shifts.double()
    for head in range(HEADS):
        best = flat[head].tolist().index(max(flat[head].tolist()))
        assert got.best_shift[head].tolist() == shifts[best].tolist()
        assert float(got.shift_mass[head]) == float(flat[head, best])
        assert float(got.gaussian_overlap[head]) == pytest.approx(brute_overlap(flat[head], shifts), rel=1e-9)
    cosines = [torch.cosine_similarity(a, b, dim=0) for a, b in itertools.combinations(flat, 2)]
    assert got.redundancy == pytest.approx(float(torch.stack(cosines).mean()), rel=1e-12)
    weights = flat.mean(0) / flat.mean(0).sum()
    off = shifts - (weights[:, None] * shifts).sum(0)
    assert got.receptive_field == pytest.approx(math.sqrt(float((weights * off.square().sum(-1)).sum())), rel=1e-12)
    padding = operator.padding_mass(all_queries(grid, operator.device)).detach().mean((0, -1))
    torch.testing.assert_close(got.padding_mass, padding, **tolerance(DOUBLE))
    torch.testing.assert_close(got.constancy, profile.constancy, **tolerance(DOUBLE))


def test_moments_are_means_over_images_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid.make((5, 4))
    running = RunningStatistics()
    operators: list[AttentionOperator] = [OPERATORS["content"](grid, DOUBLE, batch)[0] for batch in (2, 3, 1)]
    with monkeypatch.context() as few:
        few.setattr("attnconv.inspect.chosen_queries.BLOCK", 7 * operators[0].heads * grid.lattice_count)
        for operator in operators:
            running.add(operator)
    got, moments = running.result(), [attention_moments(operator) for operator in operators]
    for name in ("centre", "covariance", "distance", "entropy"):
        wanted = torch.cat([getattr(moment, name) for moment in moments]).mean(0)
        torch.testing.assert_close(getattr(got, name), wanted, **tolerance(DOUBLE))
    shares = [moment.content_share for moment in moments[:2]]  # undefined for a single image
    assert shares[0] is not None
    assert shares[1] is not None
    assert got.content_share is not None
    assert got.position_share is not None
    torch.testing.assert_close(got.content_share, (2 * shares[0] + 3 * shares[1]) / 5, **tolerance(DOUBLE))
    torch.testing.assert_close(got.position_share, 1 - got.content_share, **tolerance(DOUBLE))


def test_neither_the_order_of_batches_nor_the_number_of_accumulators_matters() -> None:
    operators = [OPERATORS["content"](Grid.make((5, 4)), DOUBLE, batch)[0] for batch in (2, 3, 1, 4, 2, 1, 2)]
    results = []
    for starts in ([0], [0, 1], [2, 1, 0]):
        parts = [RunningStatistics() for _ in starts]
        for start, part in zip(starts, parts, strict=True):
            for operator in operators[start :: len(starts)]:
                part.add(operator)
        whole = RunningStatistics()
        for part in parts:
            whole.merge(part)
        results.append(whole.result())
    for one, other in itertools.pairwise(results):
        for a, b in ((vars(one), vars(other)), (vars(one.profile), vars(other.profile))):
            for name in a.keys() - {"profile"}:
                same = torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
                assert same, name


def test_position_only_attention_has_no_shares() -> None:
    statistics = layer_statistics(Shift(Grid.make((5,)), [(1,)], torch.zeros(())))
    assert statistics.content_share is None
    assert statistics.position_share is None


def test_images_without_mass_count_for_the_profile_alone() -> None:
    grid = Grid.make((6,), padding=1, border="zero")
    shown = Shift(grid, [(1,)], torch.zeros(())).to_dense().double()
    both = torch.cat([shown, torch.zeros_like(shown)])
    got = layer_statistics(Dense(grid, both, 1 - both.sum(-1)))
    torch.testing.assert_close(got.centre, torch.ones(1, 1, dtype=DOUBLE), **tolerance(DOUBLE))
    torch.testing.assert_close(got.shift_mass, torch.full((1,), 0.5, dtype=DOUBLE), **tolerance(DOUBLE))
    torch.testing.assert_close(got.padding_mass, torch.full((1,), 7 / 12, dtype=DOUBLE), **tolerance(DOUBLE))


def test_mass_on_class_tokens_is_reported_without_a_padded_grid() -> None:
    rows = torch.rand(2, 3, 9, 10, dtype=DOUBLE).softmax(-1)
    got = layer_statistics(Dense(Grid.make((3, 3)), rows[..., 1:], rows[..., 0]), queries=torch.tensor([0, 4, 8]))
    torch.testing.assert_close(got.padding_mass, rows[:, :, [0, 4, 8], 0].mean((0, -1)), **tolerance(DOUBLE))


class TestKnownLayers:
    def test_a_convolution(self) -> None:
        grid = Grid.make((14, 14), padding=1, border="zero")
        got = layer_statistics(Shift(grid, TAPS, torch.zeros(())))
        assert got.best_shift.tolist() == [list(tap) for tap in TAPS]
        ones = torch.ones(9, dtype=DOUBLE)
        for values in (got.shift_mass, got.constancy, got.gaussian_overlap):
            torch.testing.assert_close(values, ones, **tolerance(DOUBLE))
        assert (got.convolution_score, got.coverage, got.redundancy) == (1.0, 1.0, 0.0)
        assert got.tap_residual == pytest.approx(0, abs=1e-7)
        assert got.receptive_field == pytest.approx(math.sqrt(2 * (3**2 - 1) / 12))

    def test_a_soft_gaussian_head(self) -> None:
        encoding = Quadratic(1, dims=2).double()
        with torch.no_grad():
            encoding.centres.copy_(torch.tensor([[1.0, -1.0]]))
            encoding.spread.fill_(1.0)  # variance 1 per axis
        grid = Grid.make((21, 21), padding=10, border="zero")
        got = layer_statistics(encoding.operator(grid, torch.zeros(1, 21, 21, 1, dtype=DOUBLE)))
        assert got.best_shift.tolist() == [[1, -1]]
        assert float(got.gaussian_overlap) > 0.999
        assert float(got.constancy) > 0.999
        assert got.receptive_field == pytest.approx(math.sqrt(2), rel=1e-3)
        assert got.convolution_score == pytest.approx(1 / (2 * math.pi), rel=0.05)

    @pytest.mark.parametrize("shift", [(0, 0), (5, -3)])
    def test_the_gaussian_of_a_single_tap_is_that_tap(self, shift: tuple[int, int]) -> None:
        """Its variance is 0: the overlap neither divides by 0 nor uses a width that reaches neighbouring positions."""
        profile = shift_profile(Shift(Grid.make((12, 12), padding=5, border="zero"), [shift], torch.zeros(())))
        assert float(gaussian_overlap(profile)) == pytest.approx(1, abs=1e-12)

    def test_two_far_taps_are_no_gaussian(self) -> None:
        grid = Grid.make((20,), padding=5, border="zero")
        taps = Shift(grid, [(-5,), (5,)], torch.zeros(())).to_dense().double()
        got = float(layer_statistics(Dense(grid, taps.mean(1, keepdim=True))).gaussian_overlap)
        heights = [math.exp(-(shift**2) / (2 * 25)) for shift in range(-10, 11)]  # mean 0, variance 25
        assert got == pytest.approx(2 * math.exp(-0.5) / sum(heights))  # 0.1

    def test_uniform_attention(self) -> None:
        got = layer_statistics(Dense(Grid.make((14, 14)), torch.full((1, 9, 196, 196), 1 / 196, dtype=DOUBLE)))
        assert got.convolution_score < 1e-12
        assert got.redundancy == pytest.approx(1)
        assert got.tap_residual == pytest.approx(math.sqrt(1 - 1 / 15**2))  # all heads span the mean of 15 x 15 shifts
        torch.testing.assert_close(got.constancy, torch.ones(9, dtype=DOUBLE), **tolerance(DOUBLE))
        assert got.receptive_field == pytest.approx(math.sqrt(2 * (15**2 - 1) / 12))

    def test_heads_without_mass(self) -> None:
        profile = shift_profile(Dense(Grid.make((6,)), torch.zeros(1, 2, 6, 6)))
        assert gaussian_overlap(profile).isnan().all()
        assert math.isnan(receptive_field(profile))
        assert redundancy(profile) == 0

    def test_one_head_repeats_nobody(self) -> None:
        assert redundancy(shift_profile(Shift(Grid.make((6,)), [(1,)], torch.zeros(())))) == 0


def test_sampled_queries_on_a_large_image_see_what_all_see() -> None:
    grid = Grid.make((32, 32))
    operator = Content(grid, 0.2 * torch.randn(2, 3, 1024, 8), torch.randn(2, 3, 1024, 8))
    sampled, whole = layer_statistics(operator, queries=sample_queries(grid, 256)), layer_statistics(operator)
    torch.testing.assert_close(sampled.entropy, whole.entropy, rtol=0.05, atol=0)
    assert abs(sampled.convolution_score - whole.convolution_score) < 0.005
    assert sampled.profile.mass.shape == (3, 33, 33)


@pytest.mark.usefixtures("unhooked")
def test_bad_input() -> None:
    operator = OPERATORS["dense"](Grid.make((3,)), DOUBLE, 1)[0]
    running = RunningStatistics()
    with pytest.raises(ValueError, match=r"operator: .*got none"):
        running.result()
    running.add(operator)
    before = running.result()
    with pytest.raises(ValueError, match="operator: must have the same grid"):
        running.add(OPERATORS["dense"](Grid.make((4,)), DOUBLE, 1)[0])
    torch.testing.assert_close(running.result().entropy, before.entropy, rtol=0, atol=0)  # nothing was added
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.coverage = 1.0  # type: ignore[misc]
