"""Loss and accuracy of a model on an image set."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.data.augmentation import normalise
from attnconv.data.batches import Batch, Batches
from attnconv.data.image_set import ImageSet
from attnconv.training.processes import local_rank
from attnconv.training.settings import AcceleratorName, PrecisionName


@dataclass(frozen=True)
class Score:
    """What a model reaches on a set of images.

    Attributes:
        loss: mean cross-entropy, without label smoothing.
        accuracy: part of the images whose class has the largest logit.
        images: how many were looked at.
    """

    loss: float
    accuracy: float
    images: int


def tally(logits: Float[Tensor, "b classes"], labels: Int64[Tensor, " b"]) -> Float[Tensor, " 3"]:
    """Sum of the losses, number of right answers and number of images of a batch; tallies of batches add up.

    Example:
        >>> tally(torch.tensor([[0.0, 50.0], [0.0, 50.0]]), torch.tensor([1, 0])).tolist()
        [50.0, 1.0, 2.0]
    """
    exact = _exact(logits.device)
    losses = F.cross_entropy(logits.to(exact), labels, reduction="sum")
    right = (logits.argmax(1) == labels).sum().to(exact)
    return torch.stack([losses, right, torch.full_like(losses, len(labels))])


def zero_tally(device: torch.device) -> Float[Tensor, " 3"]:
    """The tally of no images."""
    return torch.zeros(3, dtype=_exact(device), device=device)


def score(sums: Float[Tensor, " 3"]) -> Score:
    """The score that a tally of a whole set stands for.

    Raises:
        ValueError: if the tally is of no image.
    """
    loss, right, count = (float(value) for value in sums)
    if count == 0:
        raise ValueError(bad("images", "must hold at least one image to measure", "none"))
    return Score(loss / count, right / count, int(count))


def evaluate(
    model: nn.Module,
    images: ImageSet,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 500,
    precision: PrecisionName = "32",
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], None] | None = None,
) -> Score:
    """Measure a model on a set of images. The model is moved to the device and left in evaluation mode.

    Args:
        model: normalised images (b, c, height, width) to logits (b, classes).
        images: at least one.
        mean: of each channel in the training set, for images in [0, 1].
        std: deviation of each channel, likewise.
        batch_size: images at once, at least 1.
        precision: as in training.
        device: where to compute.
        on_batch: called with the number of images done so far.

    Raises:
        ValueError: if there is no image, or the images or their classes do not fit the model.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> black = ImageSet(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]))
        >>> evaluate(model, black, mean=(0.5,), std=(0.5,)).images
        3
    """
    if images.channels != len(mean):
        raise ValueError(bad("images", f"must have the model's {len(mean)} channels", images.channels))
    device = torch.device(device)
    model.to(device=device, dtype=dtype_of(precision))
    sums = tally_batches(
        model,
        Batches(images, batch_size=batch_size),
        mean=mean,
        std=std,
        precision=precision,
        device=device,
        largest=int(images.labels.max()) if len(images) else 0,
        on_batch=on_batch,
    )
    return score(sums)


def tally_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    precision: PrecisionName,
    device: torch.device,
    largest: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> Float[Tensor, " 3"]:
    """The tally of all batches, by a model that is on the device; nothing waits for the device.

    The arguments are those of ``evaluate``, and ``largest`` is a label that the model may turn out not to have.
    """
    model.eval()
    sums, done = zero_tally(device), 0
    with torch.inference_mode(), autocast(precision, device):
        for batch in batches:
            batch = batch.to(device)
            logits = _logits(model, normalise(batch.images, mean, std).to(dtype_of(precision)))
            if largest >= logits.shape[1]:
                requirement = f"must be of the model's {logits.shape[1]} classes"
                raise ValueError(bad("images", requirement, f"an image of class {largest}"))
            sums += tally(logits, batch.labels)
            done += len(batch.labels)
            if on_batch is not None:
                on_batch(done)
    return sums


def _logits(model: nn.Module, pixels: Tensor) -> Tensor:
    try:
        logits: object = model(pixels)
    except RuntimeError as error:  # the one way in which torch's layers refuse shapes
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            bad("images", "must fit the model", f"{tuple(pixels.shape[1:])}", f"It says: {reason}.")
        ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(bad("model", "must give logits (b, classes)", got))
    return logits


def device_of(accelerator: AcceleratorName) -> torch.device:
    """The device of this process for an accelerator's name; auto takes a GPU if there is one."""
    if accelerator == "auto":
        other: AcceleratorName = "mps" if torch.backends.mps.is_available() else "cpu"
        accelerator = "cuda" if torch.cuda.is_available() else other
    return torch.device("cuda", local_rank()) if accelerator == "cuda" else torch.device(accelerator)


def dtype_of(precision: PrecisionName) -> torch.dtype:
    """Of a model's parameters, and of the images that it is given."""
    return torch.float64 if precision == "64" else torch.float32


def autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model of this precision computes."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def _exact(device: torch.device) -> torch.dtype:
    """Of sums over many images."""
    return torch.float32 if device.type == "mps" else torch.float64
