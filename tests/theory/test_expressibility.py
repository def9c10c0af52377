"""Lemma 3 decided, held against exact arithmetic, dense least squares and PyTorch's convolutions."""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv import SelfAttention1d, SelfAttention2d, from_conv
from attnconv.theory import lemma3_phi
from attnconv.theory.expressibility import Expressiveness, can_express, factorise
from tests.tolerances import tolerance

Row = list[Fraction]
MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def hard(border: Any = "zero", mode: Any = "zeros", **options: Any) -> SelfAttention2d:
    """Nine heads, each on one position of a 3 x 3 kernel, in float64."""
    layer = from_conv(nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode, dtype=torch.float64), **options)
    layer.geometry = dataclasses.replace(layer.geometry, border=border)
    assert isinstance(layer, SelfAttention2d)
    return layer


def test_counter_example_to_the_condition_of_each_query() -> None:
    one_pixel_each = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 2, 2)  # (h, n, m): head h attends pixel h
    answer = can_express(one_pixel_each, 1, sizes=(2,))
    assert answer.expresses_each_query
    assert not answer.expresses
    assert answer.expresses_inside is False
    # Both queries see the same rows, so Phi can do no better than half of each: ||E - Phi A||^2 = 1 of ||E||^2 = 2.
    torch.testing.assert_close(answer.uniform.phi, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert answer.uniform.residuals.everywhere == pytest.approx(math.sqrt(0.5))
    assert answer.each_query.everywhere == 0.0


@pytest.mark.parametrize("sizes", [(6, 6), (3, 5), (1, 1), (2, 7)])
@pytest.mark.parametrize(
    ("border", "mode"),
    [("zero", "zeros"), ("replicate", "replicate"), ("reflect", "reflect"), ("circular", "circular")],
)
def test_hard_heads_express_their_kernel(border: str, mode: str, sizes: tuple[int, int]) -> None:
    answer = can_express(hard(border, mode), 3, sizes=sizes, padding_mode=mode)
    assert answer.uniform.residuals.everywhere < 1e-14
    assert answer.each_query.everywhere < 1e-14
    assert (answer.uniform_inside is None) == (min(sizes) < 3)
    assert answer.expresses_inside is (True if min(sizes) >= 3 else None)


@pytest.mark.parametrize(("size", "best", "own"), [(5, 0.4393, 0.5756), (8, 0.3690, 0.4360)])
def test_renormalised_heads_fail_at_a_border_of_zeros(size: int, best: float, own: float) -> None:
    layer = hard("renormalise")
    zeros = can_express(layer, 3, sizes=(size, size))
    assert zeros.expresses_each_query
    assert not zeros.expresses
    assert zeros.expresses_inside
    assert zeros.uniform_inside is not None
    assert zeros.uniform_inside.residuals.inside is not None
    assert zeros.uniform_inside.residuals.inside < 1e-14
    assert zeros.uniform.residuals.everywhere == pytest.approx(best, abs=1e-4)
    # Inside, Phi is the identity: it leaves one for each tap that sees a zero, of 9 n taps in all.
    seen = (3 * size - 2) ** 2
    assert zeros.uniform_inside.residuals.everywhere == pytest.approx(math.sqrt((9 * size**2 - seen) / seen))
    assert zeros.uniform_inside.residuals.everywhere == pytest.approx(own, abs=1e-4)
    replicate = can_express(layer, 3, sizes=(size, size), padding_mode="replicate")
    assert replicate.uniform.residuals.everywhere < 1e-14
    assert replicate.expresses


@pytest.mark.parametrize(
    ("dtype", "equal"),
    [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_rows_in_every_dtype(dtype: torch.dtype, equal: float) -> None:
    rows = hard().operator(torch.zeros(1, 1, 4, 5, dtype=torch.float64)).to_dense().detach()[0]
    mixed = torch.einsum("gh,hnm->gnm", 0.75 * torch.eye(9, dtype=torch.float64) + 0.25 / 9, rows)
    exact, rounded = (can_express(given, 3, sizes=(4, 5)) for given in (mixed, mixed.to(dtype)))
    assert rounded.expresses
    assert rounded.tolerance == equal
    assert rounded.rank_tolerance == max(torch.finfo(dtype).eps, 2**-48) * 3
    torch.testing.assert_close(rounded.uniform.phi, exact.uniform.phi, rtol=equal, atol=equal)


def test_float32_layers_express_within_their_tolerance() -> None:
    layer = from_conv(nn.Conv2d(1, 1, 3, padding=1))
    answer = can_express(layer, 3, sizes=(6, 6))
    assert answer.expresses
    assert answer.tolerance == 1e-5


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(1, 2), (2, 4), (4, 3)])
def test_even_kernels_stand_as_pytorch_pads_same(kernel: tuple[int, int], dilation: int) -> None:
    conv = nn.Conv2d(2, 3, kernel, padding="same", dilation=dilation, bias=False, dtype=torch.float64)
    layer = from_conv(conv)
    answer = can_express(layer, kernel, sizes=(5, 6), dilation=dilation)
    assert answer.expresses
    assert layer.weight is not None
    reachable = answer.uniform.singular_values > 0.5  # taps that see a pixel from somewhere
    if bool(reachable.all()):
        torch.testing.assert_close(answer.weights(conv.weight), layer.weight, **tolerance(torch.float64))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 1, 3, stride=2, padding=1),
        nn.Conv2d(1, 1, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        nn.Conv2d(1, 1, 5, padding=1, padding_mode="circular"),
        nn.Conv1d(1, 1, 4, stride=3, padding=2, padding_mode="reflect"),
        nn.Conv3d(1, 1, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
    ],
    ids=lambda conv: type(conv).__name__,
)
def test_stride_dilation_and_padding(conv: Any) -> None:
    sizes = (7, 6, 5)[: len(conv.kernel_size)]
    layer = from_conv(conv.double())
    options = {"dilation": conv.dilation, "padding": conv.padding, "padding_mode": conv.padding_mode}
    answer = can_express(layer, conv.kernel_size, sizes=sizes, **options)
    assert answer.expresses
    rows = layer.operator(torch.zeros(1, 1, *sizes, dtype=torch.float64)).to_dense()
    alone = can_express(rows, conv.kernel_size, sizes=sizes, stride=conv.stride, **options)
    torch.testing.assert_close(alone.uniform.phi, answer.uniform.phi)
    moved = {**options, "padding": tuple(pad + 1 for pad in conv.padding)}
    assert not can_express(layer, conv.kernel_size, sizes=sizes, **moved).expresses


