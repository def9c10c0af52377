"""How fast and lean is a position-only layer beside the formula it computes?

The whole layer, mixing and projection, forward and backward, of round Gaussians. Contenders are the layer's backends
with the same weights on the same images:

    reference     the formula itself: the softmax of all scores, its matrix stored
    dense         the matrix made from one factor per axis, stored
    structured    the factors, never a matrix
    auto          what the layer chooses by itself

    attnconv bench position-only
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnconv.layers.self_attention import Backend, SelfAttention2d
from benchmarks.measure import Ratio, interleaved, low_precision, memory_of
from benchmarks.results import Answer, Row
from benchmarks.settings import PositionOnlySettings

BASE: Backend = "reference"
BACKENDS: tuple[Backend, ...] = (BASE, "dense", "structured", "auto")
NARROW = 64  # channels up to which all sides are measured


def answer(settings: PositionOnlySettings) -> Answer:
    """Times of all cases, and peak memory of the larger ones."""
    rows = tuple(row for case in _cases(settings) for row in _rows(case, settings))
    tensors = {(row.case, row.contender): row.memory.tensors for row in rows if row.memory is not None}
    shares = [held / max(tensors[case, BASE], 1) for (case, name), held in tensors.items() if name == "structured"]
    facts = {"structured: tensors at their peak, largest part of the formula's": max(shares)} if shares else {}
    return Answer("position-only", "times as fast as the formula", rows, facts)


def prepared(*, batch: int, side: int, channels: int, heads: int, dtype: str, backend: Backend) -> Callable[[], Tensor]:
    """A step, forward and backward, on a fresh layer; every backend draws the same weights and images."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads, backend=backend)
    images = torch.randn(batch, side, side, channels).movedim(-1, 1).requires_grad_()
    low = dtype == "bfloat16"
    gradient = torch.randn(batch, side, side, channels).movedim(-1, 1).to(torch.bfloat16 if low else torch.float32)

    def step() -> Tensor:
        layer.zero_grad()
        images.grad = None
        with low_precision(low):
            out: Tensor = layer(images)
        out.backward(gradient)
        return out.detach()

    return step


def _cases(settings: PositionOnlySettings) -> Iterator[dict[str, Any]]:
    for dtype in settings.dtypes:
        for channels in settings.channels:
            for batch, side in settings.cases:
                if channels <= NARROW or side <= settings.wide_to:
                    sizes = {"batch": batch, "side": side, "channels": channels}
                    yield {**sizes, "heads": settings.heads, "dtype": dtype}


def _rows(case: Mapping[str, Any], settings: PositionOnlySettings) -> Iterator[Row]:
    steps: dict[str, Callable[[], Tensor]] = {name: prepared(**case, backend=name) for name in BACKENDS}
    differences = _differences(steps)
    times = interleaved(steps, settings.repeats)
    memories = {}
    if case["side"] >= settings.memory_from:
        memories = {backend: memory_of(__name__, {**case, "backend": backend}) for backend in BACKENDS}
    words = f"{case['dtype']}, {case['batch']} x {case['channels']} x {case['side']} x {case['side']}"
    for backend in BACKENDS:
        memory, base = memories.get(backend), memories.get(BASE)
        of_base = backend == BASE
        yield Row(
            case=words,
            contender=backend,
            seconds=times[backend],
            ratio=None if of_base else Ratio.of(times[BASE], times[backend]),
            memory=memory,
            memory_ratio=None if of_base or memory is None or base is None else memory.step / max(base.step, 1),
            pixels=case["side"] ** 2,
            difference=None if of_base else differences[backend],
            dense_bytes=4 * case["heads"] * case["side"] ** 4,
        )


def _differences(steps: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Each backend's largest difference from the formula, over the formula's largest output."""
    exact = steps[BASE]().float()
    scale = float(exact.abs().max())
    return {name: float((step().float() - exact).abs().max()) / scale for name, step in steps.items() if name != BASE}
