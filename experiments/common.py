"""What several of these scripts do: images and their augmentation, accuracy, and a folder of results."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from attnconv._util.atomic_write import write_atomically
from attnconv.data.augmentation import augment, normalise
from attnconv.data.image_set import ImageSet, uniform
from attnconv.data.load_splits import load_data
from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.training.environment import environment
from experiments.resnet20 import MEAN, STD

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images as bytes, and the normalisation of their channels."""

    pixels: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.pixels)

    def first(self, count: int | None) -> "Images":
        """At most so many of them; None for all."""
        return replace(self, pixels=ImageSet(self.pixels.images[:count], self.pixels.labels[:count]))

    def to(self, device: torch.device) -> "Images":
        """The same on another device."""
        return replace(self, pixels=self.pixels.to(device))

    def normalised(self) -> tuple[Tensor, Tensor]:
        """All of them as a model wants them, and their classes."""
        return normalise(self.pixels.images, self.mean, self.std), self.pixels.labels

    def batch(self, chosen: Tensor, changes: AugmentSettings, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Some of them, changed at random as trainings of the library change them, and their classes.

        Args:
            chosen: Their numbers.
            changes: Which changes; mixing of images is left out.
            seed: Of the changes.
            epoch: Likewise; every epoch changes them in other ways.
        """
        some = self.pixels.take(chosen)
        uniforms = _uniforms(seed, epoch, len(self), chosen.device)[chosen]
        return augment(some.images, uniforms, settings=changes, mean=self.mean, std=self.std), some.labels


@lru_cache(maxsize=1)
def _uniforms(seed: int, epoch: int, n: int, device: torch.device) -> Tensor:
    return uniform(seed, epoch, n).to(device)


def cifar10_images(
    root: Path, train: Mapping[str, slice], test: int, *, held_out: int | None = None
) -> dict[str, Images]:
    """CIFAR-10, normalised as `experiments.resnet20` wants it.

    Args:
        root: Folder of CIFAR-10.
        train: Name -> which of the training images.
        test: How many test images; they go by the name "test".
        held_out: Training images left out before; None for the library's 5,000.
    """
    data = load_data(DataSettings(name="cifar10", root=str(root), download=False, validation=held_out))
    parts = {name: (data.train, chosen) for name, chosen in train.items()} | {"test": (data.test, slice(test))}
    return {
        name: Images(ImageSet(part.images[chosen], part.labels[chosen]), MEAN, STD)
        for name, (part, chosen) in parts.items()
    }


def cifar10(
    root: Path, train: Mapping[str, slice], test: int, *, held_out: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images and classes of `cifar10_images`."""
    return {name: images.normalised() for name, images in cifar10_images(root, train, test, held_out=held_out).items()}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Part of the images that are classified rightly."""
    model.eval()
    with torch.inference_mode():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
        )
    return right / len(images)


def device_of(name: DeviceName) -> torch.device:
    """Where to compute: on CUDA where there is one, unless it is said."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 in products on CUDA, nothing elsewhere."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def spread(values: Sequence[float], *, percent: bool = False) -> str:
    """Mean and, of several runs, deviation."""
    middle, off = mean(values), stdev(values) if len(values) > 1 else None
    shown = f"{middle:.2%}" if percent else f"{middle:.3g}"
    if off is None:
        return shown
    return f"{shown} ± {off * 100:.2f}" if percent else f"{shown} ± {off:.2g}"


def kept(folder: Path, name: str, on: Sequence[Any], make: Callable[[], Any]) -> dict[str, Any]:
    """A result as plain values: what is kept of it, or made now and kept.

    Args:
        folder: Of all kept results.
        name: Of the file, without its ending.
        on: What the result depends on, as JSON values; others lie in other folders.
        make: Gives the result, a dataclass.
    """
    digest = hashlib.sha256(json.dumps(on).encode()).hexdigest()[:12]
    file = folder / digest / f"{name.replace(' ', '-')}.json"
    if not file.is_file():
        result = asdict(make())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(result).encode())
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def write_results(
    out: Path,
    script: str,
    settings: Any,
    table: str,
    found: Mapping[str, Any],
    *,
    device: torch.device | None = None,
) -> None:
    """table.md, and results.json with the settings but for their paths, the environment and what was found.

    Args:
        out: Folder of the results.
        script: Name of the script.
        settings: Its dataclass.
        table: Markdown.
        found: Plain values.
        device: What it ran on; None for the CPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    plain = {name: value.name if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    made = environment(["python", "-m", f"experiments.{script}"], torch.device("cpu") if device is None else device)
    record = {"settings": plain, "environment": made, **found}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
