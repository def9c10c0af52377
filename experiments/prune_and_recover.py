"""Are exactly the degenerate heads pruned, and does accuracy recover? A model with planted heads, pruned, trained on.

Two heads of every layer begin with the parameters of degenerate ones: S = 0, which averages the image, and S of rank
one, which attends a stripe. Both stay so, since the gradient of S S^T is zero where a column of S is. The model is
trained with them, the degenerate heads are found by the paper's thresholds and by those of its code, and removed; the
rest trains on for a third of the epochs at a tenth of the rate.

    python -m experiments.prune_and_recover --root PATH/TO/CIFAR --out results/NAME
    python -m experiments.prune_and_recover --no-trained      # the control alone

Which layers can then no longer express a 3 x 3 kernel? Where none could before, that asks nothing, so a control stands
beside it: the same model with nine more heads per layer, hard ones on the taps of a 3 x 3 kernel. In its last layer one
tap's head is a stripe by the paper's threshold, though it attends a single pixel.

Trained runs are kept and continued: a second call measures them again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import nn

from attnconv.convert import from_conv
from attnconv.data.load_splits import load_data
from attnconv.encodings import GeneralizedQuadratic
from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.settings import AttentionSettings
from attnconv.paper.training_plan import continued
from attnconv.surgery import degenerate_heads, prune_heads
from attnconv.surgery.head_pruning import attention_layers, settings_after_pruning
from attnconv.theory import can_express
from attnconv.training.evaluation import evaluate
from attnconv.training.fitting import fit
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings
from experiments.common import write_results

HARDNESS = 40.0  # alpha of the control's nine heads: all but exp(-40) falls on one pixel
PLANTED = (2, 6)  # the head that averages the image, and the stripe


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path = Path("data")
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Folder for the table; None prints it only."""
    kept: Path = Path("runs/prune-and-recover")
    """Folder of the two runs, of these settings only."""
    preset: str = "quadratic-generalized-small"
    """A model of the generalised quadratic encoding."""
    epochs: int = 9
    """Of the training before; a third of them follow after the pruning."""
    images: int | None = None
    """Training images; None for all."""
    trained: bool = True
    """Whether to train; if not, the control alone is printed."""
    seed: int = 42
    """Of the parameters and of the order of images."""


def main(settings: Settings) -> None:
    """Train, prune, train on; print and write the table."""
    torch.set_flush_denormal(True)
    control = control_lines(settings)
    if not settings.trained:
        print("\n".join(control))
        return
    before = train_planted(settings)
    loaded = load(before.last_weights)
    layers = attention_layers(loaded.model)
    found = {
        criterion: {name: degenerate_heads(layer, criterion) for name, layer in layers.items()}
        for criterion in ("paper", "code")
    }
    pruned = prune_heads(loaded.model, found["paper"])
    after = train_on(before, pruned, settings)
    again = load(after.start_weights).model
    accuracies = {
        "before": accuracy(loaded.model, before.settings()),
        "pruned": accuracy(pruned, before.settings()),
        "pruned, loaded from its file": accuracy(again, before.settings()),
        "trained on": accuracy(load(after.last_weights).model, after.settings()),
    }
    report(settings, before, after, found, accuracies, expressed(loaded.model, pruned), control)


def train_planted(settings: Settings) -> RunFolder:
    """The run with planted heads."""
    run = recipe(settings.preset)
    assert isinstance(run.model, AttentionSettings)
    run = replace(
        run,
        data=replace(run.data, root=str(settings.root), download=False, limit=settings.images),
        train=replace(run.train, epochs=settings.epochs, seed=settings.seed),
    )
    start = settings.kept / "planted.safetensors"
    if not start.exists():
        torch.manual_seed(settings.seed)
        model = build(run.model)
        for layer in attention_layers(model).values():
            plant(layer.encoding)
        settings.kept.mkdir(parents=True, exist_ok=True)
        save_weights(start, model, run.model)
    return fit(run, settings.kept / "before", resume=True, start_from=start)


@torch.no_grad()
def plant(encoding: nn.Module) -> None:
    """Make two heads degenerate."""
    assert isinstance(encoding, GeneralizedQuadratic)
    encoding.root_precision[PLANTED[0]] = 0
    encoding.root_precision[PLANTED[1], :, 1:] = 0