def test_one_query_that_attends_another_pixel_is_enough() -> None:
    """However many others there are: the verdict is about every query."""
    rows = torch.eye(900, dtype=torch.bfloat16)[None].clone()
    rows[0, 7] = rows[0, 8]
    answer = can_express(rows, 1, sizes=(900,), tolerance=0.1)
    assert answer.uniform.residuals.everywhere < 0.1  # a single query among many
    assert not answer.expresses
    swapped = torch.eye(900)[None].repeat(2, 1, 1)  # each query alone is served, by one head or the other
    swapped[0, 7], swapped[1, 7] = swapped[0, 8].clone(), swapped[1, 7].clone()
    swapped[1] = swapped[1].roll(1, 0)
    swapped[1, 7] = torch.eye(900)[7]
    answer = can_express(swapped, 1, sizes=(900,), tolerance=0.1)
    assert (answer.expresses_each_query, answer.expresses) == (True, False)


def test_transposed_layers_over_their_stretched_image() -> None:
    conv = nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1, dtype=torch.float64)
    layer = from_conv(conv)
    answer = can_express(layer, 3, sizes=(3, 4))
    assert answer.expresses
    assert layer.weight is not None
    torch.testing.assert_close(answer.weights(conv.weight), layer.weight, **tolerance(torch.float64))
    even = nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, groups=2, dtype=torch.float64)
    layer = from_conv(even)
    answer = can_express(layer, 4, sizes=(5,))
    assert answer.expresses
    assert layer.weight is not None
    torch.testing.assert_close(answer.weights(even.weight), layer.weight, **tolerance(torch.float64))
    moved = can_express(layer, 4, sizes=(5,), padding=2)
    assert not moved.expresses
    layer.weight.data.copy_(answer.weights(even.weight))
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), even(x), **tolerance(torch.float64))
    with pytest.raises(ValueError, match="padding_mode: must be 'zeros' for a transposed layer, got 'circular'"):
        can_express(layer, 3, sizes=(5,), padding_mode="circular")


