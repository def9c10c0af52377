"""Decide Lemma 3: which convolutions an attention layer can express, for some value weights.

Let A_q be the attention rows of query q (heads x keys) and E_q the indicators of the kernel's positions (kernel
positions x keys). A layer with matrices W_h equals the convolution with matrices W_j for every image when, at every q,

    sum_h A_q[h] W_h = sum_j E_q[j] W_j,     and for every kernel if and only if     E_q = Phi A_q     for ALL q,

with ONE matrix Phi (kernel positions x heads); then W_h = sum_j Phi[j, h] W_j. The paper asks that row(E_q) lie inside
row(A_q) for each q, which allows each query a Phi_q of its own: necessary, but not sufficient (see `can_express`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real
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
    """Which kernels of one size an attention layer expresses: both readings of Lemma 3.

    Attributes:
        kernel_size: Per axis.
        uniform: One Phi for all queries. Its residual at the worst of them decides.
        uniform_inside: One Phi for the queries all of whose taps lie in the image; None if there is none.
        each_query: The paper's condition, each query with its own Phi_q (and each image, where rows depend on
            content): the largest ||E_q - Phi_q A_q|| / ||E_q|| among the queries named.
        tolerance: The largest residual that counts as none.
    """

    kernel_size: tuple[int, ...]
    uniform: Fit
    uniform_inside: Fit | None
    each_query: Residuals
    tolerance: float

    @property
    def expresses(self) -> bool:
        """Whether the layer equals each convolution of this size, at every query, with some weights."""
        return self.uniform.worst <= self.tolerance

    @property
    def expresses_inside(self) -> bool | None:
        """The same at the queries all of whose taps lie in the image; None where there is no such query."""
        return None if self.uniform_inside is None else self.uniform_inside.worst <= self.tolerance

    @property
    def missed(self) -> float:
        """The relative part of the worst kernel that no weights reach, away from the border where possible."""
        return (self.uniform if self.uniform_inside is None else self.uniform_inside).worst

    @property
    def expresses_each_query(self) -> bool:
        """Whether each query could be served by weights of its own: the condition as the paper states it."""
        return self.each_query.everywhere <= self.tolerance


@final
@dataclass(frozen=True, eq=False)
class Factorisation:
    """E_q = Phi A_q of one query: the matrices of the paper's Figure 11.

    Attributes:
        indicators: E_q, kernel positions x keys: a single one per row, or none where the tap sees a zero.
        phi: Kernel positions x heads.
        rows: A_q, heads x keys.
        shifts: Key minus query of each kernel position, row-major.
        query: Its index per axis.
        sizes: Pixels per axis; keys are row-major.
    """

    indicators: Float[Tensor, "j m"]
    phi: Float[Tensor, "j h"]
    rows: Float[Tensor, "h m"]
    shifts: Shifts
    query: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def residual(self) -> float:
        """||E_q - Phi A_q|| / ||E_q||; infinite where only E_q is zero."""
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
    """Whether attention can express every convolution of a kernel size, and how near it comes (Lemma 3).

        E_q = Phi A_q   for all queries q, and for all images where rows depend on content

    The answer holds for images of the size given, and for weights W_h without restriction: merged, or factored with
    D_h of at least the number of output channels. The cost is a QR decomposition of m x (heads + kernel positions)
    numbers per query, in float64: use an image of a few kernel sizes rather than a large one.

    Args:
        attention: A layer, or attention rows of any library: (h, n, m), or (b, h, n, m) where they depend on the image,
            with queries and keys row-major and without class tokens.
        kernel_size: One number or one per axis.
        x: With a layer, images: their size, and their content where rows depend on it.
        sizes: Pixels per axis; with attention rows, or in place of x with a position-only layer.
        dilation: Of the kernel; one number or one per axis.
        stride: Distance between queries; None for the layer's own, and for 1 with attention rows.
        padding: Position of the kernel: tap j sees the shift dilation * j - padding, or its opposite in a transposed
            layer; numbers as for `Grid`, or `valid` for 0. `same` is PyTorch's dilation * (kernel - 1) // 2, which
            centres odd kernels and gives even ones their longer half after the query; of a transposed layer, its own
            padding. Attention rows have ceil(size / stride) queries per axis under `same`, else as many as the
            convolution has outputs.
        padding_mode: What taps outside the image see: `zeros`, `replicate`, `reflect` or `circular`.
        tolerance: The largest relative residual that counts as expressed. None for the difference up to which the
            library calls outputs equal, by the dtype of the rows: 1e-10 in float64, 1e-5 in float32, 2e-3 in float16
            and 2e-2 in bfloat16. Rounding of the rows leaves a few eps, times the norm of Phi where heads are alike.

    Raises:
        TypeError: attention is neither a layer nor a tensor of a floating dtype.
        ValueError: The image's size is missing, given twice, or another than that of the rows; content is needed and
            missing; rows are not finite; an option is out of range, or a stride is not the layer's.

    Example:
        >>> one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)  # head h attends pixel h, from both queries
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
    """The matrices of E_q = Phi A_q for one query, Figure 11; `attnconv.report.draw_factorisation` draws them.

    Arguments are those of `can_express` (of several images, the first counts), and besides `query`, its index per axis,
    such as row and column, and `phi`: one for all queries, such as `can_express(...).uniform.phi`, or None for the
    query's own best Phi_q.

    Raises:
        TypeError, ValueError: As `can_express`; or the query is not on the grid, or phi has another shape.

    Example:
        >>> one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)
        >>> [factorise(one_pixel_each, 1, query=(q,), sizes=(2,)).phi.tolist() for q in (0, 1)]
        [[[1.0, 0.0]], [[0.0, 1.0]]]
    """
    with torch.no_grad():
        spans, _ = _laid_over(attention, kernel_size, x, sizes, dilation, stride, padding, padding_mode)
        grid, shape = spans.operator.grid, (len(spans.shifts), spans.heads)
        place = tuple(query) if isinstance(query, Sequence) else (query,)  # type: ignore[redundant-expr]
        if len(place) != grid.dims or any(not 0 <= i < n for i, n in zip(place, grid.query_sizes, strict=True)):
            raise ValueError(bad("query", f"must be an index on the grid of {grid.query_sizes} queries", place))
        flat = torch.arange(grid.query_count, device=spans.operator.device).reshape(grid.query_sizes)[place]
        rows, seen = (part[0, 0] for part in spans.of(flat[None]))
        phi = spans.solve(rows, seen)[0] if phi is None else phi.to(rows)
        if tuple(phi.shape) != shape:
            raise ValueError(bad("phi", f"must have the shape {shape}, kernel positions and heads", tuple(phi.shape)))
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
    """Attention rows beside the kernel's positions, and the kernel's size per axis."""
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
            rule = f"must end in {expected} for queries {grid.query_sizes} over {grid.sizes} pixels, after the heads"
            fix = "Leave out rows and columns of class tokens."
            raise ValueError(bad("attention", rule, f"shape {tuple(rows.shape)}", fix))
        operator: AttentionOperator = Dense(grid, rows[None] if rows.dim() == 3 else rows)
    elif stride is not None and per_axis("stride", stride, dims, least=1) != layer.stride:
        raise ValueError(bad("stride", f"must be left out or equal the layer's {layer.stride}", stride))
    else:
        operator = layer_operator(layer, x, sizes)
    return Spans(operator, tap_shifts(kernel, steps, pads, transposed=transposed), padding_mode), kernel


def _sizes_of_rows(attention: object, x: Tensor | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    if not isinstance(attention, Tensor):
        got = type(attention).__name__
        raise TypeError(bad("attention", "must be a SelfAttention layer or a tensor of attention rows", got))
    if attention.dtype not in _TOLERANCES:
        got, fix = str(attention.dtype), "Convert with rows.double()."
        raise TypeError(bad("attention", "must have a floating dtype", got, fix))
    if x is not None:
        fix = "Leave it out: what depends on an image is in the rows."
        raise ValueError(bad("x", "is for layers", f"shape {tuple(x.shape)}", fix))
    if sizes is None:
        raise ValueError(bad("sizes", "must be given with attention rows: pixels per axis", None))
    dims = len(sizes) if isinstance(sizes, Sequence) else 1  # type: ignore[redundant-expr]
    return per_axis("sizes", sizes, dims, least=1)
