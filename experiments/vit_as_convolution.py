"""Convolutions in place of the heads of a small ViT on CIFAR-10, with kernels of several sizes.

Models are trained with several seeds. In each of them, k of the heads are replaced with K x K kernels by
`replace_heads`, for several k and K, and accuracy, output error and time are measured. Then the attention between the
tokens of the image is replaced with the nearest matrix with a structure:

    Toeplitz     A[q, k] depends only on the shift k - q: a convolution with zero padding
    circulant    A[q, k] depends only on the shift modulo the size of the grid: a convolution with circular padding
                 (block circulant with circulant blocks), as in circulant attention (Han et al., AAAI 2026)

each of them computed for every image, or once for all images of a batch.

    python -m experiments.vit_as_convolution --root PATH/TO/CIFAR --out results/NAME

Trained models are kept and not trained again. To share the work between processes, let each of them first train
different seeds, for example with `--seeds 1 --no-measure`. `--seeds` without values only measures times by image size.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from attnconv.inspect.capture import changing_attention
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator
from attnconv.surgery import Replacement, replace_heads
from attnconv.surgery.convolved_attention import convolved_by_fft, convolved_directly
from experiments.common import accuracy, cifar10, kept, percentage, spread, write_results
from experiments.small_vit import SmallViT

Sets: TypeAlias = dict[str, tuple[Tensor, Tensor]]
KernelSizes: TypeAlias = tuple[int | Literal["full"], ...]


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    kept: Path = Path("runs/vit-as-convolution")
    """Folder of trained models; use a separate folder for other settings."""
    width: int = 90
    """Number of channels."""
    heads: int = 9
    """Number of heads per layer."""
    depth: int = 4
    """Number of layers."""
    images: int = 50_000
    """Number of training images."""
    test_images: int = 10_000
    """Number of test images."""
    fit_images: int = 256
    """Number of training images for fitting kernels; a quarter of them is held out to measure errors."""
    epochs: int = 5
    """Number of epochs."""
    tuning_epochs: int = 1
    """Number of epochs of fine-tuning after all heads are replaced; 0 for none."""
    batch_size: int = 125
    """Batch size."""
    rate: float = 1e-3
    """Learning rate (AdamW, cosine decay to zero after warm-up for 5 % of the steps)."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    counts: tuple[int, ...] = (18, 27, 36)
    """Numbers of heads to replace."""
    kernel_sizes: KernelSizes = (3, 5, "full")
    """Kernel sizes: each of them in all layers, and the one that each layer chooses."""
    grids: tuple[int, ...] = (8, 16, 24, 32)
    """Tokens along each axis of the images for which times are measured."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the models."""
    measure: bool = True
    """Replace heads and write the tables after training."""


@dataclass(frozen=True)
class Row:
    """Measurements of a model with replaced heads. Without fine-tuning, `tuned` is None."""

    seed: int
    kernel: str
    heads: int
    kernel_sizes: dict[str, int]
    """Kernel size of each layer with replaced heads."""
    output_error: float
    accuracy: float
    tuned: float | None


@dataclass(frozen=True)
class Structure:
    """Accuracy of a model with the nearest Toeplitz or circulant matrices, and the share of energy that they keep."""

    seed: int
    structure: str
    shared: bool
    energy: float
    accuracy: float


def main(settings: Settings) -> None:
    """Train models, replace heads and compare; print and write the tables."""
    torch.set_flush_denormal(True)
    sets = cifar10(settings.root, {"train": slice(settings.images)}, settings.test_images)
    rows: list[dict[str, Any]] = []
    structures: list[dict[str, Any]] = []
    for seed in settings.seeds:
        model = trained_model(seed, sets, settings)
        if settings.measure:
            names = {"root", "out", "kept", "grids", "seeds", "measure"}
            on = [{name: value for name, value in vars(settings).items() if name not in names}]
            for kernel, count in replacements(settings):
                measure = partial(measured, model, seed, kernel, count, sets, settings)
                rows.append(kept(settings.kept, f"{seed} {kernel} {count}", on, measure))
            for structure, shared in product(("Toeplitz", "circulant"), (False, True)):
                name = f"{seed} {structure} {'shared' if shared else 'single'}"
                project = partial(structured, model, seed, structure, shared, sets)
                structures.append(kept(settings.kept, name, on, project))
    if not settings.measure:
        return
    for seed in settings.seeds:  # at the end, when other processes have finished
        model = trained_model(seed, sets, settings)
        for row in rows:
            if row["seed"] == seed:
                changed = replace_some(model, row["kernel"], row["heads"], sets, settings).model
                row["time"] = time_ratio(changed.eval(), model.eval(), sets["test"][0][:100])
    times = list(measured_times(settings))
    text = "\n\n".join((heads_table(rows), times_table(times), structures_table(structures)))
    print(text)
    if settings.out is not None:
        found = {"heads": rows, "times": times, "structures": structures}
        write_results(settings.out, "vit_as_convolution", settings, text, found)


