"""Small CNN for CIFAR-10 that trains in seconds, with its training loop.

It uses published techniques for fast CIFAR-10 training. The first convolution is frozen: its filters are the whitened
principal directions of the 2 x 2 patches of the training images, and their negatives. Three stages of convolution,
pooling, batch norm and GELU follow, with the scale of norms fixed at 1. Training uses SGD with Nesterov momentum and a
triangular learning rate, a larger learning rate and no weight decay for the biases of norms, label smoothing,
horizontal flips that alternate between epochs, and a moving average of the weights (Lookahead). Optionally, a small
network (the proxy), which is trained on some of the batches, selects the images of each batch with the largest loss.

All learned mixing of positions is by convolutions, so a recast network mixes positions only by attention (and pooling).
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv.layers import SelfAttention
from attnconv.training.run_recorder import read_state, save_state
from experiments.common import autocast

PATCH = 2  # side of the whitened patches in pixels
LOGIT_SCALE = 1 / 9
PROXY_EVERY = 4  # number of steps between training steps of the proxy
LEAST_VARIANCE = 5e-4  # added to the variance of patches, since the last directions are noise


@dataclass(frozen=True)
class FastSettings:
    """Settings of the network and its training."""

    widths: tuple[int, int, int] = (64, 256, 256)
    """Number of channels of the three stages."""
    depth: int = 2
    """Number of convolutions per stage. With more than two, a residual connection skips all but the first."""
    epochs: int = 12
    """Number of epochs."""
    batch_size: int = 1024
    """Batch size."""
    rate: float = 1.5
    """Peak learning rate for the mean loss."""
    bias_rate: float = 64.0
    """Learning rate of the biases of norms, relative to `rate`."""
    position_rate: float = 0.2
    """Learning rate of the centres and spreads of attention heads, which have no weight decay."""
    momentum: float = 0.85
    """Nesterov momentum of SGD."""
    weight_decay: float = 1.3e-3
    """Weight decay; not applied to the biases of norms."""
    peak: float = 0.23
    """Progress of training, from 0 to 1, at which the learning rate is highest."""
    end: float = 0.07
    """Last learning rate, relative to `rate`."""
    norm_momentum: float = 0.4
    """Share of the current batch in the running statistics of norms."""
    smoothing: float = 0.2
    """Label smoothing."""
    shift: int = 2
    """Maximum random shift of images in pixels, with reflect padding."""
    cutout: int = 0
    """Side of the square that is set to zero in each image, in pixels."""
    whitening_epochs: int = 3
    """Number of epochs in which the bias of the whitening layer is trained."""
    slow_every: int = 5
    """Number of steps between updates of the averaged weights."""
    hardest: int | None = None
    """Number of images that the proxy selects from each batch; None to train on all images, without a proxy."""
    proxy_widths: tuple[int, int, int] = (32, 64, 64)
    """Number of channels of the three stages of the proxy, which has two convolutions per stage."""
    bf16: bool = True
    """Train with bf16 matrix products on every device; otherwise only on CUDA."""


@dataclass
class Log:
    """Measurements of a training, one per epoch."""

    loss: list[float] = field(default_factory=list)
    """Mean training loss, of the selected images only."""
    seconds: list[float] = field(default_factory=list)


@final
class FastNet(nn.Module):
    """Network of a whitening layer, three stages and a linear layer.

    Args:
        widths: Number of channels of each stage.
        depth: Number of convolutions per stage. With more than two, a residual connection skips all but the first.
        norm_momentum: Share of the current batch in the running statistics of norms.
        classes: Number of classes.
    """

    def __init__(
        self, widths: tuple[int, int, int], *, depth: int = 2, norm_momentum: float = 0.4, classes: int = 10
    ) -> None:
        super().__init__()
        given = 2 * 3 * PATCH**2
        self.whiten = nn.Conv2d(3, given, PATCH)
        self.whiten.weight.requires_grad = False
        nn.init.zeros_(self.bias_of_whitening)
        stages: list[nn.Module] = []
        for width in widths:
            stages.append(stage(given, width, depth, norm_momentum))
            given = width
        self.stages = nn.Sequential(*stages)
        self.pool = nn.MaxPool2d(3)
        self.out = nn.Linear(given, classes, bias=False)

    @property
    def bias_of_whitening(self) -> Tensor:
        """Bias of the first layer."""
        assert self.whiten.bias is not None
        return self.whiten.bias

    def forward(self, x: Float[Tensor, "b 3 32 32"]) -> Float[Tensor, "b classes"]:
        """Return the logits."""
        x = self.stages(F.gelu(self.whiten(x)))
        return self.out(self.pool(x).flatten(1)) * LOGIT_SCALE


@final
class Residual(nn.Module):
    """Sum of the input and a module's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return x + inner(x)."""
        out: Tensor = x + self.inner(x)
        return out


