"""Tests of encodings: parameter counts, explicit formulas and invalid arguments."""

import copy
import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnconv import (
    Absolute,
    GeneralizedQuadratic,
    Grid,
    LearnedRelative,
    LearnedRelativeContent,
    Quadratic,
    Relative,
    SelfAttention2d,
)
from attnconv.encodings import (
    ENCODING_NAMES,
    LearnedPositions,
    QuadraticFeatures,
    SinusoidalFeatures,
    SinusoidalPositions,
    encoding_named,
)
from attnconv.encodings.base import Encoding
from attnconv.encodings.content import TERMS, sinusoids
from tests.tolerances import tolerance

DOUBLE = torch.float64


def count(encoding: Encoding) -> int:
    return sum(parameter.numel() for parameter in encoding.parameters())


def image(grid: Grid, channels: int = 12) -> Tensor:
    return torch.randn(2, *grid.sizes, channels, dtype=DOUBLE)


def scores(encoding: Encoding, grid: Grid, x: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*encoding.terms(grid, x).values())).sum(0)


def test_parameter_counts_are_the_papers() -> None:
    assert count(Quadratic(9)) == 27
    assert count(GeneralizedQuadratic(9)) == 54
    assert count(LearnedRelative(9, channels=400, max_shift=15)) == 2 * 31 * 400 + 2 * 400 * 9
    assert count(LearnedRelativeContent(400, 9)) == 2 * 31 * 200 + 2 * (400 * 3600 + 3600)


@pytest.mark.parametrize("name", ENCODING_NAMES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_selected_heads_are_those_of_the_whole_encoding(name: str, dims: int) -> None:
    encoding, heads = encoding_named(name, 12, 4, dims).to(DOUBLE), [3, 0, 0]
    grid = Grid.make((5, 4, 3)[:dims])
    x = image(grid)
    picked = encoding.select_heads(heads)
    assert picked.heads == 3
    before, after = encoding.operator(grid, x).to_dense(), picked.operator(grid, x).to_dense()
    torch.testing.assert_close(after, before[:, heads], **tolerance(DOUBLE))
    fresh = encoding_named(name, 12, 3, dims).to(DOUBLE)
    assert repr(picked) == repr(fresh)
    assert {n: p.shape for n, p in picked.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}


@pytest.mark.parametrize("heads", [[], [4], [-1], [0.5], [True, False, True, True]])
@pytest.mark.usefixtures("unhooked")
def test_heads_that_do_not_exist_are_not_selected(heads: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"heads: .*got {re.escape(str(heads))}"):
        Quadratic(4).select_heads(heads)


@pytest.mark.usefixtures("unhooked")
def test_heads_may_be_a_tensor() -> None:
    encoding = Quadratic(4)
    picked = encoding.select_heads(torch.tensor([2, 0]))  # type: ignore[arg-type]
    assert torch.equal(picked.get_parameter("centres"), encoding.centres[[2, 0]])


def test_vectors_of_other_positions_are_refused() -> None:
    for features in (SinusoidalFeatures(8, 1), QuadraticFeatures(1)):
        with pytest.raises(ValueError, match=r"features: must have 2 axes, got 1"):
            Relative(8, 2, 2, features=features)
    for positions in (SinusoidalPositions(8, 1), LearnedPositions(8, (4,)), LearnedPositions(1, (4, 4))):
        with pytest.raises(ValueError, match=r"positions: must have 8 channels and 2 axes"):
            Absolute(8, 2, 2, positions=positions)


def test_initial_heads_are_drawn_as_in_the_papers_code() -> None:
    encoding = Quadratic(20_000)
    assert encoding.centres.std().item() == pytest.approx(2, rel=0.02)
    assert encoding.spread.mean().item() == pytest.approx(1, abs=1e-3)
    assert encoding.spread.std().item() == pytest.approx(0.01, rel=0.05)
    assert Quadratic(20_000, centre_std=math.sqrt(2)).centres.var().item() == pytest.approx(2, rel=0.05)
    general = GeneralizedQuadratic(20_000)
    assert (general.root_precision - torch.eye(2)).std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("diagonal", [False, True])
def test_quadratic_is_equation_14_up_to_a_constant(diagonal: bool) -> None:
    encoding, grid = Quadratic(3, diagonal=diagonal).double(), Grid.make((4, 5), padding=1, border="zero")
    rows, columns = (axis.shifts().double() for axis in grid.axes)
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]  # (n1, n2, l1, l2)
    expected = []
    for centre, spread in zip(encoding.centres.detach(), encoding.spread.detach(), strict=True):
        first, last = spread[0] ** 2 / 2, spread[-1] ** 2 / 2
        expected.append(-(first * (rows - centre[0]) ** 2 + last * (columns - centre[1]) ** 2).flatten(2).flatten(0, 1))
    got = scores(encoding, grid, image(grid)).softmax(-1)[0]
    torch.testing.assert_close(got.detach(), torch.stack(expected).softmax(-1), **tolerance(DOUBLE, scale=10))