def trained_model(seed: int, sets: Sets, settings: Settings) -> SmallViT:
    """Return a trained model; train it if it is not in the folder."""
    file = settings.kept / f"{seed}.pt"
    torch.manual_seed(seed)
    model = SmallViT(dim=settings.width, depth=settings.depth, num_heads=settings.heads)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        train(model, *sets["train"], settings, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    print(f"seed {seed}: {percentage(accuracy(model, *sets['test']))}", flush=True)
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings, seed: int) -> None:
    """Train with AdamW and augmentation (random crops with 4 pixels of padding, and flips)."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    each = len(images) // settings.batch_size
    steps = max(1, settings.epochs * each)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.rate, total_steps=steps + 1, pct_start=0.05, cycle_momentum=False
    )
    model.train()
    for _ in range(settings.epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: each * settings.batch_size].split(settings.batch_size):
            loss = F.cross_entropy(model(augmented(images[chosen], generator)), labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels with zero padding, and flip it with probability 1/2."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4,) * 4)
    down, right = torch.randint(0, 9, (2, count), generator=generator)
    rows = down[:, None] + torch.arange(height)
    mirrored = torch.rand(count, generator=generator)[:, None] < 0.5
    across = torch.arange(width)
    columns = right[:, None] + torch.where(mirrored, across.flip(0), across)
    taken = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2).contiguous()


def kernels(sizes: KernelSizes, *, together: bool = True) -> dict[str, Any]:
    """Return values of `kernel_size`, by their names in the tables; with `together`, also all sizes in one call."""
    found: dict[str, Any] = {"all shifts" if size == "full" else f"{size} x {size}": size for size in sizes}
    return {**found, "chosen by layer": sizes} if together else found


def replacements(settings: Settings) -> list[tuple[str, int]]:
    """Return the names of kernel sizes and the numbers of heads that are replaced."""
    return [("-", 0), *product(kernels(settings.kernel_sizes), settings.counts)]


def replace_some(model: nn.Module, kernel: str, count: int, sets: Sets, settings: Settings) -> Replacement[nn.Module]:
    """Replace heads of a trained model."""
    size = kernels(settings.kernel_sizes).get(kernel, 3)
    return replace_heads(model, sets["train"][0][: settings.fit_images], count=count, kernel_size=size)


def measured(model: nn.Module, seed: int, kernel: str, count: int, sets: Sets, settings: Settings) -> Row:
    """Replace heads of a trained model, and measure accuracy before and after fine-tuning."""
    found = replace_some(model, kernel, count, sets, settings)
    layers = {entry.layer: entry.kernel_size for entry in found.replaced}
    before, tuned = accuracy(found.model, *sets["test"]), None
    if settings.tuning_epochs > 0 and count in (0, max(settings.counts)):
        tuning = replace(settings, epochs=settings.tuning_epochs, rate=settings.rate / 10)
        train(found.model, *sets["train"], tuning, seed)
        tuned = accuracy(found.model, *sets["test"])
    row = Row(seed, kernel, count, layers, found.output_error, before, tuned)
    print(row, flush=True)
    return row


@torch.inference_mode()
def time_ratio(new: Callable[[Tensor], Tensor], old: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Return the median over rounds of the time of the new model divided by that of the old one."""
    ratios = []
    for _ in range(10):
        times = []
        for model in (new, old):
            start = time.perf_counter()
            model(images)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return median(ratios[1:])


