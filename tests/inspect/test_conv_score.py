import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.convert import from_conv, low_rank
from attnconv.encodings import Quadratic
from attnconv.grid import Grid
from attnconv.inspect import attention_operators, convolution_score, grid_coverage, sample_queries, shift_profile
from attnconv.inspect.head_statistics import assigned_mass, kernel_size, tap_residual
from attnconv.operators import AttentionOperator, Dense, Shift
from experiments.chance_scores import chance
from tests.tolerances import tolerance

SIDE, HEADS = 14, 9
PIXELS = SIDE * SIDE
GRID = Grid.make((SIDE, SIDE))
TAPS = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
DOUBLE = torch.float64


def score(operator: AttentionOperator) -> float:
    return convolution_score(shift_profile(operator))


def converted(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d, *sizes: int) -> AttentionOperator:
    (operator,) = attention_operators(nn.Sequential(from_conv(conv)), torch.zeros(1, 2, *sizes)).values()
    return operator


COUNTS = (4, 8, 9, 12, 16, 18, 27, 36)  # numbers of heads: fewer than the nine taps, as many, more, and multiples


def taps_for(heads: int) -> list[tuple[int, int]]:
    """Return the nine taps in turn, in the order of `initialize` and `low_rank`."""
    return [TAPS[head % len(TAPS)] for head in range(heads)]


def random_rows(heads: int = HEADS, *, sharpness: float = 1.0) -> Tensor:
    return (sharpness * torch.randn(1, heads, PIXELS, PIXELS)).softmax(-1)


class TestOne:
    """Scores of convolutions."""

    @pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect", "circular"])
    @pytest.mark.parametrize("stride", [1, 2, 3])
    def test_converted_layers(self, mode: Any, stride: int) -> None:
        conv = nn.Conv2d(2, 3, 3, padding=1, stride=stride, padding_mode=mode)
        profile = shift_profile(converted(conv, SIDE, SIDE))
        assert convolution_score(profile) > 0.99
        assert grid_coverage(profile) > 0.99

    @pytest.mark.parametrize(
        ("make", "sizes"),
        [
            (lambda: nn.Conv1d(2, 3, 5, padding=2), (20,)),
            (lambda: nn.Conv3d(2, 3, 3, padding=1), (6, 5, 7)),
            (lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2), (SIDE, SIDE)),
            (lambda: nn.Conv2d(2, 3, (1, 4)), (9, SIDE)),
            (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), (7, 7)),
        ],
        ids=["one axis", "three axes", "dilated", "even kernel", "transposed"],
    )
    def test_other_convolutions(self, make: Callable[[], nn.Conv2d], sizes: tuple[int, ...]) -> None:
        assert score(converted(make(), *sizes)) > 0.99

    @pytest.mark.parametrize(
        "options",
        [
            {"kernel_size": 3},
            {"kernel_size": 3, "dilation": 3},
            {"kernel_size": 3, "dilation": 4},
            {"kernel_size": 3, "dilation": 4, "stride": 2},
            {"kernel_size": 9},
            {"kernel_size": 13},
            {"kernel_size": (14, 2)},
            {"kernel_size": 3, "padding": 5},
            {"kernel_size": 7, "stride": 7},
            {"kernel_size": 3, "padding": (0, 2)},
        ],
        ids=str,
    )
    def test_without_the_padding_that_centres_them(self, options: dict[str, Any]) -> None:
        assert score(converted(nn.Conv2d(2, 3, **options), SIDE, SIDE)) > 0.99

    def test_without_padding_rule_the_border_does_not_count(self) -> None:
        assert score(Shift(GRID, TAPS, torch.zeros(()))) > 0.99

    def test_from_some_queries(self) -> None:
        operator = converted(nn.Conv2d(2, 3, 3, padding=1), 40, 40)
        assert convolution_score(shift_profile(operator, queries=sample_queries(operator.grid, 100))) > 0.99

    @pytest.mark.parametrize("heads", COUNTS)
    def test_several_heads_per_tap(self, heads: int) -> None:
        assert score(Shift(GRID, taps_for(heads), torch.zeros(()))) > 0.99

    @pytest.mark.parametrize(("channels", "head_dim", "heads"), [(8, 4, 18), (6, 2, 27), (8, 2, 36)])
    def test_an_exact_factorisation(self, channels: int, head_dim: int, heads: int) -> None:
        layer = low_rank(from_conv(nn.Conv2d(channels, channels, 3, padding=1)), head_dim, exact=True)
        operator = layer.operator(torch.zeros(1, channels, SIDE, SIDE))
        assert operator.heads == heads
        assert score(operator) > 0.99


