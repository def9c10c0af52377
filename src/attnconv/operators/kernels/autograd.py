"""Functions with derivatives of their own, each beside its obvious form: a few differentiable operations.

    recomputing             keeps nothing but its inputs, and computes what the backward pass needs again
    twice_differentiable    keeps what a fused kernel keeps, whose backward pass has no derivative

Autograd would keep every intermediate tensor of the products that the first kind stands for. Second derivatives,
`torch.func` and forward-mode derivatives of both go through the obvious form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

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
                return _pulled(_recorded(plain, ctx.saved_tensors, [True] * len(ctx.saved_tensors)), gradient)
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

    apply: Callable[..., Tensor] = Recomputing.apply

    def function(*inputs: Tensor) -> Tensor:
        if is_tracing():  # which records no function of one's own
            return plain(*inputs)
        return apply(*inputs)

    return function


def twice_differentiable(
    plain: Callable[..., Tensor],
    fast: Callable[..., Tensor],
    retry: Callable[[Exception, Sequence[Tensor]], bool] | None = None,
) -> Callable[..., Tensor]:
    """A function whose backward pass is that of `fast`, as long as nobody differentiates it.

    What `fast` records is let go after its first backward pass, as autograd lets go of what it keeps; a second one
    records it again.

    Args:
        plain: The function in operations that can be differentiated any number of times.
        fast: The same, differentiable once.
        retry: From an error of the backward pass and what `fast` was given, whether to run both again.
    """

    @final
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            ctx.recorded = _recorded(fast, inputs, ctx.needs_input_grad)
            out: Tensor = ctx.recorded.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Gradients:
            inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad
            if torch.is_grad_enabled():  # a gradient of this gradient is wanted
                found: Gradients = torch.func.vjp(plain, *inputs)[1](gradient)
                return found
            if _is_batched(gradient):
                return _pulled(_recorded(plain, inputs, wanted), gradient)
            recorded, ctx.recorded = ctx.recorded or _recorded(fast, inputs, wanted), None
            try:
                return _pulled(recorded, gradient)
            except Exception as error:
                if retry is None or not retry(error, recorded.leaves):
                    raise
            return _pulled(_recorded(fast, inputs, wanted), gradient)

    def function(*inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which differentiates once, and looks into the function
            return fast(*inputs)
        if is_tracing() or is_transformed() or any(unpack_dual(tensor).tangent is not None for tensor in inputs):
            return plain(*inputs)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            with torch.no_grad():
                return fast(*(tensor.detach() for tensor in inputs))
        return apply(*inputs)

    apply: Callable[..., Tensor] = Fused.apply
    return function


def is_tracing() -> bool:
    """Inside `torch.jit.trace`."""
    return torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Inside `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@final
@dataclass(frozen=True)
class _Recorded:
    """A function's output with a graph of its own."""

    out: Tensor
    leaves: tuple[Tensor, ...]


def _recorded(function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool]) -> _Recorded:
    leaves = tuple(tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True))
    with torch.enable_grad():
        return _Recorded(function(*leaves), leaves)


def _pulled(recorded: _Recorded, gradient: Tensor) -> Gradients:
    """The gradients of the leaves that want one."""
    wanted = [leaf for leaf in recorded.leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(recorded.out, wanted, gradient))
    return tuple(next(found) if leaf.requires_grad else None for leaf in recorded.leaves)


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, as under `is_grads_batched` or a `vmap` around a gradient."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
