"""sum_h A_h X W_h for Kronecker products A_h = F_h,1 (x) F_h,2 .., without a tensor of heads x channels per position.

    mix      M_h = A_h X        axis by axis, a few images or a few rows of queries at a time, so that it stays in cache
    project  out = sum_h M_h W_h                           one product over heads and channels

Nothing of M is kept: the backward pass mixes again (a small part of the work) and uses, with G the gradient of out,

    dW_h = M_h^T G,      dM_h = G W_h^T,      dX = sum_h A_h^T dM_h,      dF_h,a = dM_h (x) M_h along the other axes.

On long axes each head's factor is a band, and only the keys inside it are met: for every tile of queries the smallest
range of keys that holds their weights. What lies outside is zero, so nothing is approximated here.

With g groups of channels, as in a grouped convolution, W_h is block diagonal and only its blocks are given, as
(h, c / g, d).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.base import full_precision, has_values, product_dtype
from attnconv.operators.blocks import Block, Group, Tile, blocks, strips, within
from attnconv.operators.products import project, project_back, project_gradient, project_heads, transposed
from attnconv.operators.recomputing import Gradients, recomputing


def contract_factors(
    x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h i d"], factors: Sequence[Float[Tensor, "h _ _"]]
) -> Float[Tensor, "b *queries d"]:
    """sum_h (F_h,1 (x) F_h,2 ..) X W_h.

    Args:
        x: Images, channels last.
        weight: One matrix per head; of c / i groups of channels if it has fewer rows than x has channels.
        factors: One (h, queries, keys) for each axis. On long axes, entries that are zero get no gradient: a softmax,
            which makes the factors, would not pass it on.
    """
    dtype = product_dtype(x)
    cast = [tensor.to(dtype) for tensor in (x, weight, *factors)]
    with full_precision(x.device):
        if not has_values(x):
            return contract_plainly(*cast)
        return _contraction(*cast)


def contract_plainly(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The same in a few differentiable products, with all of M at once: what compilers and transforms see."""
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
    swapped = _swapped(_outputs(x, weight, factors), weight, factors, _groups(x, weight))
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
    """Whether there are fewer channels after the projection, so that mixing comes second: sum_h A_h (X W_h).

    With X in the place of G, A_h^T in that of A_h and W_h^T in that of W_h, that is the gradient of X in the module's
    docstring: the two orders are each other's adjoints, and the same two functions serve both.
    """
    return weight.shape[2] < x.shape[-1]


def _swapped(x: Tensor, weight: Tensor, factors: Sequence[Tensor], groups: int) -> tuple[Tensor, ...]:
    return x, transposed(weight, groups), *(factor.mT for factor in factors)


def _outputs(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))


def _contract(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The products of the module's docstring, strip by strip."""
    out = _outputs(x, weight, factors)
    for strip in strips(factors):
        _contract_blocks(x[:, :, strip.keys], weight, within(factors, strip), out[:, :, strip.queries])
    return out


def _contract_blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor], out: Tensor) -> None:
    """The same, a block at a time, into `out`."""
    exact, groups = _exact(x), _groups(x, weight)
    for block in blocks(x, weight, factors):
        part = out[block.images, block.rows]
        total: Tensor | None = None
        for group in block.groups:
            mixed, matrices = _mix(x, factors, block, group)[0], weight[group.heads]
            if total is None:
                total = project(mixed, matrices, groups).to(exact if len(block.groups) > 1 else x.dtype)
            elif groups == 1 and total.dtype == mixed.dtype:
                total.addmm_(mixed.flatten(1), matrices.flatten(0, 1))
            else:
                total += project(mixed, matrices, groups)
        assert total is not None
        part.copy_(total.view(part.shape))


def _mix(
    x: Tensor, factors: Sequence[Tensor], block: Block, group: Group
) -> tuple[Float[Tensor, "points g c"], list[Tensor]]:
    """M of a block and a group of heads, its points row-major; and what each axis met.

    Returns:
        M, and the inputs (b, g, rows, *sizes, c) of the axes after the first.
    """
    images = x[block.images]
    first = factors[0][group.heads, block.rows, group.keys]  # (g, rows, keys)
    part = _each(first.flatten(0, 1), images[:, group.keys].flatten(2))
    part = part.reshape(images.shape[0], *first.shape[:2], *x.shape[2:])
    met = []
    for dim, (factor, tiles) in enumerate(zip(factors[1:], group.tiles, strict=True), start=3):
        met.append(part)
        part = _along(part, factor[group.heads], tiles, dim)
    return part.movedim(1, -2).flatten(-2).flatten(0, -2).unflatten(1, (-1, x.shape[-1])), met


def _each(matrix: Float[Tensor, "q k"], parts: Float[Tensor, "b k rest"]) -> Float[Tensor, "b q rest"]:
    """The same matrix for every part; `matmul` would transpose the parts and copy the product."""
    return torch.bmm(matrix.expand(parts.shape[0], -1, -1), parts)


def _along(part: Tensor, factor: Float[Tensor, "g q k"], tiles: tuple[Tile, ...], dim: int) -> Tensor:
    """One more axis mixed, per head: (b, g, rows, .., k, .., c) -> (b, g, rows, .., q, .., c)."""
    made = []
    for tile in tiles:
        keys = part[(slice(None),) * dim + (tile.keys,)].flatten(dim + 1)
        made.append(_beside(factor[:, tile.queries, tile.keys], dim) @ keys)
    return (made[0] if len(made) == 1 else torch.cat(made, dim)).unflatten(-1, part.shape[dim + 1 :])