def stage(given: int, made: int, depth: int, norm_momentum: float) -> nn.Sequential:
    """Return a stage of convolution, pooling, norm and GELU, then further convolutions with norm and GELU.

    With more than two convolutions, the input of the second is added before the last GELU. Convolutions are initialised
    to copy their first channels: their leading square block is the identity.
    """
    first, rest = [], []
    for number in range(depth):
        conv = nn.Conv2d(given if number == 0 else made, made, 3, padding=1, bias=False)
        with torch.no_grad():
            nn.init.dirac_(conv.weight[: conv.in_channels])
        norm = nn.BatchNorm2d(made, momentum=norm_momentum)
        norm.weight.requires_grad = False
        if number == 0:
            first = [conv, nn.MaxPool2d(2), norm, nn.GELU()]
        else:
            rest += [conv, norm, nn.GELU()]
    if depth > 2:
        rest = [Residual(nn.Sequential(*rest[:-1])), nn.GELU()]
    return nn.Sequential(*first, *rest)


@torch.no_grad()
def whiten(net: FastNet, images: Float[Tensor, "n 3 height width"]) -> None:
    """Set the filters of the first layer from the covariance of patches of the first 5,000 images.

    With the covariance C = E diag(v) E^T of patches, the filters are the rows of diag(v + eps)^-1/2 E^T and their
    negatives. The covariance of the outputs of the rows is the identity, up to eps.

    Args:
        net: Network to change.
        images: Normalised images.
    """
    patches = F.unfold(images[:5_000], PATCH).transpose(1, 2).flatten(0, 1).double()  # (n places, 3 * 4)
    values, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (directions / (values + LEAST_VARIANCE).sqrt()).T.reshape(-1, *net.whiten.weight.shape[1:])
    net.whiten.weight.copy_(torch.cat([filters, -filters]))


def triangular(part: float, *, peak: float = 0.23, end: float = 0.07) -> float:
    """Return the learning rate factor of a linear warm-up from 0.2 followed by a linear decay.

    Args:
        part: Progress of training, 0 to 1.
        peak: Progress at which the factor is 1.
        end: Factor at the end.

    Example:
        >>> [round(triangular(part), 2) for part in (0, 0.23, 1)]
        [0.2, 1.0, 0.07]
    """
    if part < peak:
        return 0.2 + 0.8 * part / peak
    return 1 + (end - 1) * (part - peak) / (1 - peak)


