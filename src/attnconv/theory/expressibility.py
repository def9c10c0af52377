"""Test of Lemma 3: which convolutions an attention layer can express with suitable value weights.

Let A_q be the attention rows of query q (heads x keys) and E_q the indicators of the kernel positions (kernel
positions x keys). A layer with matrices W_h is equivalent to the convolution with matrices W_j if, at every q,

    sum_h A_q[h] W_h = sum_j E_q[j] W_j,     which has a solution for every kernel if and only if     E_q = Phi A_q

for all q with ONE matrix Phi (kernel positions x heads); then W_h = sum_j Phi[j, h] W_j. The paper only requires that
the row space of A_q contains that of E_q, so that each q may have its own Phi_q: necessary, but not sufficient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index, is_real
from attnconv.grid import Grid, Padding, per_axis
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.operators.dense import Dense
from attnconv.theory.conv_taps import padding_of, tap_shifts
from attnconv.theory.lemma3_best_weights import Fit, Residuals, Shifts, Spans, layer_operator, residual

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@final
@dataclass(frozen=True, eq=False)
class Expressiveness:
    """Result of `can_express`. A query is *inside* if all of its taps are in the image.

    Attributes:
        kernel_size: Kernel size per axis.
        uniform: Fit of one matrix Phi, used for all queries.
        uniform_inside: Fit of one Phi to the queries inside; None if no query is inside.
        each_query: Residuals of the paper's condition, with a separate Phi_q for each query (and for each image if
            attention depends on content): the largest ||E_q - Phi_q A_q|| / ||E_q|| in each set of queries.
        tolerance: Largest residual that counts as zero.
    """

    kernel_size: tuple[int, ...]
    uniform: Fit
    uniform_inside: Fit | None
    each_query: Residuals
    tolerance: float

    @property
    def expresses(self) -> bool:
        """Whether the layer can express every convolution of this kernel size, at every query."""
        return self.uniform.worst <= self.tolerance

    @property
    def expresses_inside(self) -> bool | None:
        """`expresses` for the queries inside only; None if there are none."""
        return None if self.uniform_inside is None else self.uniform_inside.worst <= self.tolerance

    @property
    def missed(self) -> float:
        """Largest residual over queries inside (all if none is inside), with the weights that fit all of them best."""
        return (self.uniform if self.uniform_inside is None else self.uniform_inside).worst

    @property
    def expresses_each_query(self) -> bool:
        """Whether the paper's condition holds, which allows different weights for each query."""
        return self.each_query.everywhere <= self.tolerance


@final
@dataclass(frozen=True, eq=False)
class Factorisation:
    """Matrices of the (exact or approximate) factorisation E_q = Phi A_q for one query, as in the paper's Figure 11.

    Attributes:
        indicators: E_q, kernel positions x keys. Each row has a single 1, or only zeros if the tap reads zero padding.
        phi: Phi, kernel positions x heads.
        rows: A_q, heads x keys.
        shifts: Shift (key minus query) of each kernel position, row-major.
        query: Index of the query along each axis, from 0.
        sizes: Number of keys per axis; keys are row-major.
    """

    indicators: Float[Tensor, "j m"]
    phi: Float[Tensor, "j h"]
    rows: Float[Tensor, "h m"]
    shifts: Shifts
    query: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def residual(self) -> float:
        """Relative residual ||E_q - Phi A_q|| / ||E_q||; if E_q is zero, 0 if Phi A_q is too, otherwise infinite."""
        return float(residual(self.rows.mT, self.indicators.mT, self.phi))


