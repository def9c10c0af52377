"""Custom autograd functions; second-order and forward-mode derivatives use a plain implementation."""

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
    forward: Callable[..., Any],
    gradients: Callable[..., Gradients] | None = None,
) -> Callable[..., Tensor]:
    """Create a function that saves its inputs and recomputes most intermediate results in the backward pass.

    `plain` computes the same result as `forward`, but supports higher derivatives. `gradients` receives the inputs, the
    output's gradient, one bool per input (whether to compute its gradient), and the saved tensors, if any: if `forward`
    returns a tuple, these follow the output. Without `gradients`, autograd differentiates `forward`, which returns only
    the output: the forward pass records it for the first backward pass, and each further backward pass runs and records
    it again.
    """

    @final
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            if gradients is None:
                ctx.recorded = recorded(forward, inputs, ctx.needs_input_grad)
                found = ctx.recorded[0].detach()
            else:
                found = forward(*inputs)
            out: Tensor
            out, *saved = found if isinstance(found, tuple) else (found,)
            ctx.save_for_backward(*inputs, *saved)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Gradients:
            tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad
            inputs, saved = tensors[: len(wanted)], tensors[len(wanted) :]
            if torch.is_grad_enabled():  # for second derivatives
                found: Gradients = torch.func.vjp(plain, *inputs)[1](gradient)
                return found
            functorch = torch._C._functorch
            if functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient):  # batched by vmap
                return _pulled(recorded(plain, inputs, wanted), gradient)
            if gradients is not None:
                return gradients(inputs, gradient, wanted, *saved)
            graph, ctx.recorded = ctx.recorded or recorded(forward, inputs, wanted), None
            return _pulled(graph, gradient)

    apply: Callable[..., Tensor] = Recomputing.apply

    def function(*inputs: Tensor) -> Tensor:
        if gradients is None and torch.compiler.is_compiling():  # the compiler differentiates `forward`
            return forward(*inputs)
        if not has_values(inputs[0]) or is_transformed():
            return plain(*inputs)
        return apply(*inputs) if gradients is not None or torch.is_grad_enabled() else forward(*inputs)

    return function


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function without saving its intermediate results; the backward pass runs it again."""
    if is_transformed():  # saved-tensor hooks are not supported there
        return function(*inputs)
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def is_transformed() -> bool:
    """Return whether `torch.func`, forward-mode AD or `torch.jit.trace` is active; these need the plain function."""
    states: list[object] = [torch._C._functorch.peek_interpreter_stack(), torch._C._get_tracing_state()]
    return forward_ad._current_level >= 0 or states != [None, None]


def recorded(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output of a function with a separate graph, and the leaves of that graph."""
    leaves = tuple(tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True))
    with torch.enable_grad():
        return function(*leaves), leaves


def _pulled(graph: tuple[Tensor, tuple[Tensor, ...]], gradient: Tensor) -> Gradients:
    out, leaves = graph
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, gradient))
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
