"""Lemma 3, compared with exact arithmetic and dense least squares."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, product

import numpy as np
import pytest
import torch
from torch import Tensor

from attnconv import SelfAttention2d
from attnconv.theory.expressibility import can_express

Row = list[Fraction]
MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def rank(rows: Sequence[Sequence[Fraction]]) -> int:
    """Return the rank, by Gaussian elimination without rounding."""
    left = [list(row) for row in zip(*set(zip(*rows, strict=True)), strict=True)]  # without duplicate columns
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
    """Concatenate the rows of every query to one row per head or kernel position."""
    return [list(chain(*of_queries)) for of_queries in zip(*rows, strict=True)]


def spans(attention: list[list[Row]], indicators: list[list[Row]]) -> bool:
    """Return whether E = Phi A has a solution, for rows per head and per kernel position over several queries."""
    heads, taps = joined(attention), joined(indicators)
    return rank(heads) == rank(heads + taps)


def indicators_of(
    sizes: tuple[int, ...], kernel: tuple[int, ...], dilation: int, stride: int, mode: str
) -> Iterator[tuple[list[Row], bool]]:
    """Return E_q for each query and whether it is inside, from numpy's padding of an image of indices."""
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
    """Return small rational rows that sum to 1, with many zeros."""
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
    """Draw rows (n, h, m): mixtures of taps (shared, per query, or inside only), random rows or constant rows."""
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
    """Convert fractions (b, n, h, m) to a tensor (b, h, n, m)."""
    return torch.tensor(
        [[[[float(v) for v in row] for row in head] for head in image] for image in images], dtype=torch.float64
    ).transpose(1, 2)


def test_agrees_with_exact_arithmetic() -> None:
    """Of 600 cases, 272 express, 117 only express each query, 211 neither; 38 express inside but not at the border."""
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


def dense_fit(rows: Tensor, indicators: Tensor) -> tuple[Tensor, float]:
    """Return Phi and its residual by PyTorch's least squares on the stacked problem, (b, h, n, m) and (j, n, m)."""
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
    with pytest.raises(ValueError, match=r"x: .*got None for Learned"):
        can_express(layer, (2, 3), sizes=(4, 5))
