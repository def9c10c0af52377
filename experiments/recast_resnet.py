"""Is a ResNet that is recast with soft heads and fine-tuned more accurate than the fine-tuned CNN?

A finished run of `resnet18`, at any scale, is recast with hard heads. By construction, the logits are equal up to
rounding, which is verified on the test images, also with the softmax of every head. Then the CNN and its copy with soft
heads are fine-tuned in the same way, as in `experiments.finetune_recast`, with several seeds. The learning rate of each
is chosen on held-out images with the first seed, not on the test set.

    python -m experiments.recast_resnet --run runs/resnet18 --root PATH/TO/CIFAR --out results/recast-resnet

Finished training runs are kept; a second call trains only the missing ones.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.convert import SOFT_ALPHA, recast
from attnconv.data.load_splits import load_data
from attnconv.models.model_loader import checkpoint_file, load as load_model
from attnconv.models.settings import ResNetSettings
from attnconv.training.run_folder import RunFolder
from experiments.common import DeviceName, Images, device_of, kept, percentage, spread, write_results
from experiments.fast_net import logits_of
from experiments.fast_recast import part_right
from experiments.finetune_recast import Result, Settings as TuningSettings, run as tune

CNN, SOFT = "CNN", "soft heads"
_FREE = ("run", "root", "out", "kept", "seeds", "rates", "compare", "device")  # do not affect training


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    run: Path
    """Finished run folder of a ResNet; the checkpoint of its best epoch on held-out images is used."""
    root: Path | None = None
    """Folder of the run's images; None for the folder stored in the run."""
    out: Path | None = None
    """Output folder for the table; None only prints it."""
    kept: Path = Path("runs/recast-resnet")
    """Folder of finished training runs, for any settings."""
    seeds: int = 3
    """Number of training runs of each network with its learning rate."""
    rates: tuple[float, ...] = (0.01, 0.001, 0.0001)
    """Learning rates to choose from (SGD with momentum 0.9, cosine decay to zero)."""
    position_rate: float = 20.0
    """Learning rate of centres and spreads, relative to that of the weights."""
    alpha: float = SOFT_ALPHA
    """Sharpness of soft heads, in 1 / position^2."""
    epochs: int = 2
    """Number of epochs."""
    images: int = 50_000
    """Maximum number of training images."""
    test_images: int = 10_000
    """Maximum number of test images."""
    compare: int = 200
    """Number of test images for which logits are also computed with the softmax of every head."""
    batch_size: int = 100
    """Batch size."""
    device: DeviceName = "auto"
    """Device for training, with bf16 matrix products on CUDA. Accuracies are measured in full precision."""


@dataclass(frozen=True)
class Equality:
    """Comparison of the network and its copy with hard heads on test images."""

    cnn: float
    """Accuracy of the CNN, between 0 and 1."""
    attention: float
    difference: float
    """Largest difference of a logit, with heads run as shifts."""
    softmax_difference: float
    """Largest difference of a logit, with heads computed by softmax, on fewer images."""
    largest_logit: float


@dataclass(frozen=True)
class Tuned:
    """One fine-tuning run."""

    rate: float
    seed: int
    result: Result


Sets = dict[str, Images]


def main(settings: Settings) -> tuple[Equality, dict[str, list[Tuned]]]:
    """Recast, compare and fine-tune; print and write the tables."""
    torch.set_flush_denormal(True)
    device = device_of(settings.device)
    cnn = trained_network(settings.run).to(device)
    sets = images_of(settings, device)
    equality = compare(cnn, sets["test"].normalised(), settings)
    soft = recast(cnn, alpha=settings.alpha, weights="nearest")
    tuned = {name: tune_all(name, model, sets, settings) for name, model in ((CNN, cnn), (SOFT, soft))}
    text = tables(equality, tuned, settings)
    print(text)
    if settings.out is not None:
        found = {
            "network": asdict(RunFolder(settings.run).settings().model),
            "equality": asdict(equality),
            "tuned": {name: [asdict(one) for one in all_of] for name, all_of in tuned.items()},
        }
        write_results(settings.out, "recast_resnet", settings, text, found, device=device)
    return equality, tuned


def trained_network(run: Path) -> nn.Module:
    """Return the network of a finished run, in evaluation mode.

    Raises:
        ValueError: The folder is not a run, the run is not finished, or its model is not a ResNet.
    """
    folder = RunFolder(run)
    kind = type(folder.settings().model)
    if kind is not ResNetSettings or folder.result() is None:
        state = "unfinished" if folder.result() is None else "finished"
        got = f"{run}, {state}, of {kind.__name__}"
        raise ValueError(bad("--run", "must be a finished run of a ResNet", got))
    return load_model(run).model