def can_express(
    attention: SelfAttention | Float[Tensor, "*b h n m"],
    kernel_size: int | Sequence[int],
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] | None = None,
    padding: Literal["same", "valid"] | Padding = "same",
    padding_mode: str = "zeros",
    tolerance: float | None = None,
) -> Expressiveness:
    """Test whether attention can express every convolution of a given kernel size; return residuals (Lemma 3).

        E_q = Phi A_q   must hold with one Phi for all queries q, and for all images if attention depends on content

    Row j of E_q has a 1 at the key under tap j; row h of A_q contains the probabilities of head h. The result is valid
    for images of the given size and for unrestricted weights W_h: merged weights, or factored ones with at least as
    many `head_channels` as output channels. For each query, a matrix of size keys x (heads + kernel positions) is
    decomposed in float64 (by QR), so use an image not much larger than the kernel.

    Args:
        attention: A layer, or attention rows (probabilities) from any library: (h, n, m), or (b, h, n, m) if they
            depend on the image, with row-major queries and keys and without class tokens.
        kernel_size: Kernel size, one number or one per axis.
        x: Images, only for a layer. Required if its attention depends on content; otherwise only their size is used.
        sizes: Image size per axis, in positions; required with attention rows; may replace x for a position-only layer.
        dilation: Dilation of the kernel, one number or one per axis.
        stride: Distance between queries, in positions; None for the stride of the layer, or 1 with attention rows.
        padding: Position of the kernel: tap j has the shift dilation * j - padding, with the opposite sign in a
            transposed layer. Numbers as in `Grid.make`; `valid` for 0; or `same` as in PyTorch, for dilation *
            (kernel_size - 1) // 2, which centres the kernel on the query (an even extent reaches one position further
            after the query). With a transposed layer, `same` is the padding of the layer. Attention rows must have
            ceil(size / stride) queries per axis for `same`, otherwise as many as the convolution has outputs.
        padding_mode: Values that taps read outside the image: `zeros`, `replicate`, `reflect` or `circular`.
        tolerance: Relative residual up to which a convolution counts as expressed. The default depends on the dtype of
            the rows: 1e-10 for float64, 1e-5 for float32, 2e-3 for float16 and 2e-2 for bfloat16. Rounding of the rows
            causes a residual of a few machine epsilons, multiplied by the norm of Phi if heads are similar.

    Raises:
        TypeError: If `attention` is neither a layer nor a floating-point tensor.
        ValueError: If the image size is missing, is given twice or does not match the rows; if attention depends on
            content and `x` is missing; if rows are not finite; or if an argument is out of range.

    Example:
        >>> one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)  # head h attends to key h for every query
        >>> answer = can_express(one_pixel_each, kernel_size=1, sizes=(2,))
        >>> answer.expresses_each_query, answer.expresses
        (True, False)
    """
    if tolerance is not None and not (is_real(tolerance) and tolerance >= 0):
        raise ValueError(bad("tolerance", "must be finite and at least 0", repr(tolerance)))
    with torch.no_grad():
        spans, kernel = _laid_over(attention, kernel_size, x, sizes, dilation, stride, padding, padding_mode)
        most = _TOLERANCES[spans.dtype] if tolerance is None else tolerance
        return Expressiveness(kernel, *spans.fit(), most)


def factorise(
    attention: SelfAttention | Float[Tensor, "*b h n m"],
    kernel_size: int | Sequence[int],
    *,
    query: Sequence[int],
    phi: Float[Tensor, "j h"] | None = None,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] | None = None,
    padding: Literal["same", "valid"] | Padding = "same",
    padding_mode: str = "zeros",
) -> Factorisation:
    """Return the matrices E_q, Phi and A_q for one query, as in the paper's Figure 11; see also `draw_factorisation`.

    `query` is the index of the query along each axis, from 0, such as (row, column). `phi` is a fitted matrix, such as
    `can_express(...).uniform.phi`; None for the matrix that fits this query best. The other arguments are those of
    `can_express`; if there are several images, only the first is used.

    Raises:
        TypeError, ValueError: As in `can_express`, or if `query` is outside the grid or `phi` has the wrong shape.

    Example:
        >>> one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)
        >>> [factorise(one_pixel_each, 1, query=(q,), sizes=(2,)).phi.tolist() for q in (0, 1)]
        [[[1.0, 0.0]], [[0.0, 1.0]]]
    """
    with torch.no_grad():
        spans, _ = _laid_over(attention, kernel_size, x, sizes, dilation, stride, padding, padding_mode)
        grid, shape = spans.operator.grid, (len(spans.shifts), spans.heads)
        place = tuple(query) if isinstance(query, Sequence) else (query,)  # type: ignore[redundant-expr]
        limits = grid.query_sizes
        if len(place) != len(limits) or not all(is_index(i) and 0 <= i < n for i, n in zip(place, limits, strict=True)):
            raise ValueError(bad("query", f"must have one index per axis of the query grid {limits}", place))
        flat = torch.arange(grid.query_count, device=spans.operator.device).reshape(grid.query_sizes)[place]
        rows, seen = (part[0, 0] for part in spans.of(flat[None]))
        phi = spans.solve(rows, seen)[0] if phi is None else phi.to(rows)
        if tuple(phi.shape) != shape:
            raise ValueError(bad("phi", f"must have shape {shape} (kernel positions, heads)", tuple(phi.shape)))
        return Factorisation(seen.mT, phi, rows.mT, spans.shifts, place, grid.sizes)


