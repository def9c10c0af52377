"""Does the planner choose well?

A position-only layer over small and large images, narrow and wide, alone and in batches, with gradients and without:
the backend that `auto` takes beside the best of the two that it chooses from, timed in the same rounds.

    attnconv bench planner
"""

from collections.abc import Callable

import torch

from attnconv.layers.self_attention import Backend, SelfAttention2d
from benchmarks.measure import Ratio, interleaved, low_precision
from benchmarks.results import Answer, Row
from benchmarks.settings import PlannerSettings

FORMS: tuple[Backend, ...] = ("dense", "structured")


def answer(settings: PlannerSettings) -> Answer:
    """The time of the planner's choice over that of the better form, case by case."""
    rows, worst, within = [], 0.0, 0
    for side in settings.sides:
        for channels in settings.channels:
            for batch in settings.batches:
                for dtype in settings.dtypes:
                    for training in (False, True):
                        steps: dict[str, Callable[[], None]] = {
                            form: _step(form, side, channels, batch, dtype, training) for form in FORMS
                        }
                        times = interleaved(steps, settings.repeats)
                        choice = _choice(side, channels, batch, dtype, training)
                        best = min(times, key=lambda form: times[form].median)
                        ratio = Ratio.of(times[choice], times[best])
                        worst, within = max(worst, ratio.value), within + (ratio.value <= 1.2)
                        words = f"{batch} x {channels} x {side} x {side}, {dtype}, "
                        words += "training" if training else "inference"
                        rows.append(Row(words, f"{choice} (best: {best})", times[choice], ratio, pixels=side**2))
    facts = {"cases": float(len(rows)), "within 1.2 of the best": float(within), "worst": worst}
    return Answer("planner", "times as long as the better form", tuple(rows), facts)


def _step(form: Backend, side: int, channels: int, batch: int, dtype: str, training: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, 9, backend=form)
    images = torch.randn(batch, side, side, channels).movedim(-1, 1).requires_grad_(training)

    def step() -> None:
        with torch.set_grad_enabled(training), low_precision(dtype == "bfloat16"):
            out = layer(images)
        if training:
            layer.zero_grad()
            images.grad = None
            out.float().sum().backward()

    return step


def _choice(side: int, channels: int, batch: int, dtype: str, training: bool) -> str:
    """What `auto` takes there."""
    layer = SelfAttention2d(channels, channels, 9)
    with torch.set_grad_enabled(training), low_precision(dtype == "bfloat16"):
        operator = layer.operator(torch.zeros(batch, channels, side, side))
    return "dense" if type(operator).__name__ == "Dense" else "structured"