def batches(
    images: Tensor, labels: Tensor, settings: FastSettings, *, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled and augmented batches of an epoch, (images, labels).

    Whether an image is flipped is random in the first epoch and then alternates, so two successive epochs use both
    versions of every image.
    """
    mirrored = torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) < 0.5
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    padded = F.pad(images, (settings.shift,) * 4, mode="reflect")
    size = min(settings.batch_size, len(images))
    order = torch.randperm(len(images), generator=generator)[: len(images) // size * size]
    for chosen in order.split(size):
        taken = shifted(padded[chosen], settings.shift, images.shape[-2:], generator)
        flip = (mirrored[chosen] ^ bool(epoch % 2)).to(taken.device)
        taken = torch.where(flip[:, None, None, None], taken.flip(-1), taken)
        yield blanked(taken, settings.cutout, generator) if settings.cutout else taken, labels[chosen]


def shifted(padded: Tensor, reach: int, size: torch.Size, generator: torch.Generator) -> Tensor:
    """Return a random crop of each padded image."""
    down, right = torch.randint(0, 2 * reach + 1, (2, len(padded)), generator=generator)
    rows = (down[:, None] + torch.arange(size[0]))[:, :, None]
    columns = (right[:, None] + torch.arange(size[1]))[:, None, :]
    return padded[torch.arange(len(padded))[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


def blanked(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Set a random square inside each image to zero."""
    height, width = images.shape[-2:]
    top = torch.randint(0, height - side + 1, (len(images), 1), generator=generator)
    left = torch.randint(0, width - side + 1, (len(images), 1), generator=generator)
    rows, columns = torch.arange(height) - top, torch.arange(width) - left
    within = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.masked_fill(within[:, None].to(images.device), 0.0)


def train(
    net: FastNet, images: Tensor, labels: Tensor, settings: FastSettings, *, seed: int, state: Path | None = None
) -> Log:
    """Train a network in place.

    Args:
        net: Network on the device of the images, or its copy with attention.
        images: Normalised images.
        labels: Labels.
        settings: Training settings.
        seed: Seed of the order of images and of the augmentation.
        state: File of the state after each epoch, from which an interrupted training continues; None to keep none.
    """
    size = min(settings.batch_size, len(images))
    per_epoch = len(images) // size
    steps = settings.epochs * per_epoch
    nets = {"net": net}
    if settings.hardest is not None:
        proxy = FastNet(settings.proxy_widths, norm_momentum=settings.norm_momentum, classes=net.out.out_features)
        nets["proxy"] = proxy.to(images.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        whiten(proxy, images)
        proxy.bias_of_whitening.requires_grad_(False)
    optimisers = {name: optimiser_of(each, settings) for name, each in nets.items()}
    slow: dict[str, Tensor] = {}
    log = Log()
    for each in nets.values():
        each.train()
    if state is not None and state.is_file():
        saved = read_state(state)
        for name in nets:
            nets[name].load_state_dict(saved[name])
            optimisers[name].load_state_dict(saved[f"optimiser of {name}"])
        slow = {name: value.to(images.device) for name, value in saved["slow"].items()}
        log = Log(**saved["log"])
    for epoch in range(len(log.loss), settings.epochs):
        start, total = time.perf_counter(), torch.zeros((), device=images.device)
        net.bias_of_whitening.requires_grad_(epoch < settings.whitening_epochs)
        for step, (x, y) in enumerate(batches(images, labels, settings, seed=seed, epoch=epoch), 1 + epoch * per_epoch):
            factor = triangular((step - 1) / steps, peak=settings.peak, end=settings.end)
            if settings.hardest is not None:
                learns = (step - 1) % PROXY_EVERY == 0
                with torch.set_grad_enabled(learns):
                    proxy_losses = losses(nets["proxy"], x, y, settings)
                chosen = proxy_losses.detach().topk(settings.hardest).indices
                if learns:
                    update(optimisers["proxy"], proxy_losses[chosen].sum() / size, factor)
                x, y = x[chosen], y[chosen]
            loss = losses(net, x, y, settings).sum() / size
            update(optimisers["net"], loss, factor)
            total += loss.detach() * size / len(y)
            if step % settings.slow_every == 0:
                meet(net, slow, 1 - 0.95**settings.slow_every * (step / steps) ** 3)
        log.loss.append(float(total) / per_epoch)
        log.seconds.append(time.perf_counter() - start)
        if state is not None:
            now = {name: each.state_dict() for name, each in nets.items()}
            now |= {f"optimiser of {name}": each.state_dict() for name, each in optimisers.items()}
            save_state(state, {**now, "slow": slow, "log": asdict(log)})
            print(f"{state.stem}, epoch {epoch + 1}: loss {log.loss[-1]:.3f}, {log.seconds[-1]:.0f} s", flush=True)
    meet(net, slow, 0.0)  # the result is the average
    return log


def losses(net: FastNet, images: Tensor, labels: Tensor, settings: FastSettings) -> Float[Tensor, " b"]:
    """Return the loss of each image."""
    with autocast(images.device, bf16=settings.bf16):
        logits = net(images.contiguous(memory_format=torch.channels_last))
    return F.cross_entropy(logits.float(), labels, label_smoothing=settings.smoothing, reduction="none")


def optimiser_of(net: FastNet, settings: FastSettings) -> torch.optim.SGD:
    """Return the optimiser of a network; the highest learning rate of each group is its value "highest"."""
    modules = list(net.modules())
    biases = {id(module.bias) for module in modules if isinstance(module, nn.BatchNorm2d)}
    positions = {id(p) for module in modules if isinstance(module, SelfAttention) for p in module.encoding.parameters()}
    learned = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in learned if id(p) not in biases | positions],
            "weight_decay": settings.weight_decay,
            "highest": settings.rate,
        },
        {"params": [p for p in learned if id(p) in biases], "highest": settings.rate * settings.bias_rate},
        {"params": [p for p in learned if id(p) in positions], "highest": settings.position_rate},
    ]
    return torch.optim.SGD(groups, lr=settings.rate, momentum=settings.momentum, nesterov=True)


def update(optimiser: torch.optim.Optimizer, loss: Tensor, factor: float) -> None:
    """Take one step with a factor of the highest learning rates."""
    for group in optimiser.param_groups:
        group["lr"] = group["highest"] * factor
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


@torch.no_grad()
def meet(net: nn.Module, slow: dict[str, Tensor], share: float) -> None:
    """Interpolate the averaged weights towards the current ones by `share`, and set the current ones to the result.

    The averaged weights are initialised to the current ones on the first call.
    """
    state = net.state_dict()
    if not slow:
        slow.update({name: value.clone() for name, value in state.items() if value.is_floating_point()})
    for name, value in slow.items():
        value.lerp_(state[name], share)
        state[name].copy_(value)


@torch.inference_mode()
def logits_of(net: nn.Module, images: Tensor, *, several: bool, batch_size: int = 500) -> Tensor:
    """Return logits in full precision; the network is set to evaluation mode.

    Args:
        net: Network.
        images: Normalised images.
        several: Use test-time augmentation: average over the image, its flip, and both shifted by one pixel towards two
            corners. The shifted versions have half the weight.
        batch_size: Batch size.
    """
    net.eval()
    return torch.cat([_views(net, x) if several else net(x) for x in images.split(batch_size)]).cpu()


def _views(net: nn.Module, x: Tensor) -> Tensor:
    def both(images: Tensor) -> Tensor:
        return (net(images) + net(images.flip(-1))) / 2

    height, width = x.shape[-2:]
    padded = F.pad(x, (1,) * 4, mode="reflect")
    moved = (both(padded[:, :, place : place + height, place : place + width]) for place in (0, 2))
    return both(x) / 2 + sum(moved, torch.zeros(())) / 4
