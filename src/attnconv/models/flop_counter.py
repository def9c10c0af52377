"""Counting the operations of a built module, by watching it run on tensors without content.

The module runs once on fake tensors, which have shapes but no memory, so that models and images of any size can be
counted. Attention layers run in their dense form meanwhile. This is the second way to the numbers of
`attnconv.models.operation_counts`, and the only one for models from elsewhere.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnconv._util.eval_mode import evaluating
from attnconv.layers import SelfAttention

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Flops:
    """Operations for one image.

    Attributes:
        paper: in the paper's way, 2 x multiply-adds of the linear and convolution modules that are called. (Torch's own
            attention multiplies by its weights without calling a module.)
        everything: of every matrix product and convolution that ran.
    """

    paper: int
    everything: int


def measure_flops(model: nn.Module, image_shape: tuple[int, int, int]) -> Flops:
    """Run a module once on one image without content and count.

    Args:
        model: images (b, c, height, width) to anything; left as it was.
        image_shape: (channels, height, width).

    Example:
        >>> measure_flops(nn.Conv2d(3, 8, 3, padding=1), (3, 4, 4))
        Flops(paper=6912, everything=6912)
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    counter = FlopCounterMode(display=False)
    with evaluating(model), _dense_attention(model), _counting_modules(model) as linear, _fake_tensors():
        fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        image = torch.empty((1, *image_shape), dtype=dtype)
        # The counter sees nothing inside fused attention on CPUs, nor inside the fast path of nn.TransformerEncoder.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _without_fast_path(), counter:
            torch.func.functional_call(model, fakes, (image,), tie_weights=True)
    return Flops(2 * sum(linear), counter.get_total_flops())


def _fake_tensors() -> FakeTensorMode:
    """Tensors of shape and dtype only; a model from elsewhere may keep real ones beside its parameters and buffers."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _dense_attention(model: nn.Module) -> Iterator[None]:
    """Let attention layers run the softmax of all scores.

    Encodings with content do so as they are, and compute every term once; the reference would compute terms apart.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    before = [layer.backend for layer in layers]
    for layer in layers:
        position_only = not layer.encoding.reads_content
        layer.backend = "reference" if position_only else "structured"
    try:
        yield
    finally:
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend


@contextlib.contextmanager
def _counting_modules(model: nn.Module) -> Iterator[list[int]]:
    """The multiply-adds of linear and convolution modules, one number for each time that one is called."""
    found: list[int] = []

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(_multiply_adds(module, inputs[0], output))

    handles = [
        module.register_forward_hook(watch)
        for module in model.modules()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS, SelfAttention))
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _multiply_adds(module: nn.Module, x: Tensor, output: Tensor) -> int:
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, _CONVOLUTIONS):
        return output.numel() * (module.in_channels // module.groups) * math.prod(module.kernel_size)
    assert isinstance(module, SelfAttention)
    queries, keys = math.prod(output.shape[2:]), math.prod(x.shape[2:])
    if module.weight is not None:
        count = queries * module.weight.numel()
    else:
        assert module.value_weight is not None
        assert module.output_weight is not None
        count = keys * module.value_weight.numel() + queries * module.output_weight.numel()
    return count + _position_multiply_adds(module, x, output)


def _position_multiply_adds(layer: SelfAttention, x: Tensor, output: Tensor) -> int:
    """The authors' code applies a learned encoding's linear maps to all pairs of query and key rows and columns."""
    pairs = sum(queries * keys for queries, keys in zip(output.shape[2:], x.shape[2:], strict=True))
    return pairs * layer.encoding.table_channels * layer.heads
