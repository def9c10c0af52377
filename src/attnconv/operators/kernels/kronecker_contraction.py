"""sum_h A_h X W_h for Kronecker products A_h = F_h,1 (x) F_h,2 .., without keeping the mixed pixels A_h X."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from attnconv.operators.base import full_precision, product_dtype
from attnconv.operators.kernels.contractions import project, project_heads, transposed
from attnconv.operators.kernels.kronecker_long_axes import contract_long, pull_long
from attnconv.operators.kernels.kronecker_short_axes import contract_short, pull_short
from attnconv.operators.kernels.recompute_in_backward import Gradients, recomputing
from attnconv.operators.kernels.tiling import are_short


def contract_factors(
    x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h i d"], factors: Sequence[Float[Tensor, "h _ _"]]
) -> Float[Tensor, "b *queries d"]:
    """sum_h (F_h,1 (x) F_h,2 ..) X W_h. On long axes zeros of a factor get no gradient: a softmax passes none on."""
    dtype = product_dtype(x)
    cast = [tensor.to(dtype) for tensor in (x, weight, *factors)]
    with full_precision(x.device):
        return _contraction(*cast)


def contract_plainly(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The same in a few differentiable products, with all mixed values at once."""
    groups = _groups(x, weight)
    if _narrows(x, weight):
        return mix_values(project_heads(x, weight, groups).movedim(-2, 1), factors).sum(1)
    return project(mix_values(x[:, None], factors).movedim(1, -2), weight, groups)


def mix_values(
    values: Float[Tensor, "b one_or_h *sizes c"], factors: Sequence[Float[Tensor, "h _ _"]]
) -> Float[Tensor, "b h *queries c"]:
    """A_h V_h, one axis after the other; `values` may be shared by all heads (second axis 1)."""
    for dim, factor in enumerate(factors, start=2):
        moved = values.flatten(dim + 1)  # (b, h, *before, m_a, rest)
        matrix = factor.to(values.dtype).reshape(factor.shape[0], *(1,) * (dim - 2), *factor.shape[1:])
        values = (matrix @ moved).unflatten(-1, values.shape[dim + 1 :])
    return values


def _forward(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    if not _narrows(x, weight):
        return _contract(x, weight, *factors)
    empty = x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))
    swapped = _swapped(empty, weight, factors, _groups(x, weight))
    out = _pull(swapped, x, (True, *[False] * (1 + len(factors))))[0]
    assert out is not None
    return out


def _gradients(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    x, weight, *factors = inputs
    if not _narrows(x, weight):
        return _pull(inputs, gradient, wanted)
    groups = _groups(x, weight)
    swapped = _swapped(gradient, weight, factors, groups)
    _, to_weight, *to_factors = _pull(swapped, x, (False, *wanted[1:]))
    return (
        _contract(*swapped) if wanted[0] else None,
        None if to_weight is None else transposed(to_weight, groups),
        *(None if grad is None else grad.mT for grad in to_factors),
    )


def _groups(x: Tensor, weight: Tensor) -> int:
    return x.shape[-1] // weight.shape[1]


def _narrows(x: Tensor, weight: Tensor) -> bool:
    """Whether to mix after the projection, as it leaves fewer channels: the adjoint of the other order."""
    return weight.shape[2] < x.shape[-1]


def _swapped(x: Tensor, weight: Tensor, factors: Sequence[Tensor], groups: int) -> tuple[Tensor, ...]:
    return x, transposed(weight, groups), *(factor.mT for factor in factors)


def _contract(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    return (contract_short if are_short(factors) else contract_long)(x, weight, *factors)


def _pull(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    return (pull_short if are_short(inputs[2:]) else pull_long)(inputs, gradient, wanted)


_contraction = recomputing(contract_plainly, _forward, _gradients)