@torch.no_grad()
def control_lines(settings: Settings) -> list[str]:
    """Which layers of nine hard heads besides can no longer express a 3 x 3 kernel, as a table."""
    run = recipe(settings.preset)
    assert isinstance(run.model, AttentionSettings)
    torch.manual_seed(settings.seed)
    model = build(replace(run.model, heads=9 + len(PLANTED)))
    layers = attention_layers(model)
    hard = from_conv(nn.Conv2d(3, 3, 3, padding=1), alpha=HARDNESS).encoding
    taps = [head for head in range(9 + len(PLANTED)) if head not in PLANTED]
    for layer in layers.values():
        plant(layer.encoding)
        layer.encoding.get_parameter("centres")[taps] = hard.get_parameter("centres")
        layer.encoding.get_parameter("root_precision")[taps] = (2 * HARDNESS) ** 0.5 * torch.eye(2)
    layer.encoding.get_parameter("root_precision")[taps[5], 1] *= 1e3
    removed = {name: degenerate_heads(layer) for name, layer in layers.items()}
    kernels = expressed(model, prune_heads(model, removed))
    lines = ["| layer of the control | removed (paper) | 3 x 3 out of reach before | after |", "|---|---|---|---|"]
    for name, (before, after) in kernels.items():  # rounding alone is told by its size
        left = f"{after:.0e}" if after < 1e-9 else f"{after:.3f}"
        lines.append(f"| {name} | {removed[name]} | {before:.0e} | {left} |")
    return lines


def train_on(before: RunFolder, pruned: nn.Module, settings: Settings) -> RunFolder:
    """The run that continues with what is left."""
    run = before.settings()
    assert isinstance(run.model, AttentionSettings)
    model = settings_after_pruning(run.model, pruned)
    start, source = settings.kept / "pruned.safetensors", load(before.last_weights)
    save_weights(start, pruned, model, classes=source.classes, mean=source.mean, std=source.std)
    after = replace(continued(run, "pruned"), model=model)
    return fit(after, settings.kept / "after", resume=True, start_from=start)


def accuracy(model: nn.Module, run: RunSettings) -> float:
    """Part of the test images that are classified rightly."""
    data = load_data(run.data)
    return evaluate(
        model,
        data.test,
        mean=data.mean,
        std=data.std,
        batch_size=run.train.eval_batch_size,
        precision=run.train.precision,
        device=torch.device("cpu"),
    ).accuracy


def expressed(before: nn.Module, after: nn.Module) -> dict[str, tuple[float, float]]:
    """Per layer, the part of 3 x 3 kernels out of reach, away from the border: before and after."""
    rest = attention_layers(after)
    found = {}
    for name, layer in attention_layers(before).items():
        whole, left = (can_express(each, 3, sizes=(16, 16)) for each in (layer, rest[name]))
        found[name] = (whole.missed, left.missed)
    return found


def report(
    settings: Settings,
    before: RunFolder,
    after: RunFolder,
    found: Mapping[str, Mapping[str, tuple[int, ...]]],
    accuracies: Mapping[str, float],
    kernels: Mapping[str, tuple[float, float]],
    control: Sequence[str],
) -> None:
    """Print, and write if wanted."""
    models = [run.settings().model for run in (before, after)]
    counts = {
        name: [count(model) for model in models]
        for name, count in (("parameters", parameters), ("FLOPs, paper's way", flops_paper), ("FLOPs", flops_all))
    }
    lines = [
        "| layer | removed (paper) | removed (code) | 3 x 3 out of reach before | after |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['paper'][name]} | {found['code'][name]} | {kernels[name][0]:.3f} | {kernels[name][1]:.3f} |"
        for name in kernels
    ]
    lines += ["", *control]
    lines += ["", "| | test accuracy |", "|---|---|", *(f"| {n} | {value:.2%} |" for n, value in accuracies.items())]
    lines += [
        "",
        "| | before | after |",
        "|---|---|---|",
        *(f"| {n} | {a:,} | {b:,} |" for n, (a, b) in counts.items()),
    ]
    text = "\n".join(lines)
    print(text)
    if settings.out is not None:
        record = {"removed": found, "accuracies": accuracies, "kernels": kernels, "counts": counts, "control": control}
        write_results(settings.out, "prune_and_recover", settings, text, record)


if __name__ == "__main__":
    main(tyro.cli(Settings))
