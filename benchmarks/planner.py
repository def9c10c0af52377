"""Comparison of the planner's choice with the faster algorithm.

For position-only layers with various image sizes, channels and batch sizes, with and without gradients, both algorithms
are timed in the same rounds. The one chosen by `auto` is compared with the faster of the two.

    python -m benchmarks planner
"""

import itertools
import statistics
from collections.abc import Callable

import torch

from attnconv.layers import SelfAttention2d
from attnconv.layers.planning import Backend
from benchmarks.measure import Ratio, interleaved, precision
from benchmarks.results import Results, Row

FORMS: tuple[Backend, ...] = ("dense", "structured")
QUICK = {"sides": (4, 8), "channels": (8,), "batches": (2,), "dtypes": ("float32",), "repeats": 3}


def run(
    *,
    sides: tuple[int, ...] = (4, 8, 12, 16, 32),
    channels: tuple[int, ...] = (16, 128),
    batches: tuple[int, ...] = (1, 16),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 9,
) -> Results:
    """Measure the time of the planner's choice relative to that of the faster algorithm, for all cases."""
    rows, ratios = [], []
    for side, width, batch, dtype, training in itertools.product(sides, channels, batches, dtypes, (False, True)):
        steps: dict[str, Callable[[], None]] = {
            form: _step(form, side, width, batch, dtype, training) for form in FORMS
        }
        times = interleaved(steps, repeats)
        choice = _choice(side, width, batch, dtype, training)
        best = min(times, key=lambda form: statistics.median(times[form]))
        ratio = Ratio.of(times[choice], times[best])
        ratios.append(ratio.value)
        case = f"{batch} x {width} x {side} x {side}, {dtype}, {'training' if training else 'inference'}"
        rows.append(Row(case, f"{choice} (best: {best})", times[choice], ratio, pixels=side**2))
    within = float(sum(value <= 1.2 for value in ratios))
    facts = {"cases": float(len(rows)), "within 1.2 of the best": within, "worst": max(ratios)}
    return Results("planner", "time relative to the faster algorithm", tuple(rows), facts)


def _step(form: Backend, side: int, channels: int, batch: int, dtype: str, training: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, 9, backend=form)
    images = torch.randn(batch, side, side, channels).movedim(-1, 1).requires_grad_(training)

    def step() -> None:
        with torch.set_grad_enabled(training), precision(dtype):
            out = layer(images)
        if training:
            layer.zero_grad()
            images.grad = None
            out.float().sum().backward()

    return step


def _choice(side: int, channels: int, batch: int, dtype: str, training: bool) -> str:
    """Return the algorithm that `auto` chooses."""
    layer = SelfAttention2d(channels, channels, 9)
    with torch.set_grad_enabled(training), precision(dtype):
        operator = layer.operator(torch.zeros(batch, channels, side, side))
    return "dense" if type(operator).__name__ == "Dense" else "structured"
