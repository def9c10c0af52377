"""Kronecker operator: one small factor per axis, for scores that are a sum over axes.

    softmax_{k1, k2} [f(k1 - q1) + g(k2 - q2)]  =  softmax_{k1} f(k1 - q1)  *  softmax_{k2} g(k2 - q2)

The identity is exact under every border rule, so A_h = F_h,1 (x) F_h,2, a Kronecker product. Keys whose weight is below
eps^2 times the largest of their row are dropped: the error is below rounding, and slow denormals are avoided. If scores
are smooth functions of the shift, wide heads are compressed along long axes (see `kernels.kronecker_wide`).

Mixed values A_h X are not saved for the backward pass. If an axis is long, heads are computed one at a time (see
`kernels.kronecker_long_axes`). Otherwise they are computed together, in an order that keeps matrix products large:

    Y_h = (F_h,2 (x) ..) X      all axes except the first
    U_h = Y_h W_h               one product per head
    out = sum_h F_h,1 U_h       the first axis: one product over heads and keys

In the forward pass, images are stored with the last axis first, so that nothing is copied between these products.
In the backward pass, they are stored with the first axis first, so that the products with F_h,1 are large.

With G the gradient of out and V_h = G W_h^T,  dW_h = Y_h^T (F_h,1^T G),  dF_h,1 = V_h Y_h^T,  dY_h = F_h,1^T V_h.
"""

import math
from collections.abc import Iterator, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import (
    AttentionOperator,
    Factor,
    Images,
    Outputs,
    Queries,
    Weights,
    full_precision,
    has_values,
    product_dtype,
    query_indices,
    score_dtype,
)
from attnconv.operators.kernels import block_sizes, contractions
from attnconv.operators.kernels.kronecker_long_axes import contract_long, pull_long
from attnconv.operators.kernels.kronecker_wide import between, compress, transform
from attnconv.operators.kernels.recompute_in_backward import Gradients, recomputing


@final
class Kronecker(AttentionOperator):
    """Attention operator whose matrix, for each head, is a Kronecker product of one factor per axis.

    Args:
        grid: Grid of queries and keys.
        factors: Key probabilities, one tensor (h, n_a, m_a) for each axis a with n_a queries and m_a keys of the image.
        padding_masses: Total probability of zero padding along each axis, one tensor (h, n_a) for each axis a.
        smooth: Whether the factors depend on their parameters only through polynomials of the shift, so that gradients
            may be projected on smooth functions.
    """

    batch = 1

    def __init__(
        self,
        grid: Grid,
        factors: Sequence[Factor],
        padding_masses: Sequence[Float[Tensor, "h _"]],
        *,
        smooth: bool = False,
    ) -> None:
        self.grid, self.smooth = grid, smooth
        self.factors = tuple(factors)
        self.padding_masses = tuple(padding_masses)
        self.heads = self.factors[0].shape[0]
        self.device = self.factors[0].device

    @staticmethod
    def from_scores(grid: Grid, scores: Sequence[Factor], *, smooth: bool = False) -> "Kronecker":
        """Create an operator from scores, one tensor (h, n_a, lattice_a) for each axis a, whose sum is the score."""
        factors, masses = [], []
        for axis, score in zip(grid.axes, scores, strict=True):
            lattice = contractions.banded_softmax(score, score.dtype)
            factors.append(axis.fold(lattice))
            masses.append(axis.empty_mass(lattice))
        return Kronecker(grid, factors, masses, smooth=smooth)

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        fixed = not any(factor.requires_grad for factor in self.factors)
        return contract_factors(x, weight, self.factors, smooth=self.smooth or fixed)  # groups follow from the shapes

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return mix_values(values, self.factors)

    def rows(self, queries: Queries) -> Float[Tensor, "1 h r m"]:
        rows, *others = self._at(queries, self.factors)  # (h, r, m_1), ..
        for factor in others:
            rows = (rows[..., None] * factor[..., None, :]).flatten(2)
        return _without_denormals(rows, len(self.factors))[None]

    def to_dense(self) -> Float[Tensor, "1 h n m"]:
        matrix = self.factors[0]  # (h, queries so far, keys so far)
        for factor in self.factors[1:]:
            matrix = (matrix[:, :, None, :, None] * factor[:, None, :, None, :]).flatten(3).flatten(1, 2)
        return _without_denormals(matrix, len(self.factors))[None]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "1 h r"]:
        mass, *others = self._at(queries, self.padding_masses)
        for other in others:
            mass = mass + (1 - mass) * other
        return mass[None]

    def _at(self, queries: Queries, along: Sequence[Tensor]) -> list[Tensor]:
        """Select the rows of the given queries along each axis."""
        indices = self.grid.unravel(query_indices(queries, self.grid, self.device))
        return [rows.index_select(1, index) for rows, index in zip(along, indices, strict=True)]


