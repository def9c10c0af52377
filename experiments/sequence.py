"""Do one-dimensional attention layers learn to convolve sequences? The paper leaves this question open.

Networks of `SelfAttention1d` with position-only scores (quadratic, and a learned relative table) are trained on tasks
that require local filters. The baselines are a network of Conv1d layers with the same number of weights, and attention
without positions. For each layer, the script reports the heads that attend to a fixed shift, their shifts and the
convolution score. For the task with a teacher network, it reports how many of the teacher's shifts were found.

    python -m experiments.sequence --root PATH/TO/CIFAR --out results/sequence

Finished runs are kept; a second call trains only the missing ones.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect import RunningStatistics, visit_attention
from attnconv.layers import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.paper.tables import at_fixed_shift
from experiments.common import DeviceName, autocast, device_of, kept, spread, write_results
from experiments.sequence_figure import draw_shifts
from experiments.sequence_tasks import MODELS, PLACES, TEACHER_SHIFTS, ModelName, SequenceNet, Task, TaskName, make_task

UNDECAYED = ("centres", "spread")
LOOKED_AT = 50  # sequences for head statistics; position-only heads are the same for all sequences


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path | None = None
    """Folder of CIFAR-10, for the task `rows`."""
    out: Path | None = None
    """Output folder for tables and figure; None only prints the tables."""
    kept: Path = Path("runs/sequence")
    """Folder of finished runs, for any settings."""
    tasks: tuple[TaskName, ...] = ("teacher", "digits", "rows")
    """Tasks to train."""
    seeds: int = 3
    """Number of runs per model."""
    control_seeds: int = 3
    """Number of runs of attention without positions, at most `seeds`; these are the slowest and vary the least."""
    width: int = 32
    """Number of channels between layers."""
    steps: int = 2_500
    """Number of optimiser steps per run of the teacher task."""
    real_steps: int = 600
    """Number of optimiser steps per run of the other tasks."""
    batch_size: int = 64
    """Batch size."""
    images: int = 20_000
    """Number of training images of `rows`."""
    test_images: int = 2_000
    """Maximum number of test sequences."""
    rate: float = 3e-3
    """Learning rate (AdamW, cosine decay to zero after warm-up for 5 % of the steps)."""
    position_rate: float = 10.0
    """Learning rate of centres and spreads, relative to `rate`; positions have a larger scale than weights."""
    weight_decay: float = 0.01
    """Weight decay of weights; centres and spreads have none."""
    device: DeviceName = "auto"
    """Device for training, with bf16 matrix products on CUDA."""


@dataclass(frozen=True)
class Layer:
    """Head statistics of one layer."""

    heads: int
    fixed_before: int
    """Number of heads that attend to a fixed shift before training."""
    shifts: tuple[int, ...]
    """Sorted shifts of the heads that attend to a fixed shift after training."""
    all_shifts: tuple[tuple[int, float, float], ...]
    """Best shift, attention to it, and constancy of every head."""
    score: float
    """Convolution score, 0 to 1."""


@dataclass(frozen=True)
class Result:
    """Result of one run. The score is the accuracy, or the relative squared error for the teacher task."""

    task: str
    model: str
    seed: int
    parameters: int
    score: float
    seconds: float
    layers: tuple[Layer, ...]


def main(settings: Settings) -> list[Result]:
    """Train missing runs; print and write the tables."""
    if "rows" in settings.tasks and settings.root is None:
        raise ValueError(bad("--root", "must be the folder of CIFAR-10 for the task rows", None))
    torch.set_flush_denormal(True)
    results = []
    for name in settings.tasks:
        task = make_task(name, root=settings.root, images=settings.images, test_images=settings.test_images, seed=1234)
        for seed in range(settings.seeds):
            chosen = [model for model in MODELS if model != "no positions" or seed < settings.control_seeds]
            results += [run_once(task, model, seed, settings) for model in chosen]
    text = tables(results)
    print(text)
    if settings.out is not None:
        found = {"results": [asdict(result) for result in results]}
        write_results(settings.out, "sequence", settings, text, found, device=device_of(settings.device))
        draw_shifts([asdict(result) for result in results], settings.out / "shifts")
    return results


def run_once(task: Task, model: ModelName, seed: int, settings: Settings) -> Result:
    """Return the result of a run, training it if it is not cached."""
    other = "real_steps" if task.teacher is not None else "steps"
    free = ("root", "out", "kept", "tasks", "seeds", "control_seeds", other)
    values = {name: str(value) for name, value in asdict(settings).items() if name not in free}
    on = [values, device_of(settings.device).type]
    name = f"{task.name} {model} {seed}"
    found = kept(settings.kept, name, on, lambda: train_and_look(task, model, seed, settings))
    return msgspec.convert(found, Result)


def train_and_look(task: Task, model: ModelName, seed: int, settings: Settings) -> Result:
    """Train a network, and measure its score and head statistics."""
    torch.manual_seed(seed)
    network = SequenceNet(task, model, width=settings.width)
    before = [] if model == "convolution" else look(network, task)
    device = device_of(settings.device)
    network.to(device)
    start = time.perf_counter()
    train(network, task, seed, settings)
    seconds = time.perf_counter() - start
    score = measure(network, task, device)
    network.cpu()
    after = [] if model == "convolution" else look(network, task)
    layers = tuple(
        Layer(
            heads=len(heads),
            fixed_before=sum(fixed for *_, fixed in first),
            shifts=tuple(sorted(shift for shift, *_, fixed in heads if fixed)),
            all_shifts=tuple(head[:3] for head in heads),
            score=convolutional,
        )
        for (first, _), (heads, convolutional) in zip(before, after, strict=True)
    )
    print(f"{task.name}, {model}, seed {seed}: {score:.4f} in {seconds:.0f} s", flush=True)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Result(task.name, model, seed, parameters, score, seconds, layers)


def train(network: nn.Module, task: Task, seed: int, settings: Settings) -> None:
    """Train with AdamW, warm-up and cosine decay to zero."""
    device = device_of(settings.device)
    attention = [layer for layer in network.modules() if isinstance(layer, SelfAttention)]
    undecayed = {id(p) for layer in attention for n, p in layer.encoding.named_parameters() if n in UNDECAYED}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in network.parameters() if id(p) not in undecayed], "weight_decay": settings.weight_decay},
        {
            "params": [p for p in network.parameters() if id(p) in undecayed],
            "lr": settings.rate * settings.position_rate,
            "weight_decay": 0.0,
        },
    ]
    optimiser = torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.rate)
    steps = settings.steps if task.teacher is not None else settings.real_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        [group["lr"] for group in optimiser.param_groups],
        total_steps=steps + 1,  # the scheduler takes one step when it is created
        pct_start=0.05,
        cycle_momentum=False,
    )
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(steps):
        x, target = (part.to(device) for part in task.batch(settings.batch_size, generator))
        with autocast(device):
            loss = loss_of(network(x), target)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()


def loss_of(made: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy for classes, or the mean squared error for sequences."""
    if target.dtype == torch.int64:
        return F.cross_entropy(made.float(), target, label_smoothing=0.1)
    return F.mse_loss(made.float(), target)