def test_generalised_is_equation_19_up_to_a_constant_and_extends_the_quadratic() -> None:
    encoding, grid = GeneralizedQuadratic(3, spread_std=0.5).double(), Grid.make((4, 5))
    got = scores(encoding, grid, image(grid)).softmax(-1)[0].detach()
    points = torch.cartesian_prod(torch.arange(4), torch.arange(5)).double()
    shifts = points[None] - points[:, None]
    away = shifts[None] - encoding.centres.detach()[:, None, None]
    expected = -0.5 * torch.einsum("hnmi,hij,hnmj->hnm", away, encoding.gaussians().precision, away)
    torch.testing.assert_close(got, expected.softmax(-1), **tolerance(DOUBLE, scale=10))
    inverse = torch.linalg.inv(encoding.gaussians().precision)
    torch.testing.assert_close(encoding.gaussians().covariance, inverse, **tolerance(DOUBLE, scale=10))
    plain = Quadratic(3).double()
    with torch.no_grad():
        encoding.centres.copy_(plain.centres)
        encoding.root_precision.copy_(plain.spread[:, :, None] * torch.eye(2))
    torch.testing.assert_close(
        scores(encoding, grid, image(grid)).softmax(-1),
        scores(plain, grid, image(grid)).softmax(-1),
        **tolerance(DOUBLE, scale=10),
    )
    torch.testing.assert_close(
        encoding.gaussians().covariance, plain.gaussians().covariance, **tolerance(DOUBLE, scale=10)
    )


def test_singular_precisions_have_no_covariance_but_attend_all_the_same() -> None:
    encoding, grid = GeneralizedQuadratic(2), Grid.make((3, 3))
    with torch.no_grad():
        encoding.root_precision[1] = 0
    with pytest.raises(ValueError, match=r"root_precision: .*got singular matrices for heads \[1\]"):
        _ = encoding.gaussians().covariance
    rows = encoding.operator(grid, torch.zeros(1, 3, 3, 1)).to_dense()
    torch.testing.assert_close(rows[0, 1], torch.full((9, 9), 1 / 9))


def test_learned_scores_look_up_rows_and_columns_and_clamp_far_shifts() -> None:
    encoding = LearnedRelative(2, channels=6, max_shift=2).double()
    grid = Grid.make((5, 4))
    got = scores(encoding, grid, image(grid))[0].unflatten(1, (5, 4)).unflatten(3, (5, 4))
    tables = [
        (table @ projection.weight.T).detach()
        for table, projection in zip(encoding.tables, encoding.projections, strict=True)
    ]
    for q1, q2, k1, k2 in ((0, 0, 4, 3), (2, 1, 2, 1), (4, 3, 0, 1)):
        row, column = (max(-2, min(2, shift)) + 2 for shift in (k1 - q1, k2 - q2))
        torch.testing.assert_close(got[:, q1, q2, k1, k2].detach(), tables[0][row] + tables[1][column])


