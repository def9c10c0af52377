"""Run random convolutions on images of every memory layout as attention, and compare with float64.

Random choices: one to three axes, forward and transposed, every padding mode, kernels, strides, dilations, groups (also
depthwise), sizes, channels and batches from 1, four dtypes, weights and images row-major, channels-last, with arbitrary
strides on axes of size 1, expanded or sliced, and gradients in the same layouts.
"""

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnconv.convert import recast, restore
from attnconv.theory.conv_taps import FORWARD, TRANSPOSED, Convolution, extents, paddings

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALLOWED = 16  # epsilons of the dtype: error relative to the same sum over absolute values
MEMORY = ("row-major", "channels-last", "arbitrary", "sliced", "expanded")
_CHANNELS = (1, 1, 1, 2, 3, 16)
_SMALLEST = {"zeros": 1, "replicate": 1, "reflect": 1, "circular": 0}  # pixels beyond the padding


@dataclass(frozen=True)
class Drawn:
    """Random convolution, an image that it accepts, and the random choices for the comparison."""

    conv: Convolution
    x: Tensor
    layout: str
    gradient_layout: str
    fast: bool

    def __str__(self) -> str:
        shape, layout = tuple(self.x.shape), f"{self.layout}, gradient {self.gradient_layout}, fast={self.fast}"
        return f"{self.conv} on {shape} {self.x.dtype}, strides {self.x.stride()}, {layout}"