class TestNought:
    """Scores of attention without any convolution."""

    @pytest.mark.parametrize("heads", COUNTS)
    def test_whatever_the_number_of_heads(self, heads: int) -> None:
        pixel = SIDE // 2 * SIDE + SIDE // 2
        for rows in (
            torch.full((PIXELS, PIXELS), 1 / PIXELS).expand(1, heads, -1, -1),
            random_rows(heads),
            random_rows(heads, sharpness=1000),
            torch.eye(PIXELS)[pixel].expand(1, heads, PIXELS, -1),
        ):
            assert score(Dense(GRID, rows)) < 0.05

    def test_uniform(self) -> None:
        assert score(Dense(GRID, torch.full((1, HEADS, PIXELS, PIXELS), 1 / PIXELS))) < 0.001

    @pytest.mark.parametrize("sharpness", [1, 3, 10, 1000])
    def test_random_rows(self, sharpness: float) -> None:
        assert score(Dense(GRID, random_rows(sharpness=sharpness))) < 0.05

    def test_images_average_chance_away(self) -> None:
        grid = Grid.make((7, 7))
        hard = torch.eye(49)[torch.randint(49, (16, HEADS, 49))]
        assert score(Dense(grid, hard[:1])) > 0.05 > score(Dense(grid, hard))

    @pytest.mark.parametrize(("sizes", "images", "heads"), [((7, 7), 1, 4), ((7, 7), 1, 16), ((14,), 4, 12)])
    def test_is_what_the_documentation_says(self, sizes: tuple[int, ...], images: int, heads: int) -> None:
        page = Path(__file__).parents[2] / "docs" / "how-convolutional.md"
        table = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
        grid = f"{sizes[0]} positions in 1-D" if len(sizes) == 1 else " x ".join(map(str, sizes))
        title = f"{grid}, {images} image{'s' * (images > 1)}"
        (column,) = (cells.index(title) for cells in table if title in cells)
        (said,) = (cells[column] for cells in table if cells[0] == str(heads) and len(cells) > column)
        scores = chance(sizes, heads, images, draws=40)
        assert said == f"{sum(scores) / 40:.3f} ({max(scores):.3f})"

    def test_all_queries_at_one_pixel(self) -> None:
        scores = [
            score(Dense(GRID, torch.eye(PIXELS)[pixel].expand(1, HEADS, PIXELS, PIXELS))) for pixel in range(PIXELS)
        ]
        assert 0 < max(scores) < 1 / 49

    def test_no_mass_at_all(self) -> None:
        assert score(Dense(GRID, torch.zeros(1, HEADS, PIXELS, PIXELS))) == 0

    def test_maps_that_do_not_fit_the_grid(self) -> None:
        with pytest.raises(ValueError, match=f"probabilities: must have shape .*{PIXELS}, {PIXELS}.*, got shape"):
            Dense(GRID, torch.zeros(1, HEADS, PIXELS + 1, PIXELS))  # with the row of a class token


@pytest.mark.parametrize("border", ["zero", "renormalise", "circular"])
@pytest.mark.parametrize("shift", [(0, 0), (1, 1), (-1, 0)])
def test_copies_of_one_shift_are_one_tap(border: str, shift: tuple[int, int]) -> None:
    grid = Grid.make((SIDE, SIDE), padding=0 if border == "renormalise" else 1, border=border)  # type: ignore[arg-type]
    copies = score(Shift(grid, [shift] * HEADS, torch.zeros(())))
    assert 1 / HEADS - 0.01 < copies < 0.13


