"""Cost of attention in a training step of the paper's model.

One step of SGD with momentum and dropout. Contenders:

    stored       the model with the mixed values A_h X of all heads replaced by a stored tensor: the projection, its
                 gradient and the gradient of the mixed values are computed, but not the mixing and its gradients
    attention    the model
    products     matrix products of all linear maps only, including those of the heads: one forward, two backward

The difference between `stored` and `products` is due to norms, dropout, residuals and the optimiser.

The steps of `quadratic-fast`, and of a model with attention to content, are compared with that of `quadratic-small`.

    python -m benchmarks model-step
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv.layers import SelfAttention
from attnconv.models.classifiers import build
from attnconv.models.presets import preset_settings
from attnconv.operators.base import product_dtype
from benchmarks.compare import Step, compare
from benchmarks.measure import precision
from benchmarks.results import Results, Row

CONTENDERS = ("stored", "attention", "products")
PRESETS = ("quadratic-small", "quadratic-fast", "learned-content-small")
QUICK = {"preset": "quadratic-digits", "batch": 4, "dtypes": ("float32",), "repeats": 2}


def run(
    *,
    preset: str = "quadratic",
    batch: int = 100,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 7,
) -> Results:
    """Measure the time of the step."""
    rows: list[Row] = []
    for dtype in dtypes:
        sizes = {"preset": preset, "batch": batch, "dtype": dtype}
        case = f"{preset}, {dtype}, batch {batch}"
        rows += compare(prepare, sizes, CONTENDERS, case=case, repeats=repeats, slower=True)
        sizes, case = {"batch": batch, "dtype": dtype}, f"scale small, {dtype}, batch {batch}"
        rows += compare(prepare_preset, sizes, PRESETS, case=case, repeats=repeats, slower=True)
    return Results("model-step", "time relative to the first contender", tuple(rows))


def prepare(*, preset: str, batch: int, dtype: str, contender: str) -> Step:
    """Return a training step, or its products; there are no outputs to compare, as dropout is random."""
    torch.manual_seed(0)
    settings, model = preset_settings(preset), build(preset).train()
    images = torch.randn(batch, settings.image_channels, settings.image_size, settings.image_size)
    if contender == "products":
        return _products(model, images, getattr(torch, dtype))
    if contender == "stored":
        model = with_stored_values(model)
    labels = torch.randint(0, settings.classes, (batch,))
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> list[Tensor]:
        optimiser.zero_grad(set_to_none=True)
        with precision(dtype):
            logits: Tensor = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimiser.step()
        return []

    return step


def prepare_preset(*, batch: int, dtype: str, contender: str) -> Step:
    """Return a training step of the preset `contender`."""
    return prepare(preset=contender, batch=batch, dtype=dtype, contender="attention")


def with_stored_values(model: nn.Module) -> nn.Module:
    """Change all attention layers of a model, in place, to project stored values, and return the model."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, SelfAttention):
                setattr(module, name, _StoredValues(layer))
    return model


@final
class _StoredValues(nn.Module):
    """Projection and bias of a layer whose output has the size of its input."""

    def __init__(self, layer: SelfAttention) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._mixed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        assert self.bias is not None
        dtype, pixels = product_dtype(x), x.movedim(1, -1)
        shape = (*pixels.shape[:-1], self.weight[..., 0].numel())
        if self._mixed is None or (self._mixed.shape, self._mixed.dtype) != (shape, dtype):
            self._mixed = torch.randn(shape, device=x.device).to(dtype)
        out: Tensor = _Projection.apply(pixels.to(dtype), self.weight.to(dtype), self._mixed)  # type: ignore[no-untyped-call]
        return (out + self.bias.to(out.dtype)).movedim(-1, 1)


@final
class _Projection(torch.autograd.Function):
    """Product M W for stored M; the backward pass computes both gradients and discards that of M."""

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
        torch.mm(flat, weight.flatten(0, 1).mT)  # the gradient of M, discarded
        return gradient.new_zeros(ctx.shape), to_weight, None


def _products(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Step:
    """Return a step with the three products of every linear map of the model, on random tensors."""
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

    def step() -> list[Tensor]:
        for size in sizes:
            inputs, weight = tensors[size]
            outputs = inputs @ weight
            torch.mm(inputs.mT, outputs)
            torch.mm(outputs, weight.mT)
        return []

    return step
