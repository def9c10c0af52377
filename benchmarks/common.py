"""What several of these scripts do: CIFAR-10 as tensors, its augmentation, accuracy, and a folder of results."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv.data.load import load as load_data
from attnconv.data.settings import DataSettings
from attnconv.training.environment import environment
from tests.resnet20 import MEAN, STD

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]


def cifar10(
    root: Path, train: Mapping[str, slice], test: int, *, held_out: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images and classes.

    Args:
        root: Folder of CIFAR-10.
        train: Name -> which of the training images.
        test: How many test images; they go by the name "test".
        held_out: Training images left out before; None for the library's 5,000.
    """
    data = load_data(DataSettings(name="cifar10", root=str(root), download=False, validation=held_out))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    parts = {name: (data.train, chosen) for name, chosen in train.items()} | {"test": (data.test, slice(test))}
    return {
        name: ((part.images[chosen].float() / 255 - mean) / std, part.labels[chosen].long())
        for name, (part, chosen) in parts.items()
    }


def augmented(images: Tensor, generator: torch.Generator, *, padding: int = 4, mirror_part: float = 0.5) -> Tensor:
    """Each image shifted over zeros, by up to four pixels unless said otherwise, and every second one mirrored."""
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    down, right = torch.randint(0, 2 * padding + 1, (2, count), generator=generator)
    rows = down[:, None] + torch.arange(height)
    mirrored = torch.rand(count, generator=generator)[:, None] < mirror_part
    across = torch.arange(width)
    columns = right[:, None] + torch.where(mirrored, across.flip(0), across)
    taken = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2).contiguous()


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
    made = environment(["python", "-m", f"benchmarks.{script}"], torch.device("cpu") if device is None else device)
    record = {"settings": plain, "environment": made, **found}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
