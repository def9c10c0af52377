"""Write the trained models that the explorer's page shows: python docs/write_models.py CIFAR_FOLDER.

The quadratic model becomes the example in the package, and the other models are stored in `docs/models`. They show the
first CIFAR-10 test image of each class, and the first two test images that all models classify wrongly. The page itself
is written by `docs/write_page.py`, which does not need CIFAR-10.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attnconv import load
from attnconv._util.atomic_write import write_atomically
from attnconv.data import DataSettings, load_data, normalise
from attnconv.explorer import Pictures, payload, snapshots_of
from attnconv.training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
RUNS, MODELS = ROOT / "results", ROOT / "docs" / "models"
EXAMPLE = ROOT / "src" / "attnconv" / "explorer" / "example.safetensors"
LARGEST = 1_400_000  # bytes of a payload
CANDIDATES = 500  # test images among which images are chosen


@dataclass(frozen=True)
class Shown:
    """A model of the page: its file, run and title, the number of its images, and its budget per image in bytes."""

    file: Path
    run: str
    title: str
    images: int = 12
    budget: int = 3_500_000


SHOWN = (
    Shown(EXAMPLE, "paper-small/runs/quadratic", "Quadratic encoding"),
    Shown(MODELS / "learned.safetensors", "paper-small/runs/learned", "Learned encoding"),
    Shown(
        MODELS / "learned-content.safetensors",
        "paper-mini/runs/learned-content",
        "Learned encoding with content",
        images=4,
        budget=330_000,
    ),
)


def main(cifar: str) -> None:
    """Write all payloads."""
    data = load_data(DataSettings("cifar10", root=cifar, download=False))
    pixels, labels = data.test.images[:CANDIDATES], data.test.labels[:CANDIDATES]
    images = normalise(pixels, data.mean, data.std)
    models = [load(RUNS / shown.run).model.float() for shown in SHOWN]
    chosen = choose(models, images, labels)
    for shown, model in zip(SHOWN, models, strict=True):
        some = chosen[: shown.images]
        pictures = Pictures(
            pixels[some].movedim(1, -1).contiguous(),
            tuple(f"test image {index}" for index in some.tolist()),
            tuple(data.classes[label] for label in labels[some].tolist()),
        )
        content = payload(
            model,
            images[some],
            title=shown.title,
            pictures=pictures,
            snapshots=snapshots_of(RunFolder(RUNS / shown.run)),
            budget=shown.budget,
            classes=data.classes,
            ablations=True,
        )
        if len(content) > LARGEST:
            raise ValueError(
                f"{shown.file.name}: must have at most {LARGEST:,} bytes, got {len(content):,}. Lower `budget`."
            )
        shown.file.parent.mkdir(exist_ok=True)
        write_atomically(shown.file, content)
        print(f"{shown.file.relative_to(ROOT)}: {len(content):,} bytes")


@torch.no_grad()
def choose(models: list[nn.Module], images: Tensor, labels: Tensor) -> Tensor:
    """Return the first image of each class, and the first two that all models classify wrongly."""
    firsts = [int((labels == label).nonzero()[0]) for label in labels.unique()]
    wrong = torch.stack([model(images).argmax(-1) != labels for model in models]).all(0).nonzero().flatten().tolist()
    return torch.tensor(firsts + [index for index in wrong if index not in firsts][:2])


if __name__ == "__main__":
    main(sys.argv[1])
