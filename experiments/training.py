"""Training of any classifier with the library's training loop; finished runs are kept, interrupted ones resumed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from attnconv._util.settings import plain
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load_data
from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.models.presets import preset_settings
from attnconv.report.figure_style import FAINT, GRID, INK, colour_of, house_style, save
from attnconv.training.environment import environment
from attnconv.training.evaluation import device_of, on_device
from attnconv.training.loop import TrainingLoop, numerics
from attnconv.training.run_recorder import read_state, save_state
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, TrainSettings
from experiments.common import kept, kept_file, spread, write_results


@dataclass(frozen=True)
class Recipe:
    """Training of every model of an experiment."""

    optim: OptimSettings
    """Optimiser."""
    train: TrainSettings
    """Duration, precision and device. The seed is set for each run."""
    schedule: ScheduleSettings = field(default_factory=lambda: ScheduleSettings(warmup=0.1))
    """Learning rate schedule."""
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    """Augmentation of training images."""
    limit: int | None = None
    """Number of training images; None for all 50,000."""

    def settings(self, root: Path, seed: int) -> RunSettings:
        """Return the settings of a run on CIFAR-10; their model is not used."""
        return RunSettings(
            preset="",
            model=preset_settings("quadratic-small"),
            data=DataSettings(root=str(root), validation=0, limit=self.limit, download=False),
            augment=self.augment,
            optim=self.optim,
            schedule=self.schedule,
            train=replace(self.train, seed=seed, test_curve=True),
        )


@dataclass(frozen=True)
class Curve:
    """Measurements of a run, one per epoch; accuracies are from 0 to 1. `settings` identifies the run.

    `precision` is 32 if the settings say bf16 and the device would emulate it. `environment` contains the versions, the
    commit and the device; older records lack it.
    The test accuracy is measured only about five times per run, the last time after the last epoch.
    """

    parameters: int
    loss: list[float]
    train_accuracy: list[float]
    test_accuracy: list[float]
    seconds: list[float]
    settings: Any
    precision: str = "bf16"
    environment: dict[str, Any] | None = None


def data_of(recipe: Recipe, root: Path) -> Splits:
    """Return the images of the runs."""
    return load_data(recipe.settings(root, 0).data)


def trained(
    folder: Path, name: str, key: Any, make: Callable[[], nn.Module], settings: RunSettings, data: Splits
) -> dict[str, Any]:
    """Return the `Curve` of a run as plain values; train the model if the folder does not contain this run.

    Args:
        folder: Folder of all runs. An interrupted run continues after its last complete epoch.
        name: Name of the run.
        key: JSON values on which the model depends; they and the settings identify the run.
        make: Function that builds the model.
        settings: Settings of the run.
        data: Images of the run.
    """
    on = [key, plain(replace(settings, data=replace(settings.data, root="")))]
    state = kept_file(folder, name, on).with_suffix(".state")
    return kept(folder, name, on, lambda: _train(state, on, make, settings, data))


def report(script: str, runs: Sequence[tuple[str, int, dict[str, Any]]], settings: Any, out: Path | None) -> None:
    """Print the table of runs (row, seed, curve), with mean and standard deviation over seeds; write it to `out`."""
    lines = ["| row | parameters | test accuracy | runs |", "|---|---|---|---|"]
    for row in dict.fromkeys(row for row, _, _ in runs):
        curves = [curve for name, _, curve in runs if name == row]
        found = spread([curve["test_accuracy"][-1] for curve in curves], percent=True)
        lines.append(f"| {row} | {curves[0]['parameters']:,} | {found} | {len(curves)} |")
    text = "\n".join(lines)
    print(text)
    if out is not None:
        records = [{"row": row, "seed": seed, **curve} for row, seed, curve in runs]
        write_results(out, script, settings, text, {"runs": records})
        save(draw_runs(runs), out / "test-accuracy")


def draw_runs(runs: Sequence[tuple[str, int, dict[str, Any]]]) -> Figure:
    """Draw the test accuracy of runs (row, seed, curve): a dot per run, a line at each row's mean, the first dotted."""
    rows = list(dict.fromkeys(row for row, _, _ in runs))
    with house_style():
        figure = Figure(figsize=(6.4, 0.9 + 0.24 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for height, row in enumerate(rows):
            found = [100 * curve["test_accuracy"][-1] for name, _, curve in runs if name == row]
            axes.plot(found, [height] * len(found), "o", color=colour_of(height == 0), markersize=4, alpha=0.7)
            axes.plot([mean(found)] * 2, [height - 0.32, height + 0.32], color=INK, linewidth=1.2)
            if height == 0:
                axes.axvline(mean(found), color=FAINT, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("test accuracy after the last epoch (%)")
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _train(file: Path, on: Any, make: Callable[[], nn.Module], settings: RunSettings, data: Splits) -> Curve:
    device = device_of(settings.train.accelerator)
    used = on_device(settings.train.precision, device)
    test_every = max(1, settings.train.epochs // 5)  # epochs
    file.parent.mkdir(parents=True, exist_ok=True)
    known = environment([], device)
    made = {name: known[name] for name in ("versions", "commit", "device")}
    with numerics(device):
        model = make()
        curve = Curve(sum(weight.numel() for weight in model.parameters()), [], [], [], [], on, used, made)
        loop = TrainingLoop(settings, model, data, device)
        if file.is_file():
            state = read_state(file)
            loop.load_state(state)
            curve = Curve(**{**state["curve"], "settings": on})
        while loop.epoch < settings.train.epochs:
            start = time.perf_counter()
            loop.train_epoch(lambda: None)
            measured = loop.epoch % test_every == 0 or loop.epoch == settings.train.epochs
            found = loop.evaluate() if measured else {"train": loop.train_metrics()}
            curve.seconds.append(time.perf_counter() - start)
            curve.loss.append(found["train"].loss)
            curve.train_accuracy.append(found["train"].accuracy)
            if measured:
                curve.test_accuracy.append(found["test"].accuracy)
            save_state(file, {"curve": asdict(curve), **loop.state()})
            accuracies = ", ".join(f"{name} {metrics.accuracy:.2%}" for name, metrics in found.items())
            print(f"{file.stem}, epoch {loop.epoch}: loss {curve.loss[-1]:.3f}, accuracy {accuracies}", flush=True)
    file.unlink()
    return curve
