"""Functions that keep nothing but their inputs, and compute what the backward pass needs again.

Autograd would keep every intermediate tensor of the products that such a function stands for. Each comes with its
obvious form, a few differentiable operations that keep everything: second derivatives, `torch.func` and forward-mode
derivatives go through that one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

Gradients: TypeAlias = tuple[Tensor | None, ...]


def recomputing(
    plain: Callable[..., Tensor],
    forward: Callable[..., Tensor],
    gradients: Callable[[Sequence[Tensor], Tensor, Sequence[bool]], Gradients],
) -> Callable[..., Tensor]:
    """A differentiable function of tensors.

    Args:
        plain: The function in differentiable operations.
        forward: The same by other means; nothing inside is recorded.
        gradients: From the inputs, the gradient of the output and which inputs want one, theirs.
    """

    @final
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Tensor:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            del output
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Gradients:
            found: Gradients
            if torch.is_grad_enabled():  # a gradient of this gradient is wanted
                found = torch.func.vjp(plain, *ctx.saved_tensors)[1](gradient)
                return found
            if _is_batched(gradient):  # many gradients at once
                leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                with torch.enable_grad():
                    out = plain(*leaves)
                found = torch.autograd.grad(out, leaves, gradient)
                return found
            return gradients(ctx.saved_tensors, gradient, ctx.needs_input_grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
            inputs = ctx.saved_tensors
            moves = tuple(torch.zeros_like(v) if t is None else t for v, t in zip(inputs, tangents, strict=True))
            # Forward modes cannot nest, so this is the transpose of the transpose.
            pulled = torch.func.vjp(plain, *inputs)
            moved: Tensor = torch.func.vjp(pulled[1], torch.zeros_like(pulled[0]))[1](moves)[0]
            return moved

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
            del info
            return torch.func.vmap(plain, in_dims=in_dims)(*inputs), 0

    function: Callable[..., Tensor] = Recomputing.apply
    return function


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, as under `is_grads_batched` or a `vmap` around a gradient."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