def _beside(matrix: Float[Tensor, "g q k"], dim: int) -> Tensor:
    """A matrix per head that multiplies axis `dim` of (b, g, rows, .., k, rest)."""
    return matrix.reshape(matrix.shape[0], *(1,) * (dim - 2), *matrix.shape[1:])


def _pull(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    """Gradients of x, of the weights and of the factors, as far as they are wanted; strip by strip."""
    x, weight, *factors = inputs
    parts = strips(factors)
    if len(parts) == 1:
        found = _pull_blocks(x, weight, factors, gradient, wanted)
    else:
        found = [
            torch.zeros_like(tensor, dtype=_exact(x)) if want else None
            for tensor, want in zip(inputs, wanted, strict=True)
        ]
        for strip in parts:
            pulled = _pull_blocks(
                x[:, :, strip.keys], weight, within(factors, strip), gradient[:, :, strip.queries], wanted
            )
            for place, (total, part) in enumerate(zip(found, pulled, strict=True)):
                if total is not None and part is not None:
                    into = {0: total[:, :, strip.keys], 3: total[:, strip.queries, strip.keys]}.get(place, total)
                    into += part
    return tuple(None if grad is None else grad.to(x.dtype) for grad in found)


def _pull_blocks(
    x: Tensor, weight: Tensor, factors: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same, a block at a time."""
    exact, groups = _exact(x), _groups(x, weight)
    moving = any(wanted[2:])
    parts = list(blocks(x, weight, factors))
    once = all(len(block.groups) == 1 and block.rows == parts[0].rows for block in parts)  # one block per image
    to_x = torch.zeros_like(x, dtype=x.dtype if once else exact) if wanted[0] else None
    to_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
    to_factors = [torch.zeros_like(factor, dtype=exact) for factor in factors] if moving else []
    for block in parts:
        part = gradient[block.images, block.rows].flatten(0, -2)  # (points, d)
        for group in block.groups:
            met: list[Tensor] = []
            if moving or to_weight is not None:
                mixed, met = _mix(x, factors, block, group)
                if to_weight is not None:
                    to_weight[group.heads] += project_gradient(mixed, part, groups)
                del mixed
            if moving or to_x is not None:
                back = project_back(part, weight[group.heads], groups)
                _unmix(x, factors, block, group, back, met, to_x, to_factors)
    return [to_x, to_weight, *(to_factors if moving else [None] * len(factors))]


def _exact(x: Tensor) -> torch.dtype:
    """In which sums over blocks lose nothing."""
    return torch.promote_types(x.dtype, torch.float32)


def _unmix(
    x: Tensor,
    factors: Sequence[Tensor],
    block: Block,
    group: Group,
    gradient: Float[Tensor, "points g c"],
    met: list[Tensor],
    to_x: Tensor | None,
    to_factors: list[Tensor],
) -> None:
    """Carry the gradient of M back through every axis, and add what x and the factors get of it."""
    images, sizes = x[block.images], [factor.shape[1] for factor in factors[1:]]
    first = factors[0][group.heads, block.rows, group.keys]  # (g, rows, keys)
    part = gradient.reshape(images.shape[0], first.shape[1], *sizes, first.shape[0], x.shape[-1])
    part = part.movedim(-2, 1).contiguous()  # (b, g, rows, *queries, c)
    for axis in range(len(factors) - 1, 0, -1):
        known, into = (met[axis - 1], to_factors[axis]) if to_factors else (None, None)
        part = _back_along(part, factors[axis], group.heads, group.tiles[axis - 1], axis + 2, known, into)
    flat = part.flatten(1, 2).flatten(2)  # (b, g rows, rest)
    if to_factors:
        outer = (flat @ images[:, group.keys].flatten(2).mT).sum(0, dtype=to_factors[0].dtype)
        to_factors[0][group.heads, block.rows, group.keys] += outer.reshape(first.shape)
    if to_x is not None:
        back = _each(first.flatten(0, 1).mT, flat)
        to_x[block.images, group.keys] += back.reshape(images.shape[0], -1, *x.shape[2:])


def _back_along(
    gradient: Tensor,
    factor: Float[Tensor, "h q k"],
    heads: slice,
    tiles: tuple[Tile, ...],
    dim: int,
    met: Tensor | None,
    into: Tensor | None,
) -> Tensor:
    """The adjoint of `_along`, which also adds the factor's own gradient `into` place if it is told what it `met`."""
    chosen, rest = factor[heads], gradient.shape[dim + 1 :]
    whole = len(tiles) == 1
    back = None if whole else gradient.new_zeros((*gradient.shape[:dim], factor.shape[2], *rest))
    for tile in tiles:
        part = gradient[(slice(None),) * dim + (tile.queries,)].flatten(dim + 1)
        if met is not None and into is not None:
            keys = met[(slice(None),) * dim + (tile.keys,)].flatten(dim + 1)
            outer = part @ keys.mT  # (b, g, rows, .., q, k)
            others = (0, *range(2, dim))
            into[heads, tile.queries, tile.keys] += outer.sum(others, dtype=into.dtype)
        carried = (_beside(chosen[:, tile.queries, tile.keys].mT, dim) @ part).unflatten(-1, rest)
        if back is None:
            size = tile.keys.stop - tile.keys.start
            if size == factor.shape[2]:
                return carried
            back = gradient.new_zeros((*gradient.shape[:dim], factor.shape[2], *rest))
        back[(slice(None),) * dim + (tile.keys,)] += carried
    assert back is not None
    return back


_contraction = recomputing(contract_plainly, _forward, _gradients)
