"""4,250 random layers with soft heads compared with loops over queries and lattice points, forward and backward."""

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnconv import GeneralizedQuadratic, LearnedRelative, Quadratic, SelfAttention1d, SelfAttention2d, SelfAttention3d
from attnconv.grid import BORDERS
from tests.drawn_recasts import MEMORY, laid_out
from tests.spec import SpecAxis, spec_attention

LAYERS: dict[int, Callable[..., Any]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}
LARGEST = {1: 20, 2: 6, 3: 3}
FLOOR = 1e-8  # relative to those sums: operators skip weights below eps^2 of a row's largest, 1.4e-14 in float32
ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-5}  # relative to sums of absolute values


def quadratic(source: random.Random, heads: int, dims: int) -> tuple[Any, Callable[[int, tuple[int, ...]], float]]:
    encoding = Quadratic(heads, dims, diagonal=source.random() < 0.5, spread_std=0.5)
    centres, spread = encoding.centres.tolist(), encoding.spread.expand(-1, dims).tolist()

    def score(head: int, shift: tuple[int, ...]) -> float:
        parts = zip(spread[head], shift, centres[head], strict=True)
        return -sum(s * s / 2 * (delta - centre) ** 2 for s, delta, centre in parts)

    return encoding, score


def generalized(source: random.Random, heads: int, dims: int) -> tuple[Any, Callable[[int, tuple[int, ...]], float]]:
    encoding = GeneralizedQuadratic(heads, dims, spread_std=0.5)
    centres, roots = encoding.centres.tolist(), encoding.root_precision.tolist()

    def score(head: int, shift: tuple[int, ...]) -> float:
        away = [delta - centre for delta, centre in zip(shift, centres[head], strict=True)]
        columns = zip(*roots[head], strict=True)
        return -sum(sum(a * r for a, r in zip(away, column, strict=True)) ** 2 for column in columns) / 2

    return encoding, score


def learned(source: random.Random, heads: int, dims: int) -> tuple[Any, Callable[[int, tuple[int, ...]], float]]:
    most = source.choice((0, 1, 3, 30))
    encoding = LearnedRelative(heads, dims, channels=3, max_shift=most)
    values = {name: value.tolist() for name, value in encoding.state_dict().items()}
    tables = [values[f"tables.{axis}"] for axis in range(dims)]
    vectors = [values[f"projections.{axis}.weight"] for axis in range(dims)]

    def score(head: int, shift: tuple[int, ...]) -> float:
        rows = [table[min(max(delta, -most), most) + most] for table, delta in zip(tables, shift, strict=True)]
        return sum(sum(map(operator.mul, row, vector[head])) for row, vector in zip(rows, vectors, strict=True))

    return encoding, score


def test_drawn_layers_equal_loops(verify_scale: float, attack_seed: int) -> None:
    source, worst = random.Random(attack_seed), dict.fromkeys(ALLOWED, 0.0)
    torch.manual_seed(attack_seed)
    cases = round(4250 * verify_scale)
    for _ in range(cases):
        dtype, dims = source.choice(list(ALLOWED)), source.choice((1, 2, 2, 3))
        heads, groups = source.choice((1, 2, 4)), source.choice((1, 1, 2))
        encoding, score = source.choice((quadratic, generalized, learned))(source, heads, dims)
        border = source.choice(list(BORDERS))
        stride = [source.choice((1, 1, 2, 3)) for _ in range(dims)]
        sizes = [source.randint(1, LARGEST[dims]) for _ in range(dims)]
        pads = [(source.randint(0, 2), source.randint(0, 2)) for _ in range(dims)]
        if border == "reflect":
            sizes = [max(size, max(pair) + 1) for size, pair in zip(sizes, pads, strict=True)]
        inputs, outputs = groups * source.choice((1, 1, 3)), groups * source.choice((1, 2, 4))
        layer = LAYERS[dims](
            inputs,
            outputs,
            heads,
            encoding=encoding,
            stride=stride,
            padding=pads,
            border=border,
            groups=groups,
            backend=source.choice(("auto", "reference", "dense", "structured")),
            bias=False,
        ).to(dtype)
        axes = [
            SpecAxis(size, math.ceil(size / step), step, 0, before, after, 1, border)
            for size, step, (before, after) in zip(sizes, stride, pads, strict=True)
        ]
        matrix = spec_attention(axes, heads, score)[0]
        x = laid_out(torch.randn(2, inputs, *sizes).to(dtype), source.choice(MEMORY), source)
        error = _error(layer, x, matrix, groups)
        worst[dtype] = max(worst[dtype], error)
        assert error <= ALLOWED[dtype], f"{layer} on {tuple(x.shape)}, strides {x.stride()}"
    print(f"{cases} layers: " + ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items()))


def _error(layer: Any, x: Tensor, matrix: Tensor, groups: int) -> float:
    """Return the largest relative error of the output, and of the gradients of image and weights."""
    image = x.detach().requires_grad_()
    out = layer(image)
    gradient = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, [image, layer.weight], gradient)]
    exact, sums = (
        _by_hand(x.double(), layer.weight.detach().double(), matrix, gradient.double(), groups, absolute=absolute)
        for absolute in (False, True)
    )
    errors = [((a.detach() - b).abs() / c.clamp_min(FLOOR)).max() for a, b, c in zip(found, exact, sums, strict=True)]
    return float(max(errors))


def _by_hand(
    x: Tensor, weight: Tensor, matrix: Tensor, gradient: Tensor, groups: int, *, absolute: bool
) -> list[Tensor]:
    if absolute:
        x, weight, gradient = x.abs(), weight.abs(), gradient.abs()
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    total: list[Tensor] = []
    for part, block in zip(x.flatten(2).chunk(groups, 1), weight.chunk(groups, 2), strict=True):
        total.append(torch.einsum("hnm,bim,hid->bdn", matrix, part, block))
    out = torch.cat(total, 1).reshape(gradient.shape)
    return [out.detach(), *torch.autograd.grad(out, [x, weight], gradient)]