def test_learned_content_is_the_reference_formula() -> None:
    encoding, grid = LearnedRelativeContent(12, 2, head_channels=6, max_shift=4).double(), Grid.make((3, 4))
    x = image(grid)
    q, k = (linear(x.flatten(1, 2)).unflatten(-1, (2, 6)).transpose(1, 2) for linear in (encoding.query, encoding.key))
    got = encoding.terms(grid, x)
    torch.testing.assert_close(got["content-content"], q @ k.mT / math.sqrt(6))
    for query, key in ((0, 11), (7, 2), (5, 5)):
        down, right = key // 4 - query // 4 + 4, key % 4 - query % 4 + 4
        expected = q[:, :, query, :3] @ encoding.tables[0][down] + q[:, :, query, 3:] @ encoding.tables[1][right]
        torch.testing.assert_close(got["content-position"][:, :, query, key], expected / math.sqrt(6))


@pytest.mark.parametrize("features", [lambda: SinusoidalFeatures(12, 2), lambda: QuadraticFeatures(2)])
def test_relative_is_equation_8_term_by_term(features: Callable[[], SinusoidalFeatures | QuadraticFeatures]) -> None:
    grid = Grid.make((3, 4), stride=2, padding=1, border="zero")
    encoding = Relative(12, 2, head_channels=5, features=features(), scaled=False).double()
    x = image(grid)
    got = encoding.terms(grid, x)
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1)).flatten(1, 2)
    assert encoding.query is not None
    assert encoding.key is not None
    assert encoding.position_key is not None
    assert encoding.content_bias is not None
    assert encoding.position_bias is not None
    keys = encoding.key(padded).unflatten(-1, (2, 5))  # (b, lattice, h, e)
    pixels = x[:, ::2, ::2].flatten(1, 2)
    queries = encoding.query(pixels).unflatten(-1, (2, 5))
    torch.testing.assert_close(got["content-content"], torch.einsum("bnhe,bmhe->bhnm", queries, keys))
    torch.testing.assert_close(
        got["position-content"],
        torch.einsum("he,bmhe->bhm", encoding.content_bias, keys)[:, :, None].expand_as(got["content-content"]),
    )
    for query, (down, right) in ((0, (1, 2)), (3, (-2, 1))):
        i, j = divmod(query, 2)
        place = (2 * i + down + 1) * 6 + 2 * j + right + 1
        vector = sum(
            encoding.features.along(axis, torch.tensor([[shift]], dtype=DOUBLE))[0, 0]
            for axis, shift in enumerate((down, right))
        )
        assert isinstance(vector, Tensor)
        key = encoding.position_key(vector).unflatten(-1, (2, 5))
        expected = torch.einsum("bhe,he->bh", queries[:, query], key)
        torch.testing.assert_close(got["content-position"][:, :, query, place], expected)
        torch.testing.assert_close(
            got["position-position"][0, :, query, place], torch.einsum("he,he->h", encoding.position_bias, key)
        )


@pytest.mark.parametrize("size", range(1, 16))
def test_every_choice_of_terms_stands_alone(size: int) -> None:
    """Each of the 15 subsets has only its parameters, all with gradients; the operator is the softmax of the terms."""
    terms = tuple(term for i, term in enumerate(TERMS) if size >> i & 1)
    encoding, grid = Relative(12, 2, terms=terms).double(), Grid.make((3, 2), padding=1, border="replicate")
    x = image(grid)
    found = encoding.terms(grid, x)
    assert set(found) == set(terms)
    rows = encoding.operator(grid, x).to_dense()
    expected = grid.fold(scores(encoding, grid, x).softmax(-1))
    torch.testing.assert_close(rows, expected.expand_as(rows), **tolerance(DOUBLE, scale=10))
    rows.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoding.parameters())


@pytest.mark.parametrize("positions", [lambda: SinusoidalPositions(12, 2), lambda: LearnedPositions(12, (3, 4))])
def test_absolute_is_equation_7(positions: Callable[[], SinusoidalPositions | LearnedPositions]) -> None:
    encoding, grid = Absolute(12, 2, positions=positions(), head_channels=5).double(), Grid.make((3, 4))
    x = image(grid)
    places = encoding.positions(grid, [torch.arange(3), torch.arange(4)], DOUBLE).flatten(0, 1)
    pixels = x.flatten(1, 2)
    w_query, w_key = (linear.weight.unflatten(0, (2, 5)) for linear in (encoding.query, encoding.key))
    got = encoding.terms(grid, x)
    for name, left, right in (
        ("content-content", pixels, pixels),
        ("content-position", pixels, places.expand_as(pixels)),
        ("position-content", places.expand_as(pixels), pixels),
        ("position-position", places.expand_as(pixels), places.expand_as(pixels)),
    ):
        expected = torch.einsum("bnc,hec,hed,bmd->bhnm", left, w_query, w_key, right) / math.sqrt(5)
        torch.testing.assert_close(got[name].expand_as(expected), expected)
    summed = encoding.operator(grid, x).to_dense()
    torch.testing.assert_close(summed, scores(encoding, grid, x).softmax(-1), **tolerance(DOUBLE, scale=10))


