"""Loss and accuracy of a model on an image set."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.processes import local_rank
from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Batch, Batches, ImageSet
from attnconv.training.settings import AcceleratorName, PrecisionName


@dataclass(frozen=True)
class Metrics:
    """Loss and accuracy of a model on a set of images.

    Attributes:
        loss: Mean cross-entropy, without label smoothing.
        accuracy: Fraction of correctly classified images.
        images: Number of images.
    """

    loss: float
    accuracy: float
    images: int


def tally(logits: Float[Tensor, "b classes"], labels: Int64[Tensor, " b"]) -> Float[Tensor, " 3"]:
    """Return the summed loss, the number of correct predictions and the number of images of a batch."""
    exact = zero_tally(logits.device).dtype
    losses = F.cross_entropy(logits.to(exact), labels, reduction="sum")
    right = (logits.argmax(1) == labels).sum().to(exact)
    return torch.stack([losses, right, torch.full_like(losses, len(labels))])


def zero_tally(device: torch.device) -> Float[Tensor, " 3"]:
    """Return the tally of an empty batch."""
    return torch.zeros(3, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def metrics_of(sums: Float[Tensor, " 3"]) -> Metrics:
    """Compute the metrics of a set from its tally."""
    loss, right, count = (float(value) for value in sums)
    if count == 0:
        raise ValueError(bad("images", "must contain at least one image", "none"))
    return Metrics(loss / count, right / count, int(count))


def evaluate(
    model: nn.Module,
    images: ImageSet,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 500,
    precision: PrecisionName = "32",
    device: torch.device | str = "cpu",
) -> Metrics:
    """Evaluate a model, which is moved to `device`, cast to float32 (float64 for "64") and left in evaluation mode.

    Args:
        model: Module that maps normalised images, (b, c, height, width), to logits, (b, classes).
        images: Images to evaluate on, at least one.
        mean: Mean of each channel in the training set, for pixels scaled to [0, 1].
        std: Standard deviation of each channel in the training set, for pixels scaled to [0, 1].
        batch_size: Images per batch, at least 1.
        precision: "32", "bf16" or "64", as in `TrainSettings`.
        device: Device to compute on.

    Raises:
        ValueError: If there are no images, or the model cannot process them or has fewer classes than the labels.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> black = ImageSet(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]))
        >>> evaluate(model, black, mean=(0.5,), std=(0.5,)).images
        3
    """
    if images.channels != len(mean):
        raise ValueError(bad("images", f"must have one channel per value of `mean` ({len(mean)})", images.channels))
    device = torch.device(device)
    model.to(device=device, dtype=dtype_of(precision))
    largest = int(images.labels.max()) if len(images) else 0
    batches = Batches(images, batch_size=batch_size)
    sums = tally_batches(model, batches, mean=mean, std=std, precision=precision, device=device, largest=largest)
    return metrics_of(sums)


def tally_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    precision: PrecisionName,
    device: torch.device,
    largest: int = 0,
) -> Float[Tensor, " 3"]:
    """Sum the tallies of all batches for a model on the device, without synchronising with the device.

    `largest` is the largest label; the model must have more classes than that.
    """
    model.eval()
    sums = zero_tally(device)
    with torch.inference_mode(), autocast(precision, device):
        for batch in batches:
            batch = batch.to(device)
            logits = _logits(model, normalise(batch.images, mean, std).to(dtype_of(precision)))
            if largest >= logits.shape[1]:
                requirement = f"must have labels below {logits.shape[1]}, the model's number of classes"
                raise ValueError(bad("images", requirement, largest))
            sums += tally(logits, batch.labels)
    return sums


def _logits(model: nn.Module, pixels: Tensor) -> Tensor:
    try:
        logits: object = model(pixels)
    except RuntimeError as error:  # raised by torch for wrong shapes
        reason = str(error).partition("\n")[0].rstrip(".")
        got, fix = f"shape {tuple(pixels.shape[1:])}", f"The model raised: {reason}."
        message = bad("images", "must have a shape that the model accepts", got, fix)
        raise ValueError(message) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(bad("model", "must return logits (b, classes)", got))
    return logits


def device_of(accelerator: AcceleratorName) -> torch.device:
    """Return the device of this process for an accelerator; `auto` selects a GPU if there is one."""
    if accelerator == "auto":
        other: AcceleratorName = "mps" if torch.backends.mps.is_available() else "cpu"
        accelerator = "cuda" if torch.cuda.is_available() else other
    return torch.device("cuda", local_rank()) if accelerator == "cuda" else torch.device(accelerator)


def dtype_of(precision: PrecisionName) -> torch.dtype:
    """Return the dtype of parameters and images for a precision."""
    return torch.float64 if precision == "64" else torch.float32


def autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager for a forward pass with a precision."""
    return torch.autocast(device.type, torch.bfloat16) if on_device(precision, device) == "bf16" else nullcontext()


def on_device(precision: PrecisionName, device: torch.device) -> PrecisionName:
    """Return the precision that is used on a device: 32 instead of bf16 if the device would emulate bfloat16.

    An emulated training step of `quadratic-small` took 12 times as long as in float32 on a CPU with AVX2 only.
    """
    if precision != "bf16":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "32"
    return "bf16" if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512" else "32"
