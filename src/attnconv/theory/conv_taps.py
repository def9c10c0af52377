"""Taps of a PyTorch convolution: the shift and the weight matrix of each kernel position.

    nn.Conv*d            out_q = sum_j x_{stride q + dilation j - padding} W_j, shift_j = dilation j - padding
    nn.ConvTranspose*d   out_q = sum_{k, j: stride k + dilation j - padding = q} x_k W_j, shift_j = padding - dilation j

In a forward convolution, queries are `stride` apart; in a transposed one, keys are.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import FLOATING
from attnconv.grid import Border, Grid, padding_pairs

Forward: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution: TypeAlias = Forward | Transposed
FORWARD: dict[int, type[Forward]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[Transposed]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BORDERS: dict[str, Border] = {"zeros": "zero", "replicate": "replicate", "reflect": "reflect", "circular": "circular"}
_COMPUTING = ("forward", "_conv_forward", "_output_padding", "__call__")  # methods that compute a convolution's output


def looks_like_convolution(module: nn.Module) -> bool:
    """Return whether a module is a convolution of any kind, including those that `check_convolution` rejects."""
    foreign = type(module).__module__.startswith(("torch.ao.nn", "torch.nn.intrinsic", "torch.nn.quantized"))
    return isinstance(module, Convolution) or (foreign and "Conv" in type(module).__name__)


def check_convolution(conv: nn.Module, name: str = "conv") -> None:
    """Raise an error if a module cannot be converted to attention; `name` is the module's name in the message."""
    kind = type(conv).__name__
    if not isinstance(conv, Convolution):
        known = "must be an nn.Conv1d, nn.Conv2d, nn.Conv3d or one of their transposed counterparts"
        raise TypeError(bad(name, known, f"{type(conv).__module__}.{kind}"))
    if any(nn.parameter.is_lazy(parameter) for parameter in conv.parameters()):
        fix = "Run the model once on an image to initialise its lazy layers."
        raise TypeError(bad(name, "must have initialised weights", f"an uninitialised {kind}", fix))
    plain: type[nn.Module] = (FORWARD if isinstance(conv, Forward) else TRANSPOSED)[len(conv.kernel_size)]
    theirs = type(conv)
    if own := [m for m in _COMPUTING if m in vars(conv) or getattr(theirs, m, None) is not getattr(plain, m, None)]:
        fix = f"Exclude it with only=['!{name}'], or replace it with a plain convolution first."
        got = f"{kind} with a custom {own[0]}"
        raise TypeError(bad(name, f"must not override the forward pass of nn.{plain.__name__}", got, fix))
    for part in ("weight", "bias"):
        if part not in conv._parameters or nn.utils.parametrize.is_parametrized(conv, part):
            fix = "Make the parametrization, weight norm or pruning permanent first."
            raise ValueError(bad(name, f"must have a plain {part} parameter", f"{kind} with a computed {part}", fix))
    if inner := list(conv._modules):
        fix = "Recast the model before the step that adds them, such as torch.ao.quantization.prepare."
        raise ValueError(bad(name, "must have no submodules", f"{kind} with {inner[0]}", fix))
    if conv.weight.dtype not in FLOATING:
        raise TypeError(bad(name, "must have real floating-point weights of 16 to 64 bits", str(conv.weight.dtype)))
    for parameter in conv.parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise ValueError(bad(name, "must have finite parameters", "NaN or infinite values"))


def paddings(conv: Convolution) -> tuple[tuple[int, int], ...]:
    """Return the padding (before, after) per axis; "same" and "valid" are resolved as in PyTorch."""
    return padding_of(conv.padding, conv.kernel_size, conv.dilation)


def padding_of(padding: Any, kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Compute `paddings` from a convolution's arguments."""
    if padding != "same":
        return padding_pairs(0 if padding == "valid" else padding, len(kernel_size))
    totals = [step * (size - 1) for size, step in zip(kernel_size, dilation, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


def extents(conv: Convolution) -> tuple[int, ...]:
    """Return the kernel extent per axis, dilation * (kernel_size - 1) + 1."""
    return tuple(step * (size - 1) + 1 for size, step in zip(conv.kernel_size, conv.dilation, strict=True))


def convolution_grid(conv: Convolution, sizes: Sequence[int]) -> Grid:
    """Return the grid of a convolution over an image of `sizes`."""
    geometry: dict[str, Any] = {"stride": conv.stride, "padding": paddings(conv), "window": extents(conv)}
    if isinstance(conv, Forward):
        return Grid.make(sizes, **geometry)
    return Grid.transposed(sizes, output_padding=conv.output_padding, **geometry)


def taps(conv: Convolution) -> tuple[tuple[int, ...], ...]:
    """Return the shift (key minus query) of every kernel position, row-major; these are the centres of the heads."""
    return tap_shifts(conv.kernel_size, conv.dilation, paddings(conv), transposed=not isinstance(conv, Forward))


def tap_shifts(
    kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[tuple[int, int]], *, transposed: bool
) -> tuple[tuple[int, ...], ...]:
    """Compute `taps` from a convolution's arguments."""
    sign = -1 if transposed else 1
    along = [
        [sign * (step * j - before) for j in range(size)]
        for size, step, (before, _) in zip(kernel_size, dilation, padding, strict=True)
    ]
    return tuple(product(*along))


def head_weights(conv: Convolution, groups: int | None = None) -> Float[Tensor, "h i d"]:
    """Return a convolution's weight as one matrix per tap, row-major, (h, c / groups, d) like `SelfAttention.weight`.

    `groups` is the number of groups of the result: None for that of the convolution, or 1 for block-diagonal matrices.
    """
    grouped = grouped_weights(conv)
    if groups in (None, conv.groups):
        return grouped.flatten(2)
    return torch.stack([torch.block_diag(*parts) for parts in zip(*grouped.unbind(2), strict=True)])


def grouped_weights(conv: Convolution) -> Float[Tensor, "h i groups part"]:
    """Return `head_weights` with a separate dimension for groups, as a view of the convolution's weight."""
    grouped = conv.weight.flatten(2).unflatten(0, (conv.groups, -1))  # (g, d / g, i, h), or (g, i, d / g, h)
    return grouped.permute((3, 2, 0, 1) if isinstance(conv, Forward) else (3, 1, 0, 2))
