"""Do 1-D attention layers learn to convolve a sequence? The question that the paper leaves open.

Networks of `SelfAttention1d` whose heads see positions alone (quadratic, and a learned relative table) learn tasks that
need local filters; beside them a network of Conv1d with as many weights, and attention that sees no positions. For each
layer: how many heads hold a fixed shift, which, and how convolutional the layer is; where a teacher made the task, how
many of its shifts were found.

    python -m experiments.sequence --root PATH/TO/CIFAR --out results/sequence

Finished runs are kept, and a second call trains only what is missing.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

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
LOOKED_AT = 50  # sequences by which heads are judged; those of positions alone are the same for all


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path | None = None
    """Folder of CIFAR-10, for the task `rows`."""
    out: Path | None = None
    """Folder for tables and figure; None prints the tables only."""
    kept: Path = Path("runs/sequence")
    """Folder of finished runs, of any settings."""
    tasks: tuple[TaskName, ...] = ("teacher", "digits", "rows")
    """Which tasks."""
    seeds: int = 3
    """Runs of each model."""
    control_seeds: int = 3
    """Runs of attention without positions, at most as many: it is the slowest, and varies least."""
    width: int = 32
    """Channels between layers."""
    steps: int = 2_500
    """Optimiser steps of each run of the teacher's task."""
    real_steps: int = 600
    """Optimiser steps of each run of the real tasks."""
    batch_size: int = 64
    """Sequences at once."""
    images: int = 20_000
    """Training images of `rows`."""
    test_images: int = 2_000
    """Sequences to measure on, at most."""
    rate: float = 3e-3
    """Learning rate (AdamW, cosine to zero, one twentieth of the steps of warm-up)."""
    position_rate: float = 10.0
    """Learning rate of centres and spreads, as a multiple: places are a larger unit than weights."""
    weight_decay: float = 0.01
    """Of weights; centres and spreads have none."""
    device: DeviceName = "auto"
    """Where to train; bf16 in matrix products on CUDA."""


@dataclass(frozen=True)
class Layer:
    """What the heads of one layer do."""

    heads: int
    fixed_before: int
    """Heads at a fixed shift before training."""
    shifts: tuple[int, ...]
    """Of the heads at a fixed shift after it, in order."""
    all_shifts: tuple[tuple[int, float, float], ...]
    """Of every head: best shift, mass there, constancy."""
    score: float
    """The convolutional score of an audit, 0 to 1."""


@dataclass(frozen=True)
class Result:
    """One run. The score is accuracy, or of the teacher's task the squared error over the channels' mean variance."""

    task: str
    model: str
    seed: int
    parameters: int
    score: float
    seconds: float
    layers: tuple[Layer, ...]


def main(settings: Settings) -> list[Result]:
    """Train what is missing, print and write the tables."""
    if "rows" in settings.tasks and settings.root is None:
        raise ValueError(bad("--root", "must name the folder of CIFAR-10 for the task rows", None))
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
    """A run, or what is kept of it."""
    other = "real_steps" if task.teacher is not None else "steps"
    free = ("root", "out", "kept", "tasks", "seeds", "control_seeds", other)
    values = {name: str(value) for name, value in asdict(settings).items() if name not in free}
    on = [values, device_of(settings.device).type]
    name = f"{task.name} {model} {seed}"
    return from_plain(kept(settings.kept, name, on, lambda: train_and_look(task, model, seed, settings)))


def from_plain(values: dict[str, Any]) -> Result:
    """A result from what JSON made of it."""
    layers = tuple(
        Layer(**{**layer, "shifts": tuple(layer["shifts"]), "all_shifts": tuple(map(tuple, layer["all_shifts"]))})
        for layer in values["layers"]
    )
    return Result(**{**values, "layers": layers})


def train_and_look(task: Task, model: ModelName, seed: int, settings: Settings) -> Result:
    """A network of one kind: trained, measured, its heads looked at."""
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
    """AdamW with warm-up and a cosine to zero."""
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
        total_steps=steps + 1,  # the scheduler begins with one of its own
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
    """Cross-entropy of classes, mean square of sequences."""
    if target.dtype == torch.int64:
        return F.cross_entropy(made.float(), target, label_smoothing=0.1)
    return F.mse_loss(made.float(), target)


@torch.inference_mode()
def measure(network: nn.Module, task: Task, device: torch.device) -> float:
    """Accuracy, or the squared error over the mean variance of the target's channels, in full precision."""
    network.eval()
    made = torch.cat([network(part.to(device)).cpu() for part in task.test.split(250)])
    if task.test_targets.dtype == torch.int64:
        return float((made.argmax(1) == task.test_targets).double().mean())
    return float((made - task.test_targets).square().mean() / task.test_targets.var((0, 2)).mean())


Looked = tuple[list[tuple[int, float, float, bool]], float]


def look(network: nn.Module, task: Task) -> list[Looked]:
    """Per layer: shift, mass, constancy and whether it is fixed of every head, and the convolutional score."""
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
    """How many of the teacher's shifts fixed heads hold, and the translation at which.

    A student may move all shifts of its first layer by g and those of the second by -g: away from the borders that is
    the same function. The best g is taken, the smallest of equals.
    """
    first, second = (set(layer.shifts) for layer in layers)
    counts = {
        g: len({s - g for s in first} & set(TEACHER_SHIFTS[0])) + len({s + g for s in second} & set(TEACHER_SHIFTS[1]))
        for g in sorted(range(-PLACES // 2, PLACES // 2 + 1), key=abs)
    }
    best = max(counts, key=lambda g: counts[g])
    return counts[best], best


def tables(results: Sequence[Result]) -> str:
    """Markdown: what came out, and what the heads do."""
    lines = ["| task | model | parameters | error (teacher) or accuracy | seconds |", "|---|---|---|---|---|"]
    layers = [
        "| task | model | layer | heads at a fixed shift before | after | convolutional score | shifts, seed by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    found = ["| model | teacher's shifts held, seed by seed | moved by |", "|---|---|---|"]
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
                f"| {task} | {model} | {number + 1} | {mean(layer.fixed_before for layer in each):.1f} {of} | "
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