def images_of(settings: Settings, device: torch.device) -> Sets:
    """Return the training, held-out and test images of the run."""
    chosen = RunFolder(settings.run).settings().data
    root = chosen.root if settings.root is None else str(settings.root)
    data = load_data(replace(chosen, root=root, download=False))
    if not len(data.validation):
        raise ValueError(bad("--run", "must have held-out images, to choose learning rates", "none"))
    parts = {
        "train": (data.train, settings.images),
        "held out": (data.validation, None),
        "test": (data.test, settings.test_images),
    }
    return {name: Images(part, data.mean, data.std).first(count).to(device) for name, (part, count) in parts.items()}


def compare(cnn: nn.Module, test: tuple[Tensor, Tensor], settings: Settings) -> Equality:
    """Compare the network with its copy with hard heads."""
    images, labels = test
    few = images[: settings.compare]
    plain, ours = (logits_of(net, images, several=False) for net in (cnn, recast(cnn)))
    softmax = logits_of(recast(cnn, fast=False), few, several=False, batch_size=50)
    return Equality(
        cnn=part_right(plain, labels),
        attention=part_right(ours, labels),
        difference=float((plain - ours).abs().max()),
        softmax_difference=float((plain[: len(few)] - softmax).abs().max()),
        largest_logit=float(plain.abs().max()),
    )


def tune_all(name: str, model: nn.Module, sets: Sets, settings: Settings) -> list[Tuned]:
    """Fine-tune with all rates and the first seed, then with the best rate and the other seeds; return best first."""
    tried = [tune_once(name, model, sets, settings, rate=rate, seed=0) for rate in settings.rates]
    best = max(tried, key=lambda one: one.result.held_out_after)
    others = [tune_once(name, model, sets, settings, rate=best.rate, seed=seed) for seed in range(1, settings.seeds)]
    return [best, *others, *(one for one in tried if one is not best)]


def tune_once(name: str, model: nn.Module, sets: Sets, settings: Settings, *, rate: float, seed: int) -> Tuned:
    """Return the result of fine-tuning a copy of the network, computing it if it is not cached."""
    how = TuningSettings(
        checkpoint=Path(),
        root=Path(),
        epochs=settings.epochs,
        batch_size=min(settings.batch_size, len(sets["train"])),
        rate=rate,
        position_rate=rate * settings.position_rate,
        augment=RunFolder(settings.run).settings().augment,
        seed=seed,
    )
    values = {key: value for key, value in asdict(settings).items() if key not in _FREE}
    weights = hashlib.sha256(checkpoint_file(settings.run).read_bytes()).hexdigest()
    on = [values, str(asdict(how)), device_of(settings.device).type, weights]
    result = kept(settings.kept, name, on, lambda: tune(name, copy.deepcopy(model), sets, how))
    return Tuned(rate, seed, Result(**result))


def final(tuned: Sequence[Tuned]) -> list[Result]:
    """Return the results with the chosen learning rate, by seed."""
    return [one.result for one in tuned if one.rate == tuned[0].rate]


def tables(equality: Equality, tuned: dict[str, list[Tuned]], settings: Settings) -> str:
    """Return the Markdown tables of recasting, of fine-tuning, and of the learning rates."""
    lines = [
        "| | CNN | recast with hard heads |",
        "|---|---|---|",
        f"| test accuracy | {percentage(equality.cnn)} | {percentage(equality.attention)} |",
        f"| largest difference of a logit (largest logit {equality.largest_logit:.1f}) | | {equality.difference:.1e} |",
        f"| with softmax ({settings.compare:,} images) | | {equality.softmax_difference:.1e} |",
        "",
        "| fine-tuned network | learning rate | test accuracy before | after | held-out accuracy after "
        "| heads moved by 0.1 positions or more | largest move, positions | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, all_of in tuned.items():
        runs = final(all_of)
        after = [spread([getattr(run, key) for run in runs], percent=True) for key in ("test_after", "held_out_after")]
        moved = f"{spread([float(run.moved) for run in runs])} of {runs[0].heads} | {max(r.farthest for r in runs):.2f}"
        lines.append(
            f"| {name} | {all_of[0].rate:g} | {percentage(runs[0].test_before)} | {' | '.join(after)} | "
            f"{moved if runs[0].heads else '- | -'} | {spread([run.seconds for run in runs])} |"
        )
    pairs = zip(final(tuned[CNN]), final(tuned[SOFT]), strict=True)
    gains = [100 * (soft.test_after - cnn.test_after) for cnn, soft in pairs]
    shown = ", ".join(f"{gain:+.2f}" for gain in gains)
    lines += ["", f"Test accuracy of soft heads minus that of the CNN per seed, in percentage points: {shown}."]
    tried = {
        name: ", ".join(
            f"{one.rate:g}: {percentage(one.result.held_out_after)}"
            for one in sorted(all_of, key=lambda one: -one.rate)
            if one.seed == 0
        )
        for name, all_of in tuned.items()
    }
    lines += [
        "Held-out accuracy by learning rate: " + "; ".join(f"{name} {shown}" for name, shown in tried.items()) + "."
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