def draw(source: random.Random) -> Drawn:
    """Return a random case."""
    dims = source.choice((1, 2, 2, 3))

    def each(*choices: int) -> tuple[int, ...]:
        return tuple(source.choice(choices) for _ in range(dims))

    kernel, stride, dilation = each(1, 2, 3), each(1, 1, 2, 3), each(1, 1, 2)
    groups = source.choice((1, 1, 1, 2, 4))
    inputs, outputs = groups * source.choice(_CHANNELS), groups * source.choice(_CHANNELS)
    if source.random() < 0.2:
        groups = inputs = outputs = source.choice((2, 8, 16, 17))
    dtype = source.choice(DTYPES)
    options: dict[str, Any] = {"groups": groups, "bias": source.random() < 0.5}
    if source.random() < 0.25:
        extra = tuple(source.randrange(max(pair)) for pair in zip(stride, dilation, strict=True))
        padding: Any = each(0, 0, 1, 2)
        kind: Any = TRANSPOSED[dims]
        conv: Convolution = kind(inputs, outputs, kernel, stride, padding, extra, dilation=dilation, **options)
        sizes = [
            max(source.choice((1, 1, 2, 3, 8)), -(-(2 * pad - extent - more + 1) // step) + 1, 1)
            for pad, extent, more, step in zip(padding, extents(conv), extra, stride, strict=True)
        ]
    else:
        mode: Any = source.choice(list(_SMALLEST))
        padding = source.choice((each(0, 1, 2, 3), each(0, 0, 1), "same", "valid"))
        stride = (1,) * dims if padding == "same" else stride
        kind = FORWARD[dims]
        conv = kind(inputs, outputs, kernel, stride, padding, dilation, padding_mode=mode, **options)
        around = [sum(pads) for pads in paddings(conv)]
        sizes = [
            max(extent - both + source.choice((0, 0, 1, 2, 9)), most + _SMALLEST[mode], 1)
            for extent, both, most in zip(extents(conv), around, map(max, paddings(conv)), strict=True)
        ]
    generator = torch.Generator().manual_seed(source.getrandbits(62))
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    conv = conv.to(dtype)
    if dims > 1 and source.random() < 0.3:
        conv = conv.to(memory_format=(torch.channels_last, torch.channels_last_3d)[dims - 2])  # type: ignore[call-overload]
    x = torch.randn(source.choice((1, 2, 3)), inputs, *sizes, generator=generator).to(dtype)
    layout, gradient_layout = source.choice(MEMORY), source.choice(MEMORY)
    return Drawn(conv, laid_out(x, layout, source), layout, gradient_layout, source.random() < 0.8)


def laid_out(tensor: Tensor, layout: str, source: random.Random) -> Tensor:
    """Return the same values (expanded: those of the first image) with other strides."""
    if layout == "row-major":
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if layout == "channels-last":  # `contiguous` would leave the strides of one channel as they are
        last = tensor.movedim(1, -1)
        return torch.empty(last.shape, dtype=tensor.dtype).copy_(last).movedim(-1, 1)
    if layout == "arbitrary":
        strides = torch.empty(tensor.shape).stride()
        free = [
            source.choice((1, 2, 7, step)) if size == 1 else step
            for size, step in zip(tensor.shape, strides, strict=True)
        ]
        return laid_out(tensor, "row-major", source).as_strided(tensor.shape, free)
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
    wide[..., 1::2] = tensor
    return wide[..., 1::2]


def wrong(case: Drawn, source: random.Random) -> str | None:
    """Run a case forward and backward and restore it; return a description of the first difference."""
    conv, x = case.conv, case.x
    attention: Any = recast(conv, fast=case.fast)
    expected, sums = _in_float64(conv, x, absolute=False), _in_float64(conv, x, absolute=True)
    gradient = laid_out(torch.randn(expected[0].shape, dtype=torch.float64).to(x.dtype), case.gradient_layout, source)
    dirty_memory()
    image = x.detach().requires_grad_()
    out = attention(image)
    parameters = [attention.weight, *([attention.bias] if attention.bias is not None else [])]
    got = torch.autograd.grad(out, [image, *parameters], gradient)
    found = [out, got[0], _as_kernel(conv, got[1]), *got[2:]]
    reference = [expected[0], *torch.autograd.grad(*expected, gradient.double())]
    scales = [sums[0], *torch.autograd.grad(*sums, gradient.double().abs())]
    least = max(torch.finfo(x.dtype).tiny, 1e-6)  # 16 bits: numbers below the smallest normal one keep fewer digits
    for name, mine, theirs, scale in zip(
        ("output", "input's gradient", "weight's", "bias's"),
        found,
        reference,
        scales,
        strict=False,  # some convolutions have no bias
    ):
        error = float(((mine.detach().double() - theirs.detach()).abs() / scale.detach().clamp_min(least)).max())
        if not error <= ALLOWED * torch.finfo(x.dtype).eps:
            return f"{name} differs by {error:.1e}"
    back = restore(attention)
    for name, value in conv.state_dict().items():
        if not torch.equal(back.state_dict()[name], value):
            return f"{name} is not restored"
    return None


def dirty_memory() -> None:
    """Fill freed memory of many sizes with large numbers, so that reads of uninitialised memory are detected."""
    blocks = [torch.full((size,), 1e30) for size in range(1, 260, 3)]
    del blocks


def _as_kernel(conv: Convolution, gradient: Tensor) -> Tensor:
    """Return the gradient of a layer's weight (taps, in / groups, out) in the shape of the convolution's weight."""
    taps = gradient.movedim(0, -1)  # (in / groups, out, taps)
    if isinstance(conv, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        grouped = taps.unflatten(1, (conv.groups, -1)).movedim(1, 0)  # (groups, in / groups, out / groups, taps)
        return grouped.flatten(0, 1).reshape(conv.weight.shape)
    return taps.transpose(0, 1).reshape(conv.weight.shape)


def _in_float64(conv: Convolution, x: Tensor, *, absolute: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the output in float64 and row-major memory and its inputs for gradients, or sums of absolute values."""
    kind: Any = type(conv)
    precise = kind(**_options(conv)).double()
    with torch.no_grad():
        for mine, given in zip(precise.parameters(), conv.parameters(), strict=True):
            mine.copy_(given.abs() if absolute else given)
    image = torch.empty(x.shape, dtype=torch.float64).copy_(x.abs() if absolute else x).requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel", UserWarning)
        return precise(image), [image, *precise.parameters()]


def _options(conv: Convolution) -> dict[str, Any]:
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    extra = ["output_padding"] if isinstance(conv, nn.modules.conv._ConvTransposeNd) else []
    return {"bias": conv.bias is not None, **{name: getattr(conv, name) for name in names + extra}}
