"""Images to compare two networks on, and the table of the comparison, for `prove` and `recast`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnconv._util.errors import bad
from attnconv.cli.image_inputs import own_size
from attnconv.cli.output import print_table, print_text

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.convert import Comparison
    from attnconv.models.model_loader import LoadedModel


def example_images(loaded: "LoadedModel", pictures: Sequence[Path], size: int | None, *, flag: str) -> "Tensor":
    """Read pictures in the model's format, or draw one image of noise; `size` None is the model's own, or 224.

    `flag` is the name of the pictures on the command line.
    """
    import torch

    from attnconv.data.augmentation import normalise
    from attnconv.data.image_decoding import read_image
    from attnconv.theory.conv_taps import is_convolution

    pixels = own_size(loaded)[0] if size is None else size
    first = next((module for module in loaded.model.modules() if is_convolution(module)), None)
    dims = 2 if first is None else len(first.kernel_size)
    channels = 3 if first is None else first.in_channels
    dtype = next(loaded.model.parameters()).dtype
    if not pictures:
        sizes = (pixels,) * dims
        return torch.randn(1, channels, *sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dims != 2 or channels not in (1, 3):
        got = f"{dims} axes and {channels} channels"
        raise ValueError(bad(flag, "are for networks of grey or RGB images", got, "Leave them out: noise does."))
    if missing := [str(path) for path in pictures if not path.is_file()]:
        raise ValueError(bad(flag, "must name image files", ", ".join(missing)))
    images = torch.stack([read_image(path, pixels, channels=channels) for path in pictures])
    mean, std = loaded.mean or (0.5,) * channels, loaded.std or (0.5,) * channels
    return normalise(images, mean, std).to(dtype)


def print_comparison(found: "Comparison", title: str) -> None:
    """Print one row per layer, and the difference of the network's output."""
    columns = ("layer", "heads", "alpha", "output", "difference", "bound", "FLOPs", "attention")
    rows = []
    for row in found.layers:
        alpha, bound = ("" if value is None else f"{value:.3g}" for value in (row.alpha, row.bound))
        numbers = (f"{row.scale:.3g}", f"{row.error:.1e}", bound, _flops(row.flops), _flops(row.attention_flops))
        rows.append((row.name or "(the model)", str(row.heads), alpha, *numbers))
    print_table(title, columns, rows)
    print_text("output, difference: largest absolute values; FLOPs: of the convolution, and as attention.")
    relative = found.error / found.scale if found.scale else 0.0
    outputs = f"of outputs up to {found.scale:.3g} ({relative:.1e} relative)"
    print_text(f"Network: largest difference {found.error:.1e} {outputs}.")


def _flops(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