def _without_denormals(rows: Tensor, axes: int) -> Tensor:
    """Set denormals to 0; products of three weights can reach eps^6, which is denormal in float32."""
    return rows.masked_fill(rows < torch.finfo(rows.dtype).tiny, 0) if axes > 2 else rows


def contract_factors(x: Images, weight: Weights, factors: Sequence[Factor], *, smooth: bool = False) -> Outputs:
    """Compute sum_h (F_h,1 (x) F_h,2 ..) X W_h; zeros in long factors get no gradient, as softmax ignores it.

    If `smooth`, factors may be compressed, and their gradients projected on smooth functions of queries and keys.
    """
    dtype = product_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    with full_precision(x.device):
        if smooth and has_values(x) and not block_sizes.are_short(factors):
            return _smooth_contraction(x, weight, *factors)
        return _contraction(x, weight, *(factor.to(dtype) for factor in factors))


def contract_plainly(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """Compute `contract_factors` in a few differentiable products, materialising all mixed values."""
    groups = x.shape[-1] // weight.shape[1]
    if _narrows(x, weight):
        return mix_values(contractions.project_heads(x, weight, groups).movedim(-2, 1), factors).sum(1)
    return contractions.project(mix_values(x[:, None], factors).movedim(1, -2), weight, groups)


def mix_values(
    values: Float[Tensor, "b one_or_h *sizes c"], factors: Sequence[Factor]
) -> Float[Tensor, "b h *queries c"]:
    """Compute A_h V_h one axis at a time; `values` may be shared by all heads (second dimension 1)."""
    for dim, factor in enumerate(factors, start=2):
        moved = values.flatten(dim + 1)  # (b, h, *before, m_a, rest)
        matrix = factor.to(values.dtype).reshape(factor.shape[0], *(1,) * (dim - 2), *factor.shape[1:])
        values = (matrix @ moved).unflatten(-1, values.shape[dim + 1 :])
    return values


def _forward(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    if not _narrows(x, weight):
        return _contract(x, weight, *factors)
    empty = x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))
    swapped = _swapped(empty, weight, factors, x.shape[-1] // weight.shape[1])
    out = _pull(swapped, x, (True, *[False] * (1 + len(factors))))[0]
    assert out is not None
    return out


def _gradients(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    x, weight, *factors = inputs
    if not _narrows(x, weight):
        return _pull(inputs, gradient, wanted)
    groups = x.shape[-1] // weight.shape[1]
    swapped = _swapped(gradient, weight, factors, groups)
    _, to_weight, *to_factors = _pull(swapped, x, (False, *wanted[1:]))
    return (
        _contract(*swapped) if wanted[0] else None,
        None if to_weight is None else contractions.transposed(to_weight, groups),
        *(None if grad is None else grad.mT for grad in to_factors),
    )


def _narrows(x: Tensor, weight: Tensor) -> bool:
    """Return whether projecting first reduces the channels to be mixed; this order is the adjoint of the other."""
    return weight.shape[2] < x.shape[-1]


def _swapped(x: Tensor, weight: Tensor, factors: Sequence[Tensor], groups: int) -> tuple[Tensor, ...]:
    return x, contractions.transposed(weight, groups), *(factor.mT for factor in factors)


def _contract(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    return (_contract_short if block_sizes.are_short(factors) else contract_long)(x, weight, *factors)


def _pull(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    return (_pull_short if block_sizes.are_short(inputs[2:]) else pull_long)(inputs, gradient, wanted)


def _contract_short(x: Images, weight: Weights, *factors: Factor) -> Outputs:
    """Compute the products in the module's docstring; there are c / i groups of channels."""
    first, *inner = factors
    out = x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))
    outer, groups = first.permute(1, 2, 0).flatten(1), x.shape[-1] // weight.shape[1]  # (q, k h)
    order = (x.dim() - 2, 0, *range(x.dim() - 3, 0, -1), x.dim() - 1) if inner else range(x.dim())
    back = sorted(range(x.dim()), key=order.__getitem__)
    for images, parts in _parts(x, weight, factors):
        keys = x[images].permute(*order).contiguous()  # (k_last, b, .., k_1, c), or (b, k_1, c)
        for columns in parts:
            mixed = _mix_reversed(keys, _of_columns(inner, columns), len(first))
            projected = contractions.project_each(mixed.flatten(1, -2), weight, groups)
            projected = projected.reshape(-1, outer.shape[1], projected.shape[-1])  # (.., k h, d)
            made = torch.bmm(outer.expand(len(projected), -1, -1), projected)
            made = made.view(*mixed.shape[1:-2], *made.shape[1:]).permute(back)
            _of_image(out[images], columns).copy_(made)
            del mixed, projected
    return out


def _pull_short(inputs: Sequence[Tensor], gradient: Outputs, wanted: Sequence[bool]) -> Gradients:
    x, weight, first, *inner = inputs
    exact = score_dtype(x.dtype)  # accumulate parts in at least float32
    to_x, totals = torch.empty_like(x), [torch.zeros_like(tensor, dtype=exact) for tensor in inputs[1:]]
    for images, parts in _parts(x, weight, inputs[2:]):
        keys = x[images].transpose(0, 1).contiguous()
        total: Tensor | None = None
        for columns in parts:
            part = _of_image(gradient[images], columns).transpose(0, 1).contiguous()  # (q, b, .., d)
            chosen = (weight, first, *_of_columns(inner, columns))
            into = (*totals[:2], *_of_columns(totals[2:], columns))
            back = _pull_part(keys, chosen, part, into, wanted)
            if back is not None:
                total = back if len(parts) == 1 else back.to(exact) if total is None else total.add_(back)
        if total is not None:
            to_x[images] = total.view(keys.shape).transpose(0, 1)
    totals.insert(0, to_x)
    return tuple(total.to(x.dtype) if want else None for total, want in zip(totals, wanted, strict=True))


def _pull_part(
    keys: Float[Tensor, "k b *sizes c"],
    inputs: Sequence[Tensor],
    gradient: Float[Tensor, "q b *queries d"],
    totals: Sequence[Tensor],
    wanted: Sequence[bool],
) -> Tensor | None:
    """Return the gradient of one part's keys; add the gradients of weights and factors to `totals`."""
    weight, first, *inner = inputs
    heads, groups, moving = len(first), keys.shape[-1] // weight.shape[1], any(wanted[2:])
    mixed, steps = _mix(keys, inner, heads) if moving or wanted[1] else (None, [])
    if mixed is not None and wanted[1]:
        slopes = (first.mT.flatten(0, 1) @ gradient.flatten(1)).view(heads, -1, gradient.shape[-1])  # of U
        contractions.add_project_gradient(totals[0], mixed.flatten(1, -2), slopes, groups)
        del slopes
    if not (moving or wanted[0]):
        return None
    back = contractions.project_back(gradient.flatten(0, -2), weight, groups).reshape(heads, len(gradient), -1)  # V
    if mixed is not None and moving:
        totals[1].add_(back @ mixed.reshape(heads, first.shape[2], -1).mT)
    mixed, back = None, first.mT @ back  # the gradient of Y
    back = back.view(heads, -1, *(factor.shape[1] for factor in inner), keys.shape[-1])
    return _unmix(back, keys, factors=inner, steps=steps, to_factors=totals[2:] if moving else (), wanted=wanted[0])


def _parts(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Iterator[tuple[slice, list[slice]]]:
    """Yield slices of images with spans of columns (queries of the last axis) such that Y and U fit in a block."""
    middle = math.prod(max(factor.shape[1:]) for factor in factors[1:-1])
    columns = factors[-1].shape[1] if len(factors) > 1 else 1
    channels = max(x.shape[-1], weight.shape[2])
    column = len(weight) * max(factors[0].shape[1:]) * middle * channels * x.element_size()
    most = max(block_sizes.block_bytes(x.device.type) // column, 1)
    count = math.ceil(columns / max(most, block_sizes.LEAST_COLUMNS))
    for some in block_sizes.spans(x.shape[0], max(most // columns, 1)):
        yield some, block_sizes.spans(columns, math.ceil(columns / count))  # of nearly equal widths


def _of_columns(inner: Sequence[Tensor], columns: slice) -> list[Tensor]:
    return [*inner[:-1], inner[-1][:, columns]] if inner else []


def _of_image(image: Tensor, columns: slice) -> Tensor:
    return image[..., columns, :] if image.dim() > 3 else image


def _mix(
    keys: Float[Tensor, "k b *sizes c"], factors: Sequence[Factor], heads: int
) -> tuple[Float[Tensor, "h kb *queries c"], list[Tensor]]:
    """Compute Y, and return it with the input of each axis except the last, in order of axes."""
    flat = keys.flatten(0, 1)
    if not factors:
        return flat.expand(heads, *flat.shape), []
    *others, last = factors
    lead = flat.shape[:-2]
    # Mix the last axis for all heads at once.
    wide = torch.bmm(last.flatten(0, 1).expand(math.prod(lead), -1, -1), flat.flatten(0, -3))
    part, steps = wide.view(*lead, *last.shape[:2], -1).movedim(len(lead), 0).contiguous(), []
    for dim, factor in reversed(list(enumerate(others, start=2))):
        steps.append(part)
        part = (_beside(factor, dim) @ part.flatten(dim + 1)).unflatten(-1, part.shape[dim + 1 :])
    return part, steps[::-1]


def _mix_reversed(
    keys: Float[Tensor, "*sizes c"], factors: Sequence[Factor], heads: int
) -> Float[Tensor, "h *queries c"]:
    """Compute Y for keys with the last axis first, (k_last, b, .., k_1, c); nothing is copied between products."""
    if not factors:
        return keys.expand(heads, *keys.shape)
    *others, last = factors
    part = (last.flatten(0, 1) @ keys.flatten(1)).view(*last.shape[:2], *keys.shape[1:])
    for dim, factor in enumerate(reversed(others), start=3):
        part = (_beside(factor, dim) @ part.flatten(dim + 1)).unflatten(-1, part.shape[dim + 1 :])
    return part


def _unmix(
    gradient: Float[Tensor, "h kb *queries c"],
    keys: Float[Tensor, "k b *sizes c"],
    *,
    factors: Sequence[Factor],
    steps: Sequence[Tensor],
    to_factors: Sequence[Tensor],
    wanted: bool,
) -> Float[Tensor, "kb *sizes c"] | None:
    """Compute the adjoint of `_mix` if `wanted`, and add the factors' gradients to `to_factors` if given."""
    if not factors:
        return gradient.sum(0) if wanted else None
    *others, last = factors
    for place, factor in enumerate(others):
        dim = place + 2
        flat = gradient.flatten(dim + 1)
        if to_factors:
            outer = flat @ steps[place].flatten(dim + 1).mT
            to_factors[place].add_(outer.sum(tuple(range(1, dim)), dtype=to_factors[place].dtype))
        gradient = (_beside(factor.mT, dim) @ flat).unflatten(-1, gradient.shape[dim + 1 :])
    lead = gradient.shape[1:-2]
    wide = gradient.movedim(0, -3).reshape(-1, last.shape[0] * last.shape[1], gradient.shape[-1])  # (.., h q, c)
    if to_factors:
        outer = torch.bmm(keys.view(len(wide), -1, wide.shape[-1]), wide.mT).sum(0, dtype=to_factors[-1].dtype)
        to_factors[-1].add_(outer.mT.view(last.shape))
    if not wanted:
        return None
    return torch.bmm(last.flatten(0, 1).mT.expand(math.prod(lead), -1, -1), wide).view(*lead, -1, wide.shape[-1])


def _beside(matrix: Float[Tensor, "h q k"], dim: int) -> Tensor:
    """Reshape one matrix per head to multiply axis `dim` of (h, kb, .., k, rest)."""
    return matrix.reshape(matrix.shape[0], *(1,) * (dim - 1), *matrix.shape[1:])


_contraction = recomputing(contract_plainly, _forward, _gradients)


def _plainly(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    return contract_plainly(x, weight, *(factor.to(x.dtype) for factor in factors))


def _forward_smooth(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """Compute `_forward`, with compressed factors for wide heads, in the dtype of the factors."""
    if (wide := compress(factors, x.numel())) is None:
        return _forward(x, weight, *(factor.to(x.dtype) for factor in factors))
    exact = factors[0].dtype
    coarse = _forward(transform(x.to(exact), wide.keys), weight[wide.heads].to(exact), *wide.factors)
    out = transform(coarse, wide.queries, back=True)
    if wide.others:
        out += _forward(x, weight[wide.others], *(factor[wide.others].to(x.dtype) for factor in factors))
    return out.to(x.dtype)


def _gradients_smooth(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    x, weight, *factors = inputs
    if (wide := compress(factors, x.numel())) is None:
        return _gradients((x, weight, *(factor.to(x.dtype) for factor in factors)), gradient, wanted)
    exact = factors[0].dtype
    coarse = (transform(x.to(exact), wide.keys), weight[wide.heads].to(exact), *wide.factors)
    to_x, to_weight, *to_factors = _gradients(coarse, transform(gradient.to(exact), wide.queries), wanted)
    if to_x is not None:
        to_x = transform(to_x, wide.keys, back=True)
    for axis, (left, right) in enumerate(zip(wide.queries, wide.keys, strict=True)):
        core = to_factors[axis]
        if core is not None and left is not None and right is not None:
            to_factors[axis] = between(left, core, right.mT)
    parts = [(wide.heads, (to_x, to_weight, *to_factors))]
    if wide.others:
        rest = (x, weight[wide.others], *(factor[wide.others].to(x.dtype) for factor in factors))
        parts.append((wide.others, _gradients(rest, gradient, wanted)))
    totals = [torch.zeros_like(each) if want else None for each, want in zip(inputs, wanted, strict=True)]
    for heads, found in parts:
        for number, (total, part) in enumerate(zip(totals, found, strict=True)):
            if total is not None and part is not None:
                into = total if number == 0 else total[heads]
                total[... if number == 0 else heads] = into + part
    return tuple(totals)


_smooth_contraction = recomputing(_plainly, _forward_smooth, _gradients_smooth)