def test_learned_positions_are_their_table_at_its_size_and_resampled_at_others() -> None:
    positions = LearnedPositions(3, (2, 3))
    table = positions.table[0].movedim(0, -1)
    torch.testing.assert_close(positions(Grid.make((2, 3)), [torch.arange(2), torch.arange(3)], torch.float32), table)
    larger = positions(Grid.make((4, 6)), [torch.arange(4), torch.arange(-2, 6)], torch.float32)
    assert larger.shape == (4, 8, 3)
    torch.testing.assert_close(larger[:, 0], larger[:, 2])  # outside the image: nearest position


def test_sinusoids_of_a_shift_are_rotations() -> None:
    """p(a + d) is a fixed rotation of p(a), which makes sinusoids suitable for relative positions."""
    here, there = sinusoids(torch.tensor([3.0, 8.0], dtype=DOUBLE), 8), sinusoids(torch.tensor([5.0, 10.0]).double(), 8)
    torch.testing.assert_close((here[0] * there[0]).sum(), (here[1] * there[1]).sum())


def test_wavelengths_of_sinusoids_run_from_2_pi_to_10_000_times_as_long() -> None:
    """As in the Transformer: w_i = 10000^(-2 i / channels)."""
    position, rates = 3.0, [10_000 ** (-2 * i / 8) for i in range(4)]
    expected = [math.sin(position * rate) for rate in rates] + [math.cos(position * rate) for rate in rates]
    found = sinusoids(torch.tensor(position, dtype=DOUBLE), 8)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=DOUBLE), **tolerance(DOUBLE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quadratic(0), "heads: .*got 0"),
        (lambda: Quadratic(1, 4), "dims: must be .*, got 4"),
        (lambda: LearnedRelative(1, channels=0), "channels: .*got 0"),
        (lambda: LearnedRelative(1, max_shift=-1), "max_shift: .*got -1"),
        (lambda: LearnedRelativeContent(0, 1), "in_channels: .*got 0"),
        (lambda: LearnedRelativeContent(5, 1, head_channels=5), "head_channels: .*got 5"),
        (lambda: LearnedRelativeContent(4, 1, head_channels=0), "head_channels: must be .*, got 0"),
        (lambda: SinusoidalFeatures(6, 2), "position_channels: .*got 6"),
        (lambda: SinusoidalPositions(2, 2), "in_channels: .*got 2"),
        (lambda: LearnedPositions(4, (3, 0)), r"sizes: .*got \(3, 0\)"),
        (lambda: Relative(4, 1, terms=()), r"terms: .*got \(\)"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_that_follow_from_the_image_are_rounded_up_to_what_the_axes_need() -> None:
    assert LearnedRelativeContent(3, 2).head_channels == 4
    assert Relative(3, 2, 3).features.channels == 6
    assert Relative(4, 2).features.channels == 4


@pytest.mark.parametrize("kind", [Quadratic, GeneralizedQuadratic])
@pytest.mark.parametrize("centre", [0.0, 7.3, 40.0, -1e3])
def test_float32_follows_float64_for_sharp_flat_and_far_heads(kind: type[Encoding], centre: float) -> None:
    """Rows are accurate with one sharp and one flat axis, any rotation, and centres inside or far outside the image."""
    grid = Grid.make((9, 12), padding=1, border="zero")
    for sharp, flat, turn in itertools.product((100.0, 3.0), (0.1, 1e-3), (0.0, 0.3, math.pi / 4)):
        encoding = kind(1, 2) if kind is GeneralizedQuadratic else Quadratic(1, 2, diagonal=True)
        rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        with torch.no_grad():
            encoding.get_parameter("centres").copy_(torch.tensor([[centre, 0.0]]))
            if isinstance(encoding, GeneralizedQuadratic):
                encoding.root_precision[0] = rotation @ torch.diag(torch.tensor([sharp, flat]))
            else:
                encoding.get_parameter("spread").copy_(torch.tensor([[sharp, flat]]))
        single = encoding.operator(grid, torch.zeros(1, 9, 12, 1)).to_dense()
        double = encoding.double().operator(grid, torch.zeros(1, 9, 12, 1, dtype=DOUBLE)).to_dense()
        torch.testing.assert_close(single.double(), double, **tolerance(torch.float32))


def test_hard_shifts_are_found_only_where_heads_are_hard() -> None:
    encoding = Quadratic(2)
    with torch.no_grad():
        encoding.centres.copy_(torch.tensor([[1.0, -2.0], [0.0, 3.0]]))
        encoding.spread.fill_(math.sqrt(2 * 18))
    assert encoding.hard_shifts() == ((1, -2), (0, 3))
    with torch.no_grad():
        encoding.spread[1] = math.sqrt(2 * 10)
    assert encoding.hard_shifts() is None
    with torch.no_grad():
        encoding.spread.fill_(100.0)
        encoding.centres[0, 0] = 1.5
    assert encoding.hard_shifts() is None  # midway between two positions: half on each, for any alpha


@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("size", [10, 24])  # all rows at once; windows
def test_gradients_of_a_covariance_in_float32_are_right_to_the_rounding_of_their_terms(
    size: int, alike: bool, mean: float
) -> None:
    """The error of dS = sum A (dA - sum_k A dA) ds/dS is at most u = 2^-24 times the same sum of absolute values."""
    layer = SelfAttention2d(2, 2, 2, encoding=GeneralizedQuadratic(2))
    exact = copy.deepcopy(layer).double()
    x, slope = torch.rand(1, 2, size, size) + mean, torch.randn(1, 2, size, size)
    slope = torch.ones_like(slope) if alike else slope
    for some in (layer, exact):
        some(x.to(some.bias)).backward(slope.to(some.bias))
    found, wanted = (some.encoding.get_parameter("root_precision").grad for some in (layer, exact))
    with torch.no_grad():
        rows = exact.operator(x.double()).rows(torch.arange(size**2))[0]  # (h, n, m)
        back = torch.einsum("bdq,hcd,bck->hqk", slope.double().flatten(2), exact.weight, x.double().flatten(2)).abs()
        places = torch.cartesian_prod(*[torch.arange(size, dtype=DOUBLE)] * 2)
        off = places - places[:, None] - exact.encoding.get_parameter("centres")[:, None, None]  # (h, n, m, 2)
        slopes = torch.einsum("hqki,hqkj,hjl->hqkil", off, off, exact.encoding.get_parameter("root_precision")).abs()
        terms = torch.einsum("hqk,hqkil->hil", rows * (back + (rows * back).sum(-1, keepdim=True)), slopes)
    assert found is not None
    assert wanted is not None
    assert bool(((found - wanted).abs() <= 2**-24 * terms).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_contiguous_so_that_products_copy_nothing(dtype: torch.dtype) -> None:
    grid, x = Grid.make((3, 4)), torch.randn(2, 3, 4, 6, dtype=dtype)
    operator = LearnedRelativeContent(6, 3, max_shift=4).to(dtype).operator(grid, x)
    assert operator.queries.is_contiguous()
    assert operator.keys.is_contiguous()


MERGED: dict[str, Callable[[int], Absolute | LearnedRelativeContent]] = {
    "learned": lambda dims: LearnedRelativeContent(16, 2, dims, max_shift=1 if dims > 1 else 2),
    "absolute": lambda dims: Absolute(16, 2, dims, positions=LearnedPositions(16, (4,) * dims)),
}
both_merged = pytest.mark.parametrize("make", MERGED.values(), ids=MERGED)


def unmerged(encoding: Absolute | LearnedRelativeContent) -> Absolute | LearnedRelativeContent:
    """Return a copy whose keys are computed by the module `key`, because it has a hook."""
    other = copy.deepcopy(encoding)
    other.key.register_forward_hook(lambda *_: None)
    return other


@both_merged
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_product_replaces_those_of_queries_and_keys_with_equal_outputs_and_gradients(
    make: Callable[[int], Absolute | LearnedRelativeContent], dims: int
) -> None:
    grid = Grid.make((5, 4, 3)[:dims], stride=2, padding=1, border="zero")
    x, weight = torch.randn(20, *grid.sizes, 16, dtype=DOUBLE), torch.randn(2, 16, 5, dtype=DOUBLE)
    encoding, found = make(dims).double(), []
    for some, heads in ((encoding, 1), (unmerged(encoding), 2)):
        pixels = x.clone().requires_grad_()
        operator = some.operator(grid, pixels)
        assert operator.keys.shape[1] == heads
        out = operator.contract(pixels, weight)
        out.backward(torch.arange(out.numel(), dtype=DOUBLE).view(out.shape).sin())
        found.append([operator.to_dense(), out, pixels.grad, *(parameter.grad for parameter in some.parameters())])
    torch.testing.assert_close(*found)


@both_merged
def test_one_product_loses_no_more_precision_in_half(
    make: Callable[[int], Absolute | LearnedRelativeContent],
) -> None:
    encoding, grid = make(2), Grid.make((8, 8))
    x = torch.randn(8, 8, 8, 16)
    exact = copy.deepcopy(encoding).double().operator(grid, x.double()).to_dense().detach()
    errors = []
    for some in (encoding, unmerged(encoding)):
        with torch.autocast("cpu", torch.bfloat16):
            errors.append(float((some.operator(grid, x).to_dense().detach() - exact).square().mean()))
    assert errors[0] <= errors[1]


@both_merged
def test_changed_linear_maps_are_called(make: Callable[[int], Absolute | LearnedRelativeContent]) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def keys(**changes: object) -> int:
        encoding = make(2)
        for name, value in changes.items():
            setattr(encoding.key, name, value)
        return encoding.operator(Grid.make((8, 8)), torch.randn(8, 8, 8, 16)).keys.shape[1]

    assert keys() == 1
    assert keys(__class__=Doubled) == 2
    linear = torch.nn.Linear(16, 32)
    assert keys(forward=lambda x: 2 * linear(x)) == 2
    assert keys(bias=torch.nn.Parameter(torch.ones(32)) if make(2).key.bias is None else None) == 2
    encoding, grid, x = make(2), Grid.make((8, 8)), torch.randn(8, 8, 8, 16)
    torch.nn.utils.parametrizations.orthogonal(encoding.key)
    assert encoding.operator(grid, x).keys.shape[1] == 2
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert make(2).operator(grid, x).keys.shape[1] == 2
    finally:
        hook.remove()
    wrapped = make(2)
    wrapped.key = torch.nn.Sequential(wrapped.key)  # type: ignore[assignment]
    assert wrapped.operator(grid, x).keys.shape[1] == 2


def test_merged_keys_do_not_change_with_the_image() -> None:
    grid, x = Grid.make((8, 8)), torch.randn(8, 8, 8, 16)
    operator = LearnedRelativeContent(16, 2, max_shift=2).operator(grid, x)
    before = operator.to_dense()
    x.zero_()
    assert bool((operator.to_dense() == before).all())


@both_merged
def test_for_few_positions_long_tables_and_float16_queries_and_keys_are_computed(
    make: Callable[[int], Absolute | LearnedRelativeContent],
) -> None:
    grid, x = Grid.make((3, 4)), torch.randn(50, 3, 4, 16)
    assert make(2).operator(grid, x[:1]).keys.shape[1] == 2
    assert make(2).half().operator(grid, x.half()).keys.shape[1] == 2
    assert LearnedRelativeContent(16, 2, head_channels=4).operator(grid, x).keys.shape[1] == 2
    assert LearnedRelativeContent(16, 2, max_shift=15).operator(grid, x).keys.shape[1] == 2
