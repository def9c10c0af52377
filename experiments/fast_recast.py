"""Time to an attention-only network with 94 or 96 % accuracy on CIFAR-10: a fast CNN is trained and recast.

Recasting replaces the convolutions of `experiments.fast_net` with attention, using one hard head per kernel position.
By construction, the logits are equal up to rounding, which the script verifies. Optionally, the network is also recast
with soft heads and fine-tuned.

    python -m experiments.fast_recast --preset cpu --root PATH/TO/CIFAR --out results/fast-recast
    python -m experiments.fast_recast --preset 94 --seeds 3 --held-out 0 --root PATH/TO/CIFAR

The second command trains with bf16 matrix products, on a GPU or on a CPU with instructions for them. Weights and
results of every seed are kept and reused by later calls, and an interrupted training continues after its last complete
epoch.
"""

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

import safetensors.torch
import torch
import tyro
from torch import Tensor

from attnconv._util.atomic_write import write_atomically
from attnconv.convert import SOFT_ALPHA, recast
from experiments.common import (
    DeviceName,
    Images,
    cifar10_images,
    device_of,
    kept,
    kept_file,
    percentage,
    spread,
    write_results,
)
from experiments.fast_net import FastNet, FastSettings, Log, logits_of, train, whiten
from experiments.finetune_recast import attention

TUNING_RATE = 0.07  # first learning rate of fine-tuning, relative to the highest of the original training

PresetName = Literal["tiny", "cpu", "94", "96"]
PRESETS: Mapping[PresetName, FastSettings] = {
    "tiny": FastSettings(widths=(4, 4, 4), epochs=2, batch_size=20, rate=0.03, bf16=False),
    "cpu": FastSettings(widths=(24, 64, 96), epochs=4, batch_size=250, rate=0.37, bf16=False),
    "94": FastSettings(),
    "96": FastSettings(
        widths=(128, 384, 512),
        depth=3,
        epochs=45,
        rate=1.17,
        peak=0.1,
        end=0.0,
        norm_momentum=0.1,
        shift=4,
        cutout=12,
        hardest=512,
    ),
}


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    preset: PresetName = "cpu"
    """cpu: a narrow network and few epochs, which take minutes on one core. 94 and 96: named after their target
    accuracy. tiny: a quick test of every step."""
    out: Path | None = None
    """Output folder for the table; None only prints it."""
    kept: Path = Path("runs/fast-recast")
    """Folder of trained weights and results."""
    seeds: int = 1
    """Number of runs."""
    images: int = 50_000
    """Maximum number of training images."""
    held_out: int = 5_000
    """Number of CIFAR-10 training images that are held out; 0 for a final run."""
    test_images: int = 10_000
    """Number of test images."""
    compare: int = 1_000
    """Number of test images for which logits are also computed with the softmax of every head."""
    tuning_epochs: int = 0
    """Number of epochs for fine-tuning the CNN and its copy with soft heads; 0 for no fine-tuning."""
    tuning_images: int = 50_000
    """Number of training images for fine-tuning."""
    device: DeviceName = "auto"
    """Device for training. Accuracies are measured in full precision."""


@dataclass(frozen=True)
class Result:
    """Result of one network and its attention-only copy; accuracies are between 0 and 1, times in seconds."""

    seed: int
    parameters: int
    cnn: float
    attention: float
    cnn_several: float
    """Accuracy of the CNN with test-time augmentation."""
    attention_several: float
    difference: float
    """Largest difference of a logit, with heads run as shifts."""
    softmax_difference: float
    """Largest difference of a logit, with heads computed by softmax, on fewer images."""
    few: float
    """Accuracy of the CNN on these images."""
    softmax: float
    """Accuracy on these images, with heads computed by softmax."""
    largest_logit: float
    train_seconds: float
    losses: list[float]
    """Mean training loss of each epoch."""
    recast_seconds: float
    tuned: dict[str, float]
    """Accuracy of the fine-tuned CNN, and of its copy with soft heads before and after; empty without fine-tuning."""


Sets = dict[str, Images]


def main(settings: Settings) -> list[Result]:
    """Train, recast and compare; print and write the table."""
    torch.set_flush_denormal(True)
    device = device_of(settings.device)
    train_part = {"train": slice(settings.images)}
    known = cifar10_images(settings.root, train_part, settings.test_images, held_out=settings.held_out)
    sets = {name: images.to(device) for name, images in known.items()}
    results = []
    for seed in range(settings.seeds):
        results.append(kept_or_run(seed, sets, settings))
        print(results[-1], flush=True)
    text = table(results, settings)
    print(text)
    if settings.out is not None:
        found = {"network": asdict(PRESETS[settings.preset]), "results": [asdict(result) for result in results]}
        write_results(settings.out, "fast_recast", settings, text, found, device=device)
    return results


def kept_or_run(seed: int, sets: Sets, settings: Settings) -> Result:
    """Return the result of one seed, computing it if it is not cached."""
    free = ("root", "out", "kept", "seeds", "device")
    values = {name: value for name, value in asdict(settings).items() if name not in free}
    on = [values, asdict(PRESETS[settings.preset]), device_of(settings.device).type]
    return Result(**kept(settings.kept, f"seed {seed}", on, lambda: run_once(seed, sets, settings)))


