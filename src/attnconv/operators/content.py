"""Content operator: scores computed from the image plus optional position scores, equations (7) and (8).

    A = softmax(Q K^T + sum_a B_a),    one bias B_a,h[q, k_a] per axis

Rows are computed one block at a time, without materialising an n x n matrix. The backward pass recomputes the
probabilities P of each block, unless there are at most as many keys as channels of a query: then P is saved. With G the
gradient of the output,

    dV = P^T G,  dS = P * (G V^T - sum_k P * G V^T),  dQ = dS K,  dK = dS^T Q,  dB_a = dS summed over the other axes

On CUDA, biases are appended to queries, and one-hot vectors to keys, for `scaled_dot_product_attention`:

    Q' = [Q, B_1, .., B_a],    K' = [K, one-hot of k_1, .., one-hot of k_a],    Q' K'^T = Q K^T + sum_a B_a[q, k_a]

In half precision, each bias is split into its rounded value and the remainder, which together have a precision of 16
bits in bfloat16 and 22 bits in float16. FlashAttention kernels support up to 256 channels, including those of the
biases; for more channels, PyTorch uses its memory-efficient kernel.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid, per_axis
from attnconv.operators.base import (
    Images,
    LatticeOperator,
    Outputs,
    Weights,
    full_precision,
    product_dtype,
    score_dtype,
)
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import axis_sum, project, project_heads
from attnconv.operators.kernels.recompute_in_backward import Gradients, recomputing

Buffers: TypeAlias = dict[int, Tensor]
FUSED_ON = ("cuda",)  # device types with fused kernels
ALIGNED = 8  # half-precision kernels require a multiple of this number of channels


@final
class Content(LatticeOperator):
    """Attention operator with scores from content and, optionally, position scores that are sums over axes.

    Args:
        grid: Grid of queries and keys.
        queries: Query vectors, already multiplied by the scale of the scores, (1 or b, h, n, e).
        keys: Key vectors of the lattice points (keys and padding, see `attnconv.grid`), (1 or b, h, lattice, e), or
            (1 or b, 1, lattice, e) if all heads share them.
        biases: Position scores, one tensor (1 or b, h, n, lattice_a) for each axis a with lattice_a points; or empty.
    """

    def __init__(
        self,
        grid: Grid,
        queries: Float[Tensor, "#b h n e"],
        keys: Float[Tensor, "#b #h lattice e"],
        *,
        biases: Sequence[Float[Tensor, "#b h n _"]] = (),
    ) -> None:
        self.grid = grid
        self.queries = queries
        self.keys = keys
        self.biases = tuple(biases)
        self.heads = queries.shape[1]
        self.batch = _batch(queries, keys)
        self.device = queries.device

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        lattice = self.grid.extend(x).flatten(1, -2)  # (b, lattice, c)
        if weight.shape[2] < x.shape[-1]:
            out = self._attend(project_heads(lattice, weight, groups).transpose(1, 2)).sum(1)
        else:
            out = project(self._attend(lattice[:, None]).transpose(1, 2), weight, groups)
        return out.unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return self._attend(self.grid.extend(values).flatten(2, -2)).unflatten(2, self.grid.query_sizes)

    def _attend(self, values: Float[Tensor, "b #h lattice e"]) -> Float[Tensor, "b h n e"]:
        return attend(self.queries, self.keys, values, self.biases)

    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        with full_precision(self.device):
            scores = self.queries.index_select(2, queries).to(self.keys.dtype) @ self.keys.mT
            if self.biases:
                scores = scores + axis_sum([bias.index_select(2, queries) for bias in self.biases])
            return torch.softmax(scores, -1)


def attention_with_relative_bias(
    q: Float[Tensor, "b h n e"],
    k: Float[Tensor, "b h n e"],
    v: Float[Tensor, "b h n f"],
    row_table: Float[Tensor, "*h_rows rows e"],
    column_table: Float[Tensor, "*h_columns columns e"],
    *,
    sizes: tuple[int, int],
    scale: float | None = None,
) -> Float[Tensor, "b h n f"]:
    """Compute attention over an image with learned vectors for relative rows and columns.

        softmax_k( scale * q_q . (k_k + row_table[k_1 - q_1] + column_table[k_2 - q_2]) ) v_k

    The result is exact and differentiable with respect to all five tensors. Unlike `scaled_dot_product_attention`, this
    function needs no n x n bias; for the backward pass, it saves the inputs and, for each query and head,
    (height + width) numbers and, only if n <= e, the n probabilities. The formula indexes tables by shift: shift s is
    stored in entry s + t of a table with 2 t + 1 entries, and shifts outside [-t, t] are clamped to this range.

    Args:
        q: Query vectors of all positions in row-major order, (b, h, n, e).
        k: Key vectors, (b, h, n, e).
        v: Value vectors of any length f, (b, h, n, f).
        row_table: Vectors for the row shifts (key minus query), (2 t + 1, e), or separately per head, (h, 2 t + 1, e).
        column_table: Vectors for the column shifts, in the same format; t may differ.
        sizes: Height and width of the image, in positions; height * width = n.
        scale: Factor by which all scores are multiplied; None for 1 / sqrt(e).

    Raises:
        ValueError: If the shapes do not match, or a table has an even number of entries.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 4, 12, 8).unbind()  # two images of 3 x 4 positions, four heads
        >>> attention_with_relative_bias(q, k, v, torch.randn(5, 8), torch.randn(7, 8), sizes=(3, 4)).shape
        torch.Size([2, 4, 12, 8])
    """
    height, width = per_axis("sizes", sizes, 2, least=1)
    count = height * width
    if q.ndim != 4 or q.shape != k.shape or q.shape[:-1] != v.shape[:-1] or q.shape[2] != count:
        got = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} for {height} x {width} positions"
        raise ValueError(bad("q, k, v", "must be of shape (b, h, height * width, channels)", got))
    # Compute biases in the dtype of scores, because they are large if a head is sharp.
    scaled = q.to(score_dtype(q.dtype)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    biases = []
    for dim, (name, table) in enumerate((("row_table", row_table), ("column_table", column_table))):
        fits = table.dim() == 2 or (table.dim() == 3 and table.shape[0] == q.shape[1])
        if not fits or table.shape[-1] != q.shape[-1] or table.shape[-2] % 2 == 0:
            requirement = f"must be of shape (2 t + 1, {q.shape[-1]}) or ({q.shape[1]}, 2 t + 1, {q.shape[-1]})"
            raise ValueError(bad(name, requirement, f"shape {tuple(table.shape)}"))
        with full_precision(q.device):
            biases.append(axis_scores(scaled, table, dim, (height, width)))
    return attend(scaled, k, v, biases)


def axis_scores(q: Tensor, table: Tensor, dim: int, sizes: Sequence[int]) -> Float[Tensor, "b h n size"]:
    """Compute q . table[k_a - q_a] for all positions k_a along an axis."""
    most, places = table.shape[-2] // 2, torch.arange(sizes[dim], device=q.device)
    vectors = table[..., (places - places[:, None]).clamp(-most, most) + most, :].to(q.dtype)  # (.., q_a, k_a, e)
    per_head = "h" if table.dim() == 3 else ""
    along = "bhxye,{}xke->bhxyk" if dim == 0 else "bhxye,{}yke->bhxyk"
    return torch.einsum(along.format(per_head), q.unflatten(2, sizes), vectors).flatten(2, 3)


def attend(
    queries: Float[Tensor, "#b h n e"],
    keys: Float[Tensor, "#b #h lattice e"],
    values: Float[Tensor, "b #h lattice f"],
    biases: Sequence[Float[Tensor, "#b h n _"]],
) -> Float[Tensor, "b h n f"]:
    """Compute softmax(Q K^T + sum_a B_a) V, with fused kernels on CUDA, otherwise in blocks of rows.

    Queries must already be scaled; `biases` contains the position scores B_a of each axis a. Scores are computed in at
    least float32, and other products in bfloat16 if this is the dtype of the values or of autocast. Fused kernels
    multiply in the dtype of the values but sum in float32.
    """
    exact, fused, result = score_dtype(values.dtype), values.device.type in FUSED_ON, product_dtype(values)
    if not fused and keys.shape[1] == values.shape[1] == 1 < queries.shape[1]:
        # Heads that share keys and values are more queries of one head; a GPU computes heads in parallel.
        flat, *along = (part.transpose(1, 2).flatten(1, 2)[:, None] for part in (queries, *biases))
        return attend(flat, keys, values, along).squeeze(1).unflatten(1, queries.shape[2:0:-1]).transpose(1, 2)
    factors = values.dtype if fused else exact
    mixed = result if result is torch.bfloat16 and not fused else factors
    queries = queries if queries.dtype == mixed else queries.to(factors)
    inputs = [queries, keys.to(factors), values.to(mixed), *(bias.to(exact) for bias in biases)]
    saves = torch.is_grad_enabled() and keys.shape[2] <= queries.shape[3]
    with full_precision(values.device):
        out = attend_folded(*inputs) if fused else _saving(*inputs) if saves else _attention(*inputs)
        return out.to(result)


def _forward(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor, saves: bool = False) -> tuple[Tensor, ...]:
    """Compute `attend` one block of rows at a time; return the output and, if `saves`, all probabilities."""
    batch, shape = _batch(queries, keys, values, *biases), queries.shape[1:3]
    out = values.new_empty((batch, *shape, values.shape[-1]))
    saved = [values.new_empty((_batch(queries, keys, *biases), *shape, keys.shape[2]))] if saves else []
    held: Buffers = {}
    for images, rows in _blocks(batch, queries, keys):
        query, key, value, *bias = _part(images, rows, queries, keys, values, *biases)
        weights = _converted(_rows(query, key, bias, held), value.dtype, held, 3)
        for all_rows in saved:
            _part(images, rows, all_rows)[0].copy_(weights)
        _write_product(weights, value, out[images, :, rows], held, 2)
    return out, *saved


def _gradients(
    inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool], saved: Tensor | None = None
) -> Gradients:
    del wanted  # almost all of the work is needed for any gradient
    queries, keys, values, *biases = inputs
    batch, exact, mixed = gradient.shape[0], score_dtype(values.dtype), values.dtype
    shared = len(queries) != batch  # otherwise, only one block contributes to the gradient of a query
    # Gradients of keys and values are summed transposed: P is contiguous in keys, so G^T P is faster than P^T G.
    totals = [
        queries.new_zeros(queries.shape, dtype=exact) if shared else queries.new_empty(queries.shape),
        *(tensor.new_zeros(tensor.mT.shape, dtype=exact) for tensor in (keys, values)),
        *(bias.new_zeros(bias.shape) for bias in biases),
    ]
    held: Buffers = {}
    for images, rows in _blocks(batch, queries, keys):
        query, key, value, *bias = _part(images, rows, *inputs)
        into = _part(images, rows, *totals)
        weights = _rows(query, key, bias, held) if saved is None else _part(images, rows, saved)[0]
        part = gradient[images, :, rows]
        # Gradients of the probabilities, in the buffer of the scores if it has their dtype.
        slopes = _buffer(held, 0 if mixed == exact else 4, (*part.shape[:-1], keys.shape[2]), part)
        _add_outer(into[2], part, _converted(weights, mixed, held, 3))
        slopes = _converted(_product(part, value.mT, slopes), exact, held, 0)
        weights = _converted(weights, exact, held, 1).expand_as(slopes).contiguous()
        descent = _buffer(held, 2, slopes.shape, slopes)
        torch.ops.aten._softmax_backward_data.out(slopes, weights, -1, exact, grad_input=descent)
        steep, query, key = _converted(descent, mixed, held, 3), query.to(mixed), key.to(mixed)
        if shared:
            _add(into[0], _product(steep, key, _buffer(held, 5, (*descent.shape[:-1], key.shape[-1]), key)))
        else:
            _write_product(steep, key, into[0], held, 5)
        _add_outer(into[1], query, steep)
        if biases:
            grid = descent.unflatten(-1, [bias.shape[-1] for bias in biases])
            for dim, total in enumerate(into[3:]):
                others = [3 + axis for axis in range(len(biases)) if axis != dim]
                _add(total, grid.sum(others) if others else grid)
    return tuple(total.mT if place in (1, 2) else total for place, total in enumerate(totals))


def _batch(*tensors: Tensor) -> int:
    """Return the number of images, which may be 0; tensors that all images share have size 1."""
    return next((tensor.shape[0] for tensor in tensors if tensor.shape[0] != 1), 1)


def _buffer(held: Buffers, place: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialised tensor in a buffer that all blocks share, which avoids page faults."""
    size = math.prod(shape)
    if place not in held or held[place].numel() < size:
        held[place] = like.new_empty(size)
    return held[place][:size].view(*shape)