def rank(rows: Sequence[Sequence[Fraction]]) -> int:
    """By elimination, without rounding."""
    left = [list(row) for row in zip(*set(zip(*rows, strict=True)), strict=True)]  # equal columns once
    found = 0
    for column in range(len(left[0]) if left else 0):
        pivot = next((i for i in range(found, len(left)) if left[i][column]), None)
        if pivot is None:
            continue
        left[found], left[pivot] = left[pivot], left[found]
        for i in range(found + 1, len(left)):
            if left[i][column]:
                factor = left[i][column] / left[found][column]
                left[i] = [a - factor * b if b else a for a, b in zip(left[i], left[found], strict=True)]
        found += 1
    return found


def joined(rows: Sequence[Sequence[Row]]) -> list[Row]:
    """One long row for each head or kernel position, from those of every query."""
    return [list(chain(*of_queries)) for of_queries in zip(*rows, strict=True)]


def spans(attention: list[list[Row]], indicators: list[list[Row]]) -> bool:
    """Whether one Phi gives E = Phi A, for rows per head and per kernel position over several queries."""
    heads, taps = joined(attention), joined(indicators)
    return rank(heads) == rank(heads + taps)


def indicators_of(
    sizes: tuple[int, ...], kernel: tuple[int, ...], dilation: int, stride: int, mode: str
) -> Iterator[tuple[list[Row], bool]]:
    """E_q for each query and whether all of its taps lie in the image, from numpy's padding of an image of numbers."""
    far = [dilation * (k - 1) for k in kernel]
    options = {"constant_values": -1} if mode == "zeros" else {}
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    padded = np.pad(numbers, [(f // 2, f - f // 2) for f in far], MODES[mode], **options)  # type: ignore[call-overload]
    plain = np.pad(numbers, [(f // 2, f - f // 2) for f in far], constant_values=-1)
    for query in product(*(range(0, m, stride) for m in sizes)):
        places = [tuple(q + dilation * t for q, t in zip(query, tap, strict=True)) for tap in np.ndindex(*kernel)]
        rows = [[Fraction(int(padded[place] == key)) for key in range(numbers.size)] for place in places]
        yield rows, all(plain[place] >= 0 for place in places)


def drawn_rows(source: random.Random, count: int, keys: int) -> list[Row]:
    """Small rational rows that sum to 1, many zeros among them."""
    rows = []
    for _ in range(count):
        weights = [source.choice((0, 0, 1, 2)) for _ in range(keys)]
        weights[source.randrange(keys)] += 1
        rows.append([Fraction(w, sum(weights)) for w in weights])
    return rows


def mixed(mixture: list[Row], rows: list[Row]) -> list[Row]:
    return [
        [sum((w * v for w, v in zip(mix, key, strict=True)), Fraction(0)) for key in zip(*rows, strict=True)]
        for mix in mixture
    ]


def drawn_attention(
    source: random.Random, indicators: list[tuple[list[Row], bool]], heads: int, kind: str
) -> list[list[Row]]:
    """(n, h, m): mixtures of the taps (one for all queries, one each, or one inside), rows at will or constant rows."""
    taps, keys = len(indicators[0][0]), len(indicators[0][0][0])
    common, constant = drawn_rows(source, heads, taps), drawn_rows(source, heads, keys)
    rows = []
    for indicator, within in indicators:
        own = kind == "own" or (kind == "inside" and not within)
        if kind == "random":
            rows.append(drawn_rows(source, heads, keys))
        elif kind == "constant":
            rows.append(constant)
        else:
            rows.append(mixed(drawn_rows(source, heads, taps) if own else common, indicator))
    return rows


def as_tensor(images: list[list[list[Row]]]) -> Tensor:
    """(b, n, h, m) fractions -> (b, h, n, m)."""
    return torch.tensor(
        [[[[float(v) for v in row] for row in head] for head in image] for image in images], dtype=torch.float64
    ).transpose(1, 2)


def test_agrees_with_exact_arithmetic() -> None:
    """600 cases: 272 express, 117 only each query alone, 211 not even that; 38 express inside and not at the border."""
    source, seen = random.Random(3), Counter[str]()
    for case in range(600):
        dims = source.choice((1, 1, 2))
        sizes = tuple(source.randint(1, 5 if dims == 1 else 3) for _ in range(dims))
        kernel = (source.randint(1, 3),) if dims == 1 else source.choice(((1, 2), (2, 2), (1, 3), (3, 1), (2, 1)))
        stride, dilation, mode = source.choice((1, 1, 2)), source.choice((1, 1, 2)), source.choice(tuple(MODES))
        indicators = list(indicators_of(sizes, kernel, dilation, stride, mode))
        heads = source.randint(1, math.prod(kernel) + 2)
        kind = source.choice(("common", "own", "inside", "random", "constant"))
        images = [drawn_attention(source, indicators, heads, kind) for _ in range(source.choice((1, 1, 2)))]
        got = can_express(as_tensor(images), kernel, sizes=sizes, stride=stride, dilation=dilation, padding_mode=mode)

        attention, queries = list(chain(*images)), indicators * len(images)
        uniform = spans(attention, [rows for rows, _ in queries])
        each = all(spans([a], [rows]) for a, (rows, _) in zip(attention, queries, strict=True))
        within = [(a, rows) for a, (rows, inner) in zip(attention, queries, strict=True) if inner]
        inside = spans([a for a, _ in within], [rows for _, rows in within]) if within else None
        what = f"case {case}: {kind}, {sizes}, kernel {kernel}, stride {stride}, dilation {dilation}, {mode}\n{got}"
        assert got.expresses == uniform, what
        assert got.expresses_each_query == each, what
        assert got.expresses_inside == inside, what
        assert got.uniform.rank == rank(joined(attention)), what
        seen["uniform" if uniform else "each query only" if each else "neither"] += 1
        seen["inside only"] += inside is True and not uniform
        seen["each query inside only"] += inside is False and each
        seen["no query inside"] += inside is None
        seen["fewer ranks than heads"] += got.uniform.rank < heads
    assert min(seen["uniform"], seen["neither"]) >= 100, seen
    assert min(seen["each query only"], seen["inside only"], seen["no query inside"]) >= 30, seen
    assert seen["fewer ranks than heads"] >= 30, seen
    assert seen["each query inside only"] >= 10, seen


def test_soft_gaussians_express_nothing_but_come_near() -> None:
    """Nine isotropic heads at the centres of 3 x 3 are not enough, even inside and for each query alone."""
    left = []
    for alpha in (0.5, 1.0, 2.0, 5.0, 20.0):
        answer = can_express(hard(alpha=alpha), 3, sizes=(7, 7))
        assert answer.uniform.rank == 9
        assert answer.expresses_inside is False
        assert not answer.expresses_each_query
        assert answer.uniform_inside is not None
        left.append(answer.uniform_inside.residuals.inside)
    assert left == pytest.approx([0.71, 0.42, 0.142, 7.1e-3, 2.1e-9], rel=0.05)


def dense_fit(rows: Tensor, indicators: Tensor) -> tuple[Tensor, float]:
    """Phi and its residual by PyTorch's least squares on the stacked problem: (b, h, n, m) and (j, n, m)."""
    left = rows.double().permute(0, 2, 3, 1).flatten(0, 2)
    right = indicators.double().expand(rows.shape[0], -1, -1, -1).permute(0, 2, 3, 1).flatten(0, 2)
    solution = torch.linalg.lstsq(left, right, driver="gelsd").solution
    return solution.mT, float((right - left @ solution).norm() / right.norm())


def dense_indicators(sizes: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    rows = [rows for rows, _ in indicators_of(sizes, kernel, 1, 1, "zeros")]
    return torch.tensor([[[float(v) for v in row] for row in query] for query in rows]).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [0, 3])
def test_rows_of_any_library(batch: int, dtype: torch.dtype) -> None:
    shape = (batch, 6, 20, 20) if batch else (6, 20, 20)
    rows = torch.softmax(2 * torch.randn(shape, dtype=dtype), -1)
    answer = can_express(rows, 3, sizes=(4, 5))
    expected, left = dense_fit(rows if batch else rows[None], dense_indicators((4, 5), (3, 3)))
    torch.testing.assert_close(answer.uniform.phi, expected, rtol=1e-9, atol=1e-9)
    assert answer.uniform.residuals.everywhere == pytest.approx(left, rel=1e-9)
    assert not answer.expresses


def test_other_attention_that_moves_with_the_query_by_torch_alone() -> None:
    """Rows as a trained layer of another library has them: shifts mixed by a softmax, with heads to spare."""
    mixture = torch.softmax(3 * torch.randn(12, 9), -1)
    padded = F.pad(torch.arange(20.0).reshape(1, 1, 4, 5) + 1, (1, 1, 1, 1))
    seen = F.unfold(padded, 3)[0]  # (9, 20) numbers of pixels, 0 outside
    shifts = (seen[..., None] == torch.arange(20.0) + 1).float()
    rows = torch.einsum("hj,jnm->hnm", mixture, shifts)
    answer = can_express(rows, 3, sizes=(4, 5))
    assert answer.expresses
    assert answer.uniform.rank == 9
    kernel = torch.randn(3, 2, 3, 3)
    image = torch.randn(1, 2, 4, 5)
    out = torch.einsum("hnm,im,hid->dn", rows, image[0].flatten(1), answer.weights(kernel))
    torch.testing.assert_close(out.reshape(1, 3, 4, 5), F.conv2d(image, kernel, padding=1), rtol=1e-4, atol=1e-4)


def test_content_layers_need_one_phi_for_all_images() -> None:
    layer = SelfAttention2d(4, 4, heads=5, encoding="learned-content").double()
    x = 3 * torch.randn(2, 4, 4, 5, dtype=torch.float64)
    both = can_express(layer, (2, 3), x=x)
    rows = layer.operator(x).to_dense().detach()
    expected, left = dense_fit(rows, dense_indicators((4, 5), (2, 3)))
    torch.testing.assert_close(both.uniform.phi, expected, rtol=1e-8, atol=1e-8)
    assert both.uniform.residuals.everywhere == pytest.approx(left, rel=1e-9)
    alone = [can_express(layer, (2, 3), x=image[None]) for image in x]
    assert both.uniform.residuals.everywhere**2 >= np.mean([one.uniform.residuals.everywhere**2 for one in alone])
    assert both.each_query.everywhere == pytest.approx(max(one.each_query.everywhere for one in alone))
    with pytest.raises(ValueError, match=r"x: must be given where attention depends on content, got none for Learned"):
        can_express(layer, (2, 3), sizes=(4, 5))


def test_position_only_layers_look_at_the_size_alone() -> None:
    layer = SelfAttention2d(3, 4, heads=5, border="zero", padding=1)
    by_image, by_size = can_express(layer, 3, x=torch.randn(2, 3, 5, 4)), can_express(layer, 3, sizes=(5, 4))
    torch.testing.assert_close(by_image.uniform.phi, by_size.uniform.phi, rtol=0, atol=0)
    assert not by_size.uniform.phi.requires_grad


def test_heads_that_repeat_share_their_weight() -> None:
    rows = hard().operator(torch.zeros(1, 1, 4, 4, dtype=torch.float64)).to_dense().detach()[0]
    answer = can_express(rows[[0, 1, 2, 3, 4, 5, 6, 7, 8, 4]], 3, sizes=(4, 4))
    assert answer.expresses
    assert answer.uniform.rank == 9
    torch.testing.assert_close(answer.uniform.phi[4, [4, 9]], torch.full((2,), 0.5, dtype=torch.float64))


def test_rows_of_nothing() -> None:
    answer = can_express(torch.zeros(2, 3, 3), 1, sizes=(3,))
    assert (answer.uniform.rank, answer.uniform.residuals.everywhere) == (0, 1.0)
    assert not answer.uniform.phi.any()


def test_indicators_of_nothing() -> None:
    """Taps that see no pixel from anywhere are expressed by no weight at all."""
    blind = can_express(torch.full((1, 1, 1), 1.0), (2,), sizes=(1,), dilation=2)  # taps at -1 and 1 of one pixel
    assert blind.uniform.residuals.everywhere == 0.0
    assert blind.expresses
    assert not blind.uniform.phi.any()


def test_blocks_of_queries_agree_with_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.softmax(torch.randn(2, 4, 12, 12, dtype=torch.float64), -1)
    whole = can_express(rows, 2, sizes=(3, 4))
    monkeypatch.setattr(lemma3_phi, "_BLOCK", 1)
    blocks = can_express(rows, 2, sizes=(3, 4))
    torch.testing.assert_close(blocks.uniform.phi, whole.uniform.phi)
    torch.testing.assert_close(blocks.uniform.singular_values, whole.uniform.singular_values)
    assert blocks.uniform.residuals.border == pytest.approx(whole.uniform.residuals.border)
    assert blocks.each_query.inside == pytest.approx(whole.each_query.inside)


def test_the_fit_inside_is_best_inside_and_the_other_everywhere() -> None:
    answer = can_express(SelfAttention2d(1, 1, heads=6).double(), 3, sizes=(6, 6))
    assert answer.uniform_inside is not None
    mine, other = answer.uniform_inside.residuals, answer.uniform.residuals
    assert mine.inside is not None
    assert other.inside is not None
    assert mine.inside < other.inside
    assert other.everywhere < mine.everywhere


def test_summary() -> None:
    text = str(can_express(hard("renormalise"), 3, sizes=(5, 5)))
    assert "kernel 3 x 3, 9 heads of rank 9: not every convolution, but every one away from the border" in text
    assert "4.4e-01" in text
    small = str(can_express(hard(), 3, sizes=(1, 1)))
    assert "one Phi inside" not in small
    assert "every convolution" in small


def test_factors_of_one_query() -> None:
    layer = hard("renormalise")
    answer = can_express(layer, 3, sizes=(4, 5))
    found = factorise(layer, 3, query=(0, 2), sizes=(4, 5), phi=answer.uniform.phi)
    assert found.shifts[0] == (-1, -1)
    assert found.indicators.sum(1).tolist() == [0.0] * 3 + [1.0] * 6
    assert found.indicators[3].nonzero().tolist() == [[1]]  # left of the query, in its row
    left = (found.indicators - found.phi @ found.rows).norm() / found.indicators.norm()
    assert found.residual == pytest.approx(float(left))
    assert found.residual > 0.1
    assert factorise(layer, 3, query=(0, 2), sizes=(4, 5)).residual < 1e-14  # with a Phi of its own


def rows(*shape: int) -> Tensor:
    return torch.full(shape, 0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"x: or sizes must say how large the image is, got None"),
        ({"x": torch.zeros(1, 1, 4, 4).double(), "sizes": (4, 4)}, r"sizes: must be left out beside x.*got \(4, 4\)"),
        ({"sizes": (4,)}, r"sizes: must be a whole number .* for each of 2 axes, got \(4,\)"),
        ({"sizes": (4, 4), "stride": 2}, r"stride: must be left out or equal the layer's \(1, 1\), got 2"),
        ({"sizes": (4, 4), "dilation": 0}, r"dilation: must be a whole number of at least 1.*got 0"),
        ({"sizes": (4, 4), "padding": "full"}, r"padding: must be a whole number.*got 'full'"),
        ({"sizes": (4, 4), "padding_mode": "zero"}, r"padding_mode: must be one of zeros, replicate.*got 'zero'"),
        ({"sizes": (4, 4), "tolerance": -1.0}, r"tolerance: must be finite and at least 0, got -1\.0"),
        ({"sizes": (4, 4), "tolerance": math.nan}, r"tolerance: must be finite and at least 0, got nan"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        can_express(hard(), 3, **options)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (rows(2, 4, 4), {}, r"sizes: must say over which pixels the attention rows stand, got None"),
        (rows(2, 4, 4), {"sizes": (2, 2), "x": rows(1, 1, 2, 2)}, r"x: is for layers, got shape \(1, 1, 2, 2\)"),
        (rows(2, 5, 5), {"sizes": (2, 2)}, r"attention: must end in \(4, 4\).*got shape \(2, 5, 5\).*class tokens"),
        (rows(4, 4), {"sizes": (2, 2)}, r"attention: must end in \(4, 4\).*got shape \(4, 4\)"),
        (rows(0, 4, 4), {"sizes": (2, 2)}, r"attention: .*got shape \(0, 4, 4\)"),
        (rows(2, 4, 4), {"sizes": (2, 2), "stride": 2}, r"attention: must end in \(1, 4\).*got shape \(2, 4, 4\)"),
        (rows(2, 4, 4) / 0, {"sizes": (2, 2)}, r"attention: must have finite rows, got NaN or infinite"),
        (rows(2, 4, 4), {"sizes": (2, 2), "kernel_size": 0}, r"kernel_size: must be a whole number.*got 0"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_bad_rows(attention: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        can_express(attention, **{"kernel_size": 1, **options})


@pytest.mark.usefixtures("unhooked")
def test_what_is_no_attention() -> None:
    with pytest.raises(TypeError, match=r"attention: must be a SelfAttention layer or a tensor .* got Conv1d"):
        can_express(nn.Conv1d(1, 1, 1), 1, sizes=(2,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"attention: must have a floating dtype, got torch\.bool"):
        can_express(torch.ones(1, 2, 2, dtype=torch.bool), 1, sizes=(2,))


def answer_in_1d() -> Expressiveness:
    return can_express(SelfAttention1d(1, 1, heads=2), 3, sizes=(5,))


def test_kernels_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel: must have the kernel size \(3,\), got shape \(1, 1, 2\)"):
        answer_in_1d().weights(torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match=r"kernel: must have 3 positions, got shape \(1, 1, 2\)"):
        answer_in_1d().uniform.weights(torch.zeros(1, 1, 2))


def test_queries_and_phi_that_do_not_fit() -> None:
    for place in ((5,), (-1,), (0, 0)):
        with pytest.raises(ValueError, match=r"query: must be an index on the grid of \(5,\) queries, got \("):
            factorise(SelfAttention1d(1, 1, heads=2), 3, query=place, sizes=(5,))
    with pytest.raises(ValueError, match=r"phi: must have the shape \(3, 2\).*got \(2, 3\)"):
        factorise(SelfAttention1d(1, 1, heads=2), 3, query=(0,), sizes=(5,), phi=torch.zeros(2, 3))
