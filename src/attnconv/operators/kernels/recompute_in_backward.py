"""Autograd functions with their own derivatives; second and forward-mode derivatives use their plain form."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from attnconv.operators.base import has_values

Gradients: TypeAlias = tuple[Tensor | None, ...]


def recomputing(
    plain: Callable[..., Tensor],
    forward: Callable[..., Tensor],
    gradients: Callable[[Sequence[Tensor], Tensor, Sequence[bool]], Gradients],
) -> Callable[..., Tensor]:
    """A function of tensors that keeps only its inputs, and computes what the backward pass needs again.

    Compilers get `plain`, its differentiable form. `gradients` takes inputs, the output's gradient, which are wanted.
    """

    @final
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Gradients:
            inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad
            found = _plain_gradients(plain, inputs, gradient, wanted)
            return gradients(inputs, gradient, wanted) if found is None else found

    apply: Callable[..., Tensor] = Recomputing.apply
    return lambda *inputs: plain(*inputs) if not has_values(inputs[0]) or _is_transformed() else apply(*inputs)


def twice_differentiable(plain: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose backward pass is that of `fast`; where that is differentiated again, that of `plain`.

    The graph of `fast` is freed after its first backward pass; a second one records it again.
    """

    @final
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            ctx.recorded = _recorded(fast, inputs, ctx.needs_input_grad)
            out: Tensor = ctx.recorded[0].detach()
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Gradients:
            inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad
            found = _plain_gradients(plain, inputs, gradient, wanted)
            if found is None:
                recorded, ctx.recorded = ctx.recorded or _recorded(fast, inputs, wanted), None
                found = _pulled(recorded, gradient)
            return found

    apply: Callable[..., Tensor] = Fused.apply

    def function(*inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which differentiates once, and traces into the function
            return fast(*inputs)
        if _is_transformed():
            return plain(*inputs)
        return apply(*inputs) if torch.is_grad_enabled() else fast(*inputs)

    return function


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function, which the backward pass runs again instead of keeping what it computed."""
    if _is_transformed():  # where tensors are saved without hooks
        return function(*inputs)
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def _is_transformed() -> bool:
    """Inside `torch.func`, forward-mode derivatives or `torch.jit.trace`, which record no custom function."""
    states: list[object] = [torch._C._functorch.peek_interpreter_stack(), torch._C._get_tracing_state()]
    return forward_ad._current_level >= 0 or states != [None, None]


def _plain_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> Gradients | None:
    """Gradients by the plain form where a single backward pass does not do; None where it does."""
    if torch.is_grad_enabled():  # a gradient of this gradient is wanted
        found: Gradients = torch.func.vjp(plain, *inputs)[1](gradient)
        return found
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient):  # many gradients at once
        return _pulled(_recorded(plain, inputs, wanted), gradient)
    return None


def _recorded(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A function's output with a graph of its own, and the leaves of that graph."""
    leaves = tuple(tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True))
    with torch.enable_grad():
        return function(*leaves), leaves


def _pulled(recorded: tuple[Tensor, tuple[Tensor, ...]], gradient: Tensor) -> Gradients:
    """The gradients of the leaves that want one."""
    out, leaves = recorded
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, gradient))
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