@torch.inference_mode()
def measure(network: nn.Module, task: Task, device: torch.device) -> float:
    """Return the accuracy, or the squared error relative to the targets' mean channel variance, in full precision."""
    network.eval()
    made = torch.cat([network(part.to(device)).cpu() for part in task.test.split(250)])
    if task.test_targets.dtype == torch.int64:
        return float((made.argmax(1) == task.test_targets).double().mean())
    return float((made - task.test_targets).square().mean() / task.test_targets.var((0, 2)).mean())


Looked = tuple[list[tuple[int, float, float, bool]], float]


def look(network: nn.Module, task: Task) -> list[Looked]:
    """Return (best shift, attention to it, constancy, whether fixed) of all heads and the score, for each layer."""
    sequences = task.test[:LOOKED_AT]
    running: dict[str, RunningStatistics] = {}

    def take(name: str, operator: AttentionOperator) -> None:
        running.setdefault(name, RunningStatistics()).add(operator)

    visit_attention(network, sequences, take)
    found = []
    for layer in (statistics.result() for statistics in running.values()):
        columns = (layer.best_shift[:, 0], layer.shift_mass, layer.constancy, at_fixed_shift(layer))
        heads = list(zip(*(column.tolist() for column in columns), strict=True))
        found.append((heads, layer.convolution_score))
    return found


def found_of_teacher(layers: Sequence[Layer]) -> tuple[int, int]:
    """Return how many of the teacher's shifts are those of fixed heads, and the translation g of the student.

    If all shifts of layer 0 are translated by g and those of layer 1 by -g, the function is the same away from the
    borders. The best g is used, and the smallest in case of ties.
    """
    first, second = (set(layer.shifts) for layer in layers)
    counts = {
        g: len({s - g for s in first} & set(TEACHER_SHIFTS[0])) + len({s + g for s in second} & set(TEACHER_SHIFTS[1]))
        for g in sorted(range(-PLACES // 2, PLACES // 2 + 1), key=abs)
    }
    best = max(counts, key=lambda g: counts[g])
    return counts[best], best


def tables(results: Sequence[Result]) -> str:
    """Return the Markdown tables of scores and head statistics."""
    lines = ["| task | model | parameters | error (teacher) or accuracy | seconds |", "|---|---|---|---|---|"]
    layers = [
        "| task | model | layer | heads at a fixed shift before | after | convolution score | shifts per seed |",
        "|---|---|---|---|---|---|---|",
    ]
    found = ["| model | teacher's shifts found, per seed | translated by |", "|---|---|---|"]
    for task, model in dict.fromkeys((r.task, r.model) for r in results):
        runs = [r for r in results if (r.task, r.model) == (task, model)]
        shown = spread([r.score for r in runs], percent=task != "teacher")
        lines.append(f"| {task} | {model} | {runs[0].parameters:,} | {shown} | {mean(r.seconds for r in runs):.0f} |")
        for number in range(len(runs[0].layers)):
            each = [r.layers[number] for r in runs]
            of = f"of {each[0].heads}"
            counts = spread([float(len(layer.shifts)) for layer in each])
            shifts = "; ".join(", ".join(map(str, layer.shifts)) or "none" for layer in each)
            layers.append(
                f"| {task} | {model} | {number} | {mean(layer.fixed_before for layer in each):.1f} {of} | "
                f"{counts} {of} | {spread([layer.score for layer in each])} | {shifts} |"
            )
        if task == "teacher" and model != "convolution":
            pairs = [found_of_teacher(r.layers) for r in runs]
            total = sum(map(len, TEACHER_SHIFTS))
            held = ", ".join(f"{count} of {total}" for count, _ in pairs)
            found.append(f"| {model} | {held} | {', '.join(str(g) for _, g in pairs)} |")
    parts = [lines, layers, *([found] if len(found) > 2 else [])]
    return "\n\n".join("\n".join(part) for part in parts)


if __name__ == "__main__":
    main(tyro.cli(Settings))