def _converted(tensor: Tensor, dtype: torch.dtype, held: Buffers, place: int) -> Tensor:
    """Convert to `dtype`, in a buffer."""
    if tensor.dtype == dtype:
        return tensor
    held.setdefault(place, tensor.new_empty(0, dtype=dtype))
    return _buffer(held, place, tensor.shape, held[place]).copy_(tensor)


def _blocks(batch: int, queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of images and of queries such that each block has about `SCORES_BLOCK` bytes of scores."""
    heads, count = queries.shape[1:3]
    most = block_sizes.SCORES_BLOCK // (keys.element_size() * heads * keys.shape[2])  # rows of all heads
    rows = min(max(most, block_sizes.LEAST_ROWS), count)
    for images in block_sizes.spans(batch, max(most // count, 1)):
        for some in block_sizes.spans(count, rows):
            yield images, some


def _part(images: slice, rows: slice, *inputs: Tensor) -> list[Tensor]:
    """Return views of all inputs for one block; inputs shared by all images are not indexed by image."""
    chosen = [part if part.shape[0] == 1 else part[images] for part in inputs]
    return [part if place in (1, 2) else part[:, :, rows] for place, part in enumerate(chosen)]


def _rows(queries: Tensor, keys: Tensor, biases: Sequence[Tensor], held: Buffers) -> Float[Tensor, "b h r lattice"]:
    """Compute the probabilities of a block in the second buffer."""
    batch = _batch(queries, keys, *biases)
    queries = _converted(queries, keys.dtype, held, 6)
    scores = _buffer(held, 0, (batch, *queries.shape[1:3], keys.shape[2]), queries)
    if biases:  # write them first, then add the product in place
        grid = scores.view(*scores.shape[:-1], *(bias.shape[-1] for bias in biases))
        shapes = [[-1 if axis == dim else 1 for axis in range(len(biases))] for dim in range(len(biases))]
        along = [bias.unflatten(-1, shape) for bias, shape in zip(biases, shapes, strict=True)]
        grid.copy_(along[0]) if len(along) == 1 else torch.add(along[0].expand_as(grid), along[1], out=grid)
        for bias in along[2:]:
            grid += bias
    _product(queries, keys.mT, scores, add=bool(biases))
    return torch.softmax(scores, -1, out=_buffer(held, 1, scores.shape, scores))


def _product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Compute left @ right in contiguous `out`, or add it, with one product per image if all heads share `right`."""
    shared = (1, 2) if right.shape[1] == 1 else (0, 1)
    left, right = left.expand(len(out), -1, -1, -1).flatten(*shared), right.expand(len(out), -1, -1, -1)
    flat, right = out.flatten(*shared), right[:, 0] if right.shape[1] == 1 else right.flatten(0, 1)
    if add:
        torch.baddbmm(flat, left, right, out=flat)  # PyTorch counts the FLOPs of this form, but not of baddbmm_
    else:
        torch.bmm(left, right, out=flat)
    return out


def _write_product(left: Tensor, right: Tensor, out: Tensor, held: Buffers, place: int) -> None:
    """Compute left @ right in a view."""
    if out.is_contiguous() and out.dtype == left.dtype:
        _product(left, right, out)
    else:
        out.copy_(_product(left, right, _buffer(held, place, out.shape, left)))


def _add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right to a view, summed over heads or images that share the view."""
    if total.shape[1] == 1:
        _add(total[:, 0], left.flatten(1, 2).mT @ right.flatten(1, 2))
    elif total.shape[0] == left.shape[0] == right.shape[0] and total.dtype == left.dtype:
        flat = total.flatten(0, 1)
        torch.baddbmm(flat, left.mT.flatten(0, 1), right.flatten(0, 1), out=flat)
    else:
        _add(total, left.mT @ right)


def _add(total: Tensor, part: Tensor) -> None:
    """Add `part` to a view, summed over images if they share the view."""
    total += part if part.shape[0] == total.shape[0] else part.sum(0, keepdim=True)


def _folded(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    batch, heads = values.shape[0], queries.shape[1]
    sizes = [bias.shape[-1] for bias in biases]
    left, right = [queries], [keys]
    for dim, bias in enumerate(biases):
        one_hot = torch.eye(sizes[dim], dtype=keys.dtype, device=keys.device)
        one_hot = one_hot.repeat_interleave(math.prod(sizes[dim + 1 :]), 0).repeat(math.prod(sizes[:dim]), 1)
        parts = _split(bias, queries.dtype)
        left += parts
        right += [one_hot] * len(parts)
    query = torch.cat([part.expand(batch, -1, -1, -1) for part in left], -1)
    key = torch.cat([part.expand(batch, heads, -1, -1) for part in right], -1)
    channels = -(-max(query.shape[-1], values.shape[-1]) // ALIGNED) * ALIGNED
    query, key, value = (F.pad(part, (0, channels - part.shape[-1])) for part in (query, key, values))
    out = F.scaled_dot_product_attention(query, key, value.expand(-1, heads, -1, -1), scale=1.0)
    return out[..., : values.shape[-1]]


def _split(bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Split the bias into one or two tensors of the queries' dtype whose sum is the bias."""
    if torch.promote_types(bias.dtype, dtype) == dtype:
        return (bias.to(dtype),)
    high = bias.detach().to(dtype)  # both use the same one-hot channels, so only the remainder needs a gradient
    return high, (bias - high.to(bias.dtype)).to(dtype)


def attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    """Compute `attend` with all scores at once; supports higher derivatives, compilers and function transforms."""
    exact = score_dtype(values.dtype)
    scores = queries.to(exact) @ keys.to(exact).mT
    scores = scores + axis_sum([bias.to(exact) for bias in biases]) if biases else scores
    return (torch.softmax(scores, -1) @ values.to(exact)).to(values.dtype)


_attention = recomputing(attend_plainly, _forward, _gradients)
_saving = recomputing(attend_plainly, functools.partial(_forward, saves=True), _gradients)
attend_folded = recomputing(attend_plainly, _folded)  # fused kernels have no second derivative