def run_once(seed: int, sets: Sets, settings: Settings) -> Result:
    """Compute the result of one seed."""
    images, labels = sets["test"].normalised()
    cnn, log = trained(seed, sets["train"], settings)
    start = time.perf_counter()
    hard = recast(cnn)
    recast_seconds = time.perf_counter() - start
    plain, ours = (logits_of(net, images, several=False) for net in (cnn, hard))
    few = images[: settings.compare]
    softmax = logits_of(recast(cnn, fast=False), few, several=False, batch_size=50)
    views = [logits_of(net, images, several=True) for net in (cnn, hard)]
    return Result(
        seed=seed,
        parameters=sum(parameter.numel() for parameter in cnn.parameters()),
        cnn=part_right(plain, labels),
        attention=part_right(ours, labels),
        cnn_several=part_right(views[0], labels),
        attention_several=part_right(views[1], labels),
        difference=float((plain - ours).abs().max()),
        softmax_difference=float((plain[: settings.compare] - softmax).abs().max()),
        few=part_right(plain[: settings.compare], labels[: settings.compare]),
        softmax=part_right(softmax, labels[: settings.compare]),
        largest_logit=float(plain.abs().max()),
        train_seconds=sum(log.seconds),
        losses=log.loss,
        recast_seconds=recast_seconds,
        tuned=tuned(cnn, sets, settings, seed) if settings.tuning_epochs else {},
    )


def trained(seed: int, data: Images, settings: Settings) -> tuple[FastNet, Log]:
    """Return the CNN in evaluation mode, trained or loaded, with the log of its training."""
    chosen, device = PRESETS[settings.preset], device_of(settings.device)
    torch.manual_seed(seed)
    net = FastNet(chosen.widths, depth=chosen.depth, norm_momentum=chosen.norm_momentum)
    net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    on = [asdict(chosen), len(data), device.type]
    file = kept_file(settings.kept, f"{settings.preset} {seed}", on).with_suffix(".safetensors")
    if file.is_file():
        with safetensors.safe_open(file, "pt") as reader:
            log = Log(**json.loads(reader.metadata()["log"]))
        net.load_state_dict(safetensors.torch.load_file(file, device=str(device)))
        return net.eval(), log
    file.parent.mkdir(parents=True, exist_ok=True)
    images, labels = data.normalised()
    whiten(net, images)
    log = train(net, images, labels, chosen, seed=seed, state=file.with_suffix(".state"))
    tensors = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    write_atomically(file, safetensors.torch.save(tensors, {"log": json.dumps(asdict(log))}))
    file.with_suffix(".state").unlink()
    return net.eval(), log


def tuned(cnn: FastNet, sets: Sets, settings: Settings, seed: int) -> dict[str, float]:
    """Fine-tune the CNN and its copy with soft heads by the original training, with a rate that decays to zero."""
    (images, labels), chosen = sets["test"].normalised(), PRESETS[settings.preset]
    known = sets["train"].first(settings.tuning_images).normalised()
    rate = TUNING_RATE * chosen.rate
    how = replace(chosen, epochs=settings.tuning_epochs, rate=rate, peak=0.0, end=0.0, whitening_epochs=0)
    soft = recast(cnn, alpha=SOFT_ALPHA, weights="nearest")
    before = [layer.encoding.get_parameter("centres").detach().clone() for layer in attention(soft)]
    found = {"soft before": part_right(logits_of(soft, images, several=False), labels)}
    for name, net in (("CNN", copy.deepcopy(cnn)), ("soft", soft)):
        assert isinstance(net, FastNet)
        train(net, *known, how, seed=seed)
        found[f"{name} after"] = part_right(logits_of(net, images, several=False), labels)
    moves = [
        (layer.encoding.get_parameter("centres").detach() - old).norm(dim=1)
        for layer, old in zip(attention(soft), before, strict=True)
    ]
    return found | {"farthest move": float(torch.cat(moves).max())}


def part_right(logits: Tensor, labels: Tensor) -> float:
    """Return the accuracy."""
    return float((logits.argmax(1) == labels.cpu()).double().mean())


def table(results: Sequence[Result], settings: Settings) -> str:
    """Return the table in Markdown."""
    views = {"": ("cnn", "attention"), " with test-time augmentation": ("cnn_several", "attention_several")}
    lines = [f"| preset {settings.preset} | CNN | recast as attention |", "|---|---|---|"]
    for name, pair in views.items():
        cells = [spread([getattr(result, column) for result in results], percent=True) for column in pair]
        lines.append(f"| test accuracy{name} | {' | '.join(cells)} |")
    first = results[0]
    few = [spread([getattr(result, column) for result in results], percent=True) for column in ("few", "softmax")]
    lines += [
        f"| test accuracy, {settings.compare:,} images, heads by softmax | {' | '.join(few)} |",
        "",
        "| | |",
        "|---|---|",
        f"| parameters of the CNN | {first.parameters:,} |",
        f"| largest difference of a logit | {max(r.difference for r in results):.1e} |",
        f"| with softmax ({settings.compare:,} images) | {max(r.softmax_difference for r in results):.1e} |",
        f"| largest logit | {max(r.largest_logit for r in results):.1f} |",
        f"| seconds to train | {mean(r.train_seconds for r in results):.1f} |",
        f"| seconds to recast | {mean(r.recast_seconds for r in results):.2f} |",
    ]
    for name in first.tuned:
        values = [r.tuned[name] for r in results]
        shown = f"{mean(values):.2f} positions" if name == "farthest move" else percentage(mean(values))
        lines.append(f"| fine-tuned for {settings.tuning_epochs} epochs, {name} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
