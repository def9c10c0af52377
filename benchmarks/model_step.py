"""What does attention add to a training step of the paper's model?

One step of SGD with momentum, dropout on, of a whole model. Its peers in the same run:

    stored       the same step with the mixed values A_h X of each head replaced by a stored tensor: the projection, its
                 gradient and the gradient of the mixed values are still computed, the mixing and its gradients are not
    products     the products of the linear layers alone, heads' matrices included: one forward and two backward each

What separates stored from products are norms, dropout, residuals and the optimiser.

    attnconv bench model-step
"""

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.encodings.base import Encoding, JointEncoding, SeparableEncoding
from attnconv.grid import Grid
from attnconv.layers import SelfAttention
from attnconv.models.factory import build
from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings
from attnconv.operators.base import AttentionOperator, full_precision, product_dtype
from benchmarks.measure import Ratio, Step, interleaved, low_precision
from benchmarks.results import Answer, Row
from benchmarks.settings import ModelStepSettings

CLASSES = 10


def answer(settings: ModelStepSettings) -> Answer:
    """The step's times in every dtype.

    Raises:
        ValueError: The preset has no attention with merged weights, or is not the name of one.
    """
    return Answer("model-step", "times as long as the step with stored values", tuple(_rows(settings)))


def _rows(settings: ModelStepSettings) -> Iterator[Row]:
    known = preset_settings(settings.preset)
    if not isinstance(known, AttentionSettings) or known.head_channels is not None:
        requirement = "must be a model of attention with one matrix per head"
        raise ValueError(bad("--model-step.preset", requirement, repr(settings.preset)))
    layers = [layer for layer in build(known).modules() if isinstance(layer, SelfAttention)]
    if not all(isinstance(layer.encoding, SeparableEncoding | JointEncoding) for layer in layers):
        requirement = "must be a model whose attention does not look at content"
        raise ValueError(bad("--model-step.preset", requirement, repr(settings.preset)))
    images = torch.randn(settings.batch, known.image_channels, known.image_size, known.image_size)
    labels = torch.randint(0, CLASSES, (settings.batch,))
    for dtype in settings.dtypes:
        torch.manual_seed(0)
        attention, stored = build(known), with_stored_values(build(known))
        steps: dict[str, Step] = {
            "stored": _training_step(stored, images, labels, dtype),
            "attention": _training_step(attention, images, labels, dtype),
            "products": _products(attention, images, getattr(torch, dtype)),
        }
        times = interleaved(steps, settings.repeats)
        for name, taken in times.items():
            ratio = None if name == "stored" else Ratio.of(taken, times["stored"])
            yield Row(f"{settings.preset}, {dtype}, batch {settings.batch}", name, taken, ratio)


def _training_step(model: nn.Module, images: Tensor, labels: Tensor, dtype: str) -> Callable[[], Tensor]:
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with low_precision(dtype == "bfloat16"):
            logits: Tensor = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def with_stored_values(model: nn.Module) -> nn.Module:
    """The model, changed in place: every attention layer projects stored numbers instead of mixed values."""
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            layer.encoding = _StoredEncoding(layer.heads, layer.dims)
    return model


@final
class _StoredEncoding(Encoding):
    """Lays no attention over a grid, but numbers in the place of what it would have mixed."""

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__(heads, dims)
        self._mixed: Tensor | None = None

    def operator(self, grid: Grid, x: Tensor) -> "_Stored":
        dtype = product_dtype(x)
        shape = (x.shape[0], *grid.query_sizes, self.heads * x.shape[-1])
        if self._mixed is None or (self._mixed.shape, self._mixed.dtype) != (shape, dtype):
            self._mixed = torch.randn(shape, device=x.device).to(dtype)
        return _Stored(grid, self.heads, self._mixed)

    def terms(self, grid: Grid, x: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError


@final
class _Stored(AttentionOperator):
    """Only `contract` is ever asked of it."""

    batch = 1

    def __init__(self, grid: Grid, heads: int, mixed: Tensor) -> None:
        self.grid, self.heads, self._mixed = grid, heads, mixed

    @property
    def device(self) -> torch.device:
        return self._mixed.device

    def contract(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        dtype = self._mixed.dtype
        with full_precision(x.device):
            out: Tensor = _Projection.apply(x.to(dtype), weight.to(dtype), self._mixed)  # type: ignore[no-untyped-call]
        return out

    def apply(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def rows(self, queries: Tensor) -> Tensor:
        raise NotImplementedError

    def padding_mass(self, queries: Tensor) -> Tensor:
        raise NotImplementedError


@final
class _Projection(torch.autograd.Function):
    """M W for stored M; the backward pass computes both gradients of the product, and drops that of M."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mixed: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mixed)
        ctx.shape = x.shape
        return mixed @ weight.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, mixed = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        to_weight = (mixed.flatten(0, -2).mT @ flat).view(weight.shape)
        torch.mm(flat, weight.flatten(0, 1).mT)  # the gradient of M, which goes nowhere
        return gradient.new_zeros(ctx.shape), to_weight, None


def _products(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """The three products of every linear map of the model, on random numbers of the same sizes."""
    sizes: list[tuple[int, int, int]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, SelfAttention):
            sizes.append((output[:, 0].numel(), module.heads * module.in_channels, module.out_channels))
        elif isinstance(module, nn.Linear):
            sizes.append((inputs[0][..., 0].numel(), module.in_features, module.out_features))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    tensors = {
        size: (torch.randn(size[0], size[1]).to(dtype), torch.randn(size[1], size[2]).to(dtype)) for size in set(sizes)
    }

    def step() -> None:
        for size in sizes:
            inputs, weight = tensors[size]
            outputs = inputs @ weight
            torch.mm(inputs.mT, outputs)
            torch.mm(outputs, weight.mT)

    return step