@pytest.mark.parametrize(("heads", "most"), [(9, 1 / 9), (10, 2 / 10), (12, 2 / 12), (18, 2 / 18), (36, 4 / 36)])
def test_copies_score_what_the_allowed_heads_hold(heads: int, most: float) -> None:
    copies = score(Shift(Grid.make((SIDE, SIDE), padding=1, border="zero"), [(1, 1)] * heads, torch.zeros(())))
    assert most - 0.01 < copies <= most
    pairs = score(Shift(GRID, [(0, 0), (1, 1)] * (heads // 2), torch.zeros(())))
    assert copies < pairs < 0.5


class TestFarCopies:
    """For a large shift most queries are clipped to the border, so copies of a head have some mass at other shifts."""

    def copies(self, side: int, shift: tuple[int, int], heads: int) -> float:
        profile = shift_profile(Shift(Grid.make((side, side)), [shift], torch.zeros(())))
        mass, noise = profile.mass.expand(heads, -1, -1), profile.noise.expand(heads, -1, -1)
        return convolution_score(replace(profile, mass=mass, noise=noise, constancy=profile.constancy.expand(heads)))

    @pytest.mark.parametrize(("heads", "most"), [(9, 0.2), (12, 0.26), (18, 0.2), (36, 0.2)])
    @pytest.mark.parametrize("side", [7, 14])
    def test_the_worst_that_half_of_the_queries_can_have(self, side: int, heads: int, most: float) -> None:
        line = range(side // 2 + 1)
        shifts = [(a, b) for a in line for b in line if 2 * (side - a) * (side - b) >= side**2]
        assert max(self.copies(side, shift, heads) for shift in shifts) < most

    @pytest.mark.parametrize(("side", "shift", "said"), [(14, (7, 7), 0.202), (7, (3, 3), 0.216)])
    def test_clipped_queries_make_the_difference(self, side: int, shift: tuple[int, int], said: float) -> None:
        assert self.copies(side, shift, HEADS) == pytest.approx(said, abs=5e-4)
        unclipped = Grid.make((side, side), padding=max(shift), border="zero")
        assert score(Shift(unclipped, [shift] * HEADS, torch.zeros(()))) < 1 / HEADS
        # One column is clipped to the next smaller shift, of the side - shift + 1 columns that can have that shift.
        profile = shift_profile(Shift(Grid.make((side, side)), [shift], torch.zeros(())))
        beside = profile.shifts.tolist().index([shift[0], shift[1] - 1])
        assert float(profile.mass.flatten(1)[0, beside]) == pytest.approx(1 / (side - shift[1] + 1))


class TestBetween:
    @pytest.mark.parametrize("heads", COUNTS)
    def test_mixtures_are_ranked_whatever_the_number_of_heads(self, heads: int) -> None:
        exact = Shift(GRID, taps_for(heads), torch.zeros(())).to_dense()
        parts = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        scores = [score(Dense(GRID, part * exact + (1 - part) * random_rows(heads, sharpness=2.0))) for part in parts]
        assert scores == sorted(scores)
        assert (scores[0] < 0.05, scores[-1] > 0.99) == (True, True)

    def test_mixing_with_uniform_rows_lowers_the_score_in_proportion(self) -> None:
        exact = converted(nn.Conv2d(2, 3, 3, padding=1), SIDE, SIDE).to_dense()
        grid = Grid.make((SIDE, SIDE), padding=1, border="zero")
        parts = [i / 10 for i in range(11)]
        scores = [score(Dense(grid, part * exact.double() + (1 - part) / PIXELS)) for part in parts]
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(parts), **tolerance(torch.float32))

    @pytest.mark.parametrize("border", ["zero", "renormalise", "circular"])
    def test_softening_the_heads_lowers_the_score(self, border: str) -> None:
        encoding = Quadratic(HEADS, dims=2).double()
        grid = Grid.make((SIDE, SIDE), padding=0 if border == "renormalise" else 1, border=border)  # type: ignore[arg-type]
        scores = []
        for alpha in (40.0, 10.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 1e-6):
            with torch.no_grad():
                encoding.centres.copy_(torch.tensor(TAPS))
                encoding.spread.fill_(math.sqrt(2 * alpha))
            scores.append(score(encoding.operator(grid, torch.zeros(1, SIDE, SIDE, 1, dtype=DOUBLE))))
        assert scores == sorted(scores, reverse=True)
        assert scores[0] > 0.99
        assert scores[-1] < 0.02

    def test_layers_are_ranked_by_their_part_of_convolution(self) -> None:
        for _ in range(3):
            parts = torch.rand(8).sort().values
            assert parts.diff().min() > 0.001
            scores = []
            for part in parts:
                shifts = [TAPS[i] for i in torch.randperm(HEADS).tolist()]
                exact = Shift(GRID, shifts, torch.zeros(())).to_dense()
                scores.append(score(Dense(GRID, part * exact + (1 - part) * random_rows(sharpness=2.0))))
            assert scores == sorted(scores)

    def test_heads_may_differ(self) -> None:
        """The score is the fraction of heads at distinct taps; the other heads are uniform."""
        rows = Shift(Grid.make((SIDE, SIDE), padding=1, border="zero"), TAPS, torch.zeros(())).to_dense()
        rows[:, 6:] = 1 / PIXELS
        assert score(Dense(GRID, rows)) == pytest.approx(6 / 9, abs=0.001)


@pytest.mark.parametrize(("heads", "shifts", "limit"), [(3, 5, 1), (4, 4, 1), (1, 3, 1), (4, 3, 2), (5, 2, 3)])
def test_the_assignment_is_the_best_of_all(heads: int, shifts: int, limit: int) -> None:
    shares = torch.rand(heads, shifts, dtype=DOUBLE)
    best = max(
        sum(float(shares[head, shift]) for head, shift in enumerate(chosen))
        for chosen in itertools.product(range(shifts), repeat=heads)
        if max(map(chosen.count, chosen)) <= limit
    )
    assert assigned_mass(shares, limit) == pytest.approx(best, rel=1e-12)


def test_more_heads_than_shifts_leaves_some_without() -> None:
    shares = torch.tensor([[0.5, 0.2], [0.9, 0.8], [0.1, 0.3]], dtype=DOUBLE)
    assert assigned_mass(shares, 1) == pytest.approx(0.5 + 0.8, rel=1e-12)


class TestTapResidual:
    NOTHING = math.sqrt(1 - 1 / 15**2)  # all heads are the mean of 15 x 15 shifts; the same with 9 taps and with 1

    @pytest.mark.parametrize("heads", [3, 9, 12])
    @pytest.mark.parametrize("images", [1, 4])
    @pytest.mark.parametrize("sharpness", [0.01, 0.1, 1.0])
    def test_noise_of_nearly_uniform_heads_spans_nothing(self, heads: int, images: int, sharpness: float) -> None:
        rows = (sharpness * torch.randn(images, heads, PIXELS, PIXELS)).softmax(-1)
        assert tap_residual(shift_profile(Dense(GRID, rows))) == pytest.approx(self.NOTHING, abs=1e-3)

    def test_noise_of_hard_heads_spans_nothing(self) -> None:
        rows = torch.eye(PIXELS)[torch.randint(PIXELS, (1, HEADS, PIXELS))]
        assert tap_residual(shift_profile(Dense(GRID, rows))) > 0.99

    @pytest.mark.parametrize("part", [0.1, 0.5])
    def test_a_little_convolution_is_not_taken_for_noise(self, part: float) -> None:
        rows = part * Shift(GRID, TAPS, torch.zeros(())).to_dense() + (1 - part) * random_rows()
        assert tap_residual(shift_profile(Dense(GRID, rows))) < 0.35

    @pytest.mark.parametrize("border", ["renormalise", "zero", "replicate", "circular"])
    @pytest.mark.parametrize("side", [4, 7, SIDE])
    def test_of_a_convolution_is_nought_under_every_border(self, side: int, border: Any) -> None:
        grid = Grid.make((side, side), padding=0 if border == "renormalise" else 1, border=border)
        assert tap_residual(shift_profile(Shift(grid, TAPS, torch.zeros(())))) < 1e-6

    @pytest.mark.parametrize("alpha", [0.3, 1.0, 2.0])
    def test_soft_heads_keep_their_span(self, alpha: float) -> None:
        """Rows that are the same for all queries have no noise, even in soft heads."""
        encoding = Quadratic(HEADS, dims=2).double()
        with torch.no_grad():
            encoding.centres.copy_(torch.tensor(TAPS))
            encoding.spread.fill_(math.sqrt(2 * alpha))
        profile = shift_profile(encoding.operator(GRID, torch.zeros(1, SIDE, SIDE, 1, dtype=DOUBLE)))
        exact = tap_residual(replace(profile, noise=torch.zeros_like(profile.noise)))
        assert tap_residual(profile) == pytest.approx(exact, abs=0.005)
        assert exact < 0.9

    def test_copies_that_float32_rounds_apart_are_one_head(self) -> None:
        """Scores that differ by a constant give equal attention, except for rounding."""
        grid = Grid.make((SIDE, SIDE), padding=SIDE // 2, border="circular")
        encoding = Quadratic(1, dims=2)
        with torch.no_grad():
            encoding.centres.zero_()
            encoding.spread.fill_(1.0)
        rows = encoding.operator(grid, torch.zeros(1, SIDE, SIDE, 1)).to_dense()
        copies = (rows.clamp_min(1e-38).log() + torch.linspace(0, 50, HEADS)[:, None, None]).softmax(-1)
        profile = shift_profile(Dense(grid, copies))
        head = profile.mass[0].flatten().square()
        within = head[(profile.shifts.abs() <= 1).all(-1)].sum() / head.sum()
        assert tap_residual(profile) == pytest.approx(math.sqrt(1 - float(within) / 9), abs=1e-6)

    @pytest.mark.parametrize("part", [1e-2, 1e-4])
    def test_a_trace_of_convolution_that_is_no_rounding_counts(self, part: float) -> None:
        """Taps added to uniform attention span all weights that sum to 0, that is, 8 of 9 dimensions."""
        grid = Grid.make((SIDE, SIDE), padding=1, border="circular")
        exact = Shift(grid, TAPS, torch.zeros(())).to_dense().double()
        found = tap_residual(shift_profile(Dense(grid, part * exact + (1 - part) / PIXELS)))
        assert found == pytest.approx(math.sqrt(1 / 9), abs=0.02)


def test_one_key() -> None:
    assert score(Dense(Grid.make((1, 1)), torch.ones(1, 1, 1, 1))) == 1
    assert score(Dense(Grid.make((1, 1)), torch.ones(1, 2, 1, 1))) == 0.5


class TestCoverage:
    @pytest.mark.parametrize(
        ("heads", "dims", "expected"), [(1, 2, 1), (8, 2, 1), (9, 2, 3), (24, 2, 3), (25, 2, 5), (26, 3, 1), (7, 1, 7)]
    )
    def test_kernel_size(self, heads: int, dims: int, expected: int) -> None:
        assert kernel_size(heads, dims) == expected

    def test_counts_the_taps_that_distinct_heads_hold(self) -> None:
        grid = Grid.make((SIDE, SIDE), padding=3, border="zero")
        shifts = [*TAPS[:4], *TAPS[:3], (3, 3), (2, 0), (0, -3)]  # four taps, three copies, three far shifts
        assert grid_coverage(shift_profile(Shift(grid, shifts, torch.zeros(())))) == pytest.approx(4 / 9)

    @pytest.mark.parametrize("side", [12, 13, 14])
    @pytest.mark.parametrize("stride", [1, 2, 3, 4])
    @pytest.mark.parametrize(("size", "padding"), [(3, 0), (3, 1), (3, 2), (5, 0), (5, 1), (4, 1)])
    def test_is_around_the_middle_of_the_layers_field(self, size: int, padding: int, stride: int, side: int) -> None:
        conv = nn.Conv2d(2, 3, size, padding=padding, stride=stride)
        profile = shift_profile(converted(conv, side, side))
        assert grid_coverage(profile) > 0.99
        assert tap_residual(profile) < 0.01

    @pytest.mark.parametrize("extra", [0, 1])
    @pytest.mark.parametrize("padding", [0, 1])
    def test_is_around_the_middle_of_a_transposed_one(self, padding: int, extra: int) -> None:
        conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=padding, output_padding=extra)
        assert grid_coverage(shift_profile(converted(conv, 7, 6))) > 0.99

    def test_far_from_the_field_is_not_covered(self) -> None:
        grid = Grid.make((SIDE, SIDE), window=(3, 3))  # shifts 0 to 2, centred at 1
        shifts = [(row + 4, column) for row, column in TAPS]  # none closer than 3
        assert grid_coverage(shift_profile(Shift(grid, shifts, torch.zeros(())))) < 0.1

    def test_of_uniform_attention_is_chance(self) -> None:
        profile = shift_profile(Dense(GRID, torch.full((1, HEADS, PIXELS, PIXELS), 1 / PIXELS)))
        assert grid_coverage(profile) == pytest.approx(1 / PIXELS)

    def test_taps_beyond_the_image_are_not_held(self) -> None:
        profile = shift_profile(Shift(Grid.make((1, 9), padding=1, border="zero"), TAPS, torch.zeros(())))
        assert grid_coverage(profile) == pytest.approx(3 / 9)
