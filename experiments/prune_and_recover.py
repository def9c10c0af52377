"""Pruning of degenerate heads: are the planted heads found, and no others, and does accuracy recover after pruning?

Two heads of every layer are initialised as degenerate heads: one with `root_precision` S = 0, which averages the image,
and one with S of rank 1, which attends to a stripe. Training does not change this, since the gradient of S S^T is zero
for a column of S that is zero. After training, degenerate heads are detected with the thresholds of the paper and of
its code, and removed. The pruned model is trained for a third of the epochs at a tenth of the learning rate.

    python -m experiments.prune_and_recover --root PATH/TO/CIFAR --out results/NAME
    python -m experiments.prune_and_recover --no-trained      # only the control

The script also tests which layers can no longer express a 3 x 3 kernel. If no layer can express one before pruning, the
test shows nothing, so there is a control: the same model with nine additional hard heads per layer, at the taps of
the kernel. In its last layer, the head of one tap is a stripe by the paper's threshold, although it attends to one
position.

Trained runs are kept. A second call continues unfinished runs and repeats the measurements.
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
from experiments.common import percentage, write_results

HARDNESS = 40.0  # alpha of the nine hard heads of the control; about exp(-40) of their attention is outside the target
PLANTED = (2, 6)  # indices of the averaging head and the stripe


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path = Path("data")
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the table; None only prints it."""
    kept: Path = Path("runs/prune-and-recover")
    """Folder of the two runs; use a separate folder for other settings."""
    preset: str = "quadratic-generalized-small"
    """Preset with the generalised quadratic encoding."""
    epochs: int = 9
    """Number of epochs before pruning; a third as many follow after it."""
    images: int | None = None
    """Number of training images; None for all."""
    trained: bool = True
    """Train and prune the model; if False, only print the control."""
    seed: int = 42
    """Seed of the initial parameters and of the order of images."""


def main(settings: Settings) -> None:
    """Train, prune and fine-tune; print and write the table."""
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
        "pruned and fine-tuned": accuracy(load(after.last_weights).model, after.settings()),
    }
    report(settings, before, after, found, accuracies, expressed(loaded.model, pruned), control)


def train_planted(settings: Settings) -> RunFolder:
    """Return the run with planted heads."""
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
    """Set two heads to be degenerate."""
    assert isinstance(encoding, GeneralizedQuadratic)
    encoding.root_precision[PLANTED[0]] = 0
    encoding.root_precision[PLANTED[1], :, 1:] = 0


@torch.no_grad()
def control_lines(settings: Settings) -> list[str]:
    """Return a table of which layers of the control can no longer express a 3 x 3 kernel."""
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
    lines = ["| layer of the control | removed (paper) | 3 x 3 residual before | after |", "|---|---|---|---|"]
    for name, (before, after) in kernels.items():  # rounding errors are printed in scientific notation
        left = f"{after:.0e}" if after < 1e-9 else f"{after:.3f}"
        lines.append(f"| {name} | {removed[name]} | {before:.0e} | {left} |")
    return lines


def train_on(before: RunFolder, pruned: nn.Module, settings: Settings) -> RunFolder:
    """Return the run that fine-tunes the pruned model."""
    run = before.settings()
    assert isinstance(run.model, AttentionSettings)
    model = settings_after_pruning(run.model, pruned)
    start, source = settings.kept / "pruned.safetensors", load(before.last_weights)
    save_weights(start, pruned, model, classes=source.classes, mean=source.mean, std=source.std)
    after = replace(continued(run, "pruned"), model=model)
    return fit(after, settings.kept / "after", resume=True, start_from=start)


def accuracy(model: nn.Module, run: RunSettings) -> float:
    """Return the test accuracy, between 0 and 1."""
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
    """Return the residual of 3 x 3 kernels away from the border (`missed`), before and after, for each layer."""
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
    """Print the tables; also write them if an output folder is given."""
    models = [run.settings().model for run in (before, after)]
    counts = {
        name: [count(model) for model in models]
        for name, count in (
            ("parameters", parameters),
            ("FLOPs (as in the paper)", flops_paper),
            ("FLOPs (total)", flops_all),
        )
    }
    lines = [
        "| layer | removed (paper) | removed (code) | 3 x 3 residual before | after |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['paper'][name]} | {found['code'][name]} | {kernels[name][0]:.3f} | {kernels[name][1]:.3f} |"
        for name in kernels
    ]
    lines += ["", *control]
    lines += [
        "",
        "| | test accuracy |",
        "|---|---|",
        *(f"| {n} | {percentage(value)} |" for n, value in accuracies.items()),
    ]
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