def _laid_over(
    attention: SelfAttention | Tensor,
    kernel_size: int | Sequence[int],
    x: Tensor | None,
    sizes: Sequence[int] | None,
    dilation: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: Literal["same", "valid"] | Padding,
    padding_mode: str,
) -> tuple[Spans, tuple[int, ...]]:
    """Return attention rows with the kernel positions to compare them with, and the kernel size per axis."""
    layer = attention if isinstance(attention, SelfAttention) else None
    image = _sizes_of_rows(attention, x, sizes) if layer is None else ()
    dims, transposed = (len(image), False) if layer is None else (layer.dims, layer.transposed)
    kernel = per_axis("kernel_size", kernel_size, dims, least=1)
    steps = per_axis("dilation", dilation, dims, least=1)
    own = None if layer is None or not transposed or padding != "same" else layer.padding
    pads = own or padding_of(padding, kernel, steps)
    if layer is None:
        window = [step * (size - 1) + 1 for size, step in zip(kernel, steps, strict=True)]
        grid = Grid.make(image, stride=1 if stride is None else stride, padding=pads, window=window)
        expected, rows = (grid.query_count, grid.key_count), cast("Tensor", attention).detach()
        if rows.dim() not in (3, 4) or rows.shape[-2:] != expected or 0 in rows.shape:
            rule = f"must have shape ([batch,] heads, {expected[0]}, {expected[1]}) for images of size {grid.sizes}"
            fix = "Remove the rows and columns of class tokens."
            raise ValueError(bad("attention", rule, f"shape {tuple(rows.shape)}", fix))
        operator: AttentionOperator = Dense(grid, rows[None] if rows.dim() == 3 else rows)
    elif stride is not None and per_axis("stride", stride, dims, least=1) != layer.stride:
        raise ValueError(bad("stride", f"must be None or the layer's stride {layer.stride}", stride))
    else:
        operator = layer_operator(layer, x, sizes)
    return Spans(operator, tap_shifts(kernel, steps, pads, transposed=transposed), padding_mode), kernel


def _sizes_of_rows(attention: object, x: Tensor | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    if not isinstance(attention, Tensor):
        got = type(attention).__name__
        raise TypeError(bad("attention", "must be a SelfAttention layer or a tensor of attention rows", got))
    if attention.dtype not in _TOLERANCES:
        got, fix = str(attention.dtype), "Convert with rows.double()."
        raise TypeError(bad("attention", "must have a floating-point dtype", got, fix))
    if x is not None:
        raise ValueError(bad("x", "must be None with attention rows", f"shape {tuple(x.shape)}", "Pass only sizes."))
    if sizes is None:
        raise ValueError(bad("sizes", "must be given with attention rows", None, "Pass the image size per axis."))
    dims = len(sizes) if isinstance(sizes, Sequence) else 1  # type: ignore[redundant-expr]
    return per_axis("sizes", sizes, dims, least=1)