def measured_times(settings: Settings) -> Iterator[dict[str, Any]]:
    """Measure models of one layer on images of several sizes: with all heads replaced, relative to attention.

    For the kernel "FFT", measure a convolution with all shifts by FFT, relative to a direct convolution.
    """
    sizes = kernels(settings.kernel_sizes, together=False)
    for grid, kernel in product(settings.grids, sizes):
        torch.manual_seed(0)
        model = SmallViT(size=4 * grid, dim=settings.width, depth=1, num_heads=settings.heads)
        images = torch.randn(max(4, 6400 // grid**2), 3, 4 * grid, 4 * grid)
        found = replace_heads(model, images[:4], count=settings.heads, kernel_size=sizes[kernel])
        yield {"grid": grid, "kernel": kernel, "time": time_ratio(found.model.eval(), model.eval(), images)}
    for grid in settings.grids:
        values = torch.randn(max(4, 6400 // grid**2), settings.width, grid, grid)
        values = values.to(memory_format=torch.channels_last)  # as in replaced heads, where tokens come first
        kernel = torch.randn(settings.heads, 2 * grid - 1, 2 * grid - 1)
        fft, direct = (partial(method, kernels=kernel) for method in (convolved_by_fft, convolved_directly))
        torch.testing.assert_close(fft(values), direct(values), rtol=1e-3, atol=1e-3)
        yield {"grid": grid, "kernel": "FFT", "time": time_ratio(fft, direct, values)}


def structured(model: nn.Module, seed: int, structure: str, shared: bool, sets: Sets) -> Structure:
    """Replace the attention of all heads with the nearest Toeplitz or circulant matrix, and measure the accuracy."""
    energies: list[tuple[float, float]] = []
    change = partial(nearest, circulant=structure == "circulant", shared=shared, energies=energies)
    with changing_attention(model, change, grid=None, prefix=None, layers=None):
        found = accuracy(model, *sets["test"])
    row = Structure(seed, structure, shared, sum(k for k, _ in energies) / sum(w for _, w in energies), found)
    print(row, flush=True)
    return row


def nearest(
    _name: str, operator: AttentionOperator, *, circulant: bool, shared: bool, energies: list[tuple[float, float]]
) -> Tensor:
    """Return attention with the nearest Toeplitz or circulant matrix between the tokens of the image."""
    assert isinstance(operator, TokenOperator)
    height, width = operator.grid.sizes
    rows, start = operator.token_rows(), operator.prefix
    image = rows[:, start:, start:]
    down, right = (torch.arange(n)[None] - torch.arange(n)[:, None] for n in (height, width))  # from query to key
    down, right = (down % height, right % width) if circulant else (down + height - 1, right + width - 1)
    classes = (down[:, None, :, None] * 2 * width + right[None, :, None]).flatten()
    maps = image.flatten(1).unflatten(0, (-1, operator.heads))  # (b, h, n n)
    maps = maps.mean(0, keepdim=True) if shared else maps
    sums = maps.new_zeros(*maps.shape[:2], int(classes.max()) + 1).index_add(2, classes, maps)
    made = (sums / classes.bincount())[..., classes].expand(operator.batch, -1, -1).reshape(image.shape)
    energies.append((float(made.square().sum()), float(image.square().sum())))
    rows = rows.clone()
    rows[:, start:, start:] = made
    return rows


def heads_table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table of replaced heads, with mean and standard deviation over seeds."""
    lines = [
        "| kernel | heads replaced | output error | accuracy | fine-tuned | time relative to the original |",
        "|---|---|---|---|---|---|",
    ]
    for kernel, count in dict.fromkeys((row["kernel"], row["heads"]) for row in rows):
        some = [row for row in rows if (row["kernel"], row["heads"]) == (kernel, count)]
        tuned = [row["tuned"] for row in some if row["tuned"] is not None]
        columns = (
            kernel,
            str(count),
            spread([row["output_error"] for row in some]),
            spread([row["accuracy"] for row in some], percent=True),
            spread(tuned, percent=True) if tuned else "-",
            spread([row["time"] for row in some]),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def times_table(times: list[dict[str, Any]]) -> str:
    """Return the Markdown table of times, one row for each grid."""
    names = list(dict.fromkeys(entry["kernel"] for entry in times))
    lines = [f"| tokens | {' | '.join(names)} relative to direct convolution |", "|---" * (len(names) + 1) + "|"]
    for grid in dict.fromkeys(entry["grid"] for entry in times):
        found = {entry["kernel"]: entry["time"] for entry in times if entry["grid"] == grid}
        lines.append(f"| {grid} x {grid} | {' | '.join(f'{found[name]:.2f}' for name in names)} |")
    return "\n".join(lines)


def structures_table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table of structures, with mean and standard deviation over seeds."""
    lines = ["| nearest matrix | computed | share of energy | accuracy |", "|---|---|---|---|"]
    for name, shared in dict.fromkeys((row["structure"], row["shared"]) for row in rows):
        some = [row for row in rows if (row["structure"], row["shared"]) == (name, shared)]
        scope = "for all images of a batch" if shared else "for each image"
        energy, found = (spread([row[key] for row in some], percent=True) for key in ("energy", "accuracy"))
        lines.append(f"| {name} | {scope} | {energy} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
