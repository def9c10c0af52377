"""Shared functions of the experiments: images and augmentation, accuracy, and results."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from attnconv.training import evaluation
from attnconv.training.environment import environment
from experiments.resnet20 import MEAN, STD

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled uint8 images with the normalisation of their channels."""

    pixels: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.pixels)

    def first(self, count: int | None) -> "Images":
        """Return at most the first `count` images; None for all."""
        return replace(self, pixels=ImageSet(self.pixels.images[:count], self.pixels.labels[:count]))

    def to(self, device: torch.device) -> "Images":
        """Return the images on the given device."""
        return replace(self, pixels=self.pixels.to(device))

    def normalised(self) -> tuple[Tensor, Tensor]:
        """Return all images, normalised, and their labels."""
        return normalise(self.pixels.images, self.mean, self.std), self.pixels.labels

    def batch(self, chosen: Tensor, changes: AugmentSettings, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return a batch of images with the random augmentation of the library's training loop, and their labels.

        Args:
            chosen: Indices of the images, from 0.
            changes: Augmentation settings; mixing of images is ignored.
            seed: Seed of the augmentation.
            epoch: Epoch number; the augmentation differs between epochs.
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
    """Return subsets of CIFAR-10, with the normalisation of `experiments.resnet20`.

    Args:
        root: Folder of CIFAR-10.
        train: Subsets of the training images, by name.
        test: Number of test images, in the subset "test".
        held_out: Number of training images to hold out before subsets are taken; None for the library's default, 5,000.
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
    """Return normalised images and labels of `cifar10_images`."""
    return {name: images.normalised() for name, images in cifar10_images(root, train, test, held_out=held_out).items()}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy of a model, between 0 and 1."""
    model.eval()
    with torch.inference_mode():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
        )
    return right / len(images)


def device_of(name: DeviceName) -> torch.device:
    """Return the device of this name; "auto" is CUDA if it is available, otherwise the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def autocast(device: torch.device, *, bf16: bool = False) -> AbstractContextManager[Any]:
    """Return a context manager for bfloat16 autocast, which other devices than CUDA use only if `bf16` is true.

    Devices that would emulate bfloat16 do not use it.
    """
    return evaluation.autocast("bf16" if bf16 or device.type == "cuda" else "32", device)


def percentage(share: float) -> str:
    """Format a share between 0 and 1 as a percentage."""
    return f"{100 * share:.2f} %"


def spread(values: Sequence[float], *, percent: bool = False) -> str:
    """Format the mean and, for several values, the sample standard deviation (of shares, in percentage points)."""
    middle, off = mean(values), stdev(values) if len(values) > 1 else None
    shown = percentage(middle) if percent else f"{middle:.3g}"
    if off is None:
        return shown
    return f"{shown} ± {off * 100:.2f}" if percent else f"{shown} ± {off:.2g}"


def kept(folder: Path, name: str, on: Sequence[Any], make: Callable[[], Any]) -> dict[str, Any]:
    """Return a cached result as plain values; compute and cache it if it is missing.

    Args:
        folder: Cache folder.
        name: Name of the file, without its extension.
        on: JSON values that the result depends on; they are part of the cache key.
        make: Function that computes the result, a dataclass.
    """
    file = kept_file(folder, name, on)
    if not file.is_file():
        result = asdict(make())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(result).encode())
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def kept_file(folder: Path, name: str, on: Sequence[Any]) -> Path:
    """Return the file in which `kept` caches a result."""
    digest = hashlib.sha256(json.dumps(on).encode()).hexdigest()[:12]
    return folder / digest / f"{name.replace(' ', '-')}.json"


def write_results(
    out: Path,
    script: str,
    settings: Any,
    table: str,
    found: Mapping[str, Any],
    *,
    device: torch.device | None = None,
) -> None:
    """Write table.md, and results.json with the settings (only the last component of paths), environment and results.

    Args:
        out: Folder of the results.
        script: Name of the script.
        settings: Settings of the script, a dataclass.
        table: Content of table.md.
        found: Results as plain values.
        device: Device of the computation; None for the CPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    plain = {name: value.name if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    made = environment(["python", "-m", f"experiments.{script}"], torch.device("cpu") if device is None else device)
    record = {"settings": plain, "environment": made, **found}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
