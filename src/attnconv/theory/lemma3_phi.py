"""The matrix Phi of Lemma 3: the mixture of heads that comes nearest to each kernel position.

Phi is the shortest that minimises sum_q ||E_q - Phi A_q||^2, with the attention rows A_q (heads x keys) and indicators
E_q of the kernel positions of query q. The [A_q^T | E_q^T] are reduced to triangular QR factors, block by block, so
nothing of size n x m is stored and no Gram matrix squares the condition number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid
from attnconv.operators.base import AttentionOperator, all_queries
from attnconv.theory.conv_taps import BORDERS, inside, matrices_of, tap_keys

Shifts: TypeAlias = Sequence[Sequence[int]]

_BLOCK = 2**22  # numbers of [A^T | E^T] held at once
_ROUNDING = 2.0**-48  # of the decompositions themselves: 16 eps of float64


@final
@dataclass(frozen=True)
class Residuals:
    """A relative difference over three sets of queries: 0 where all is expressed, 1 where nothing is.

    Where the kernel sees no pixel from any query of a set, it is 0 if the attention adds nothing either, else infinite.

    Attributes:
        inside: Over queries all of whose taps lie in the image; None if there is none.
        border: Over the other queries; None if there is none.
        everywhere: Over all queries.
    """

    inside: float | None
    border: float | None
    everywhere: float


@final
@dataclass(frozen=True, eq=False)
class Fit:
    """One matrix Phi for many queries.

    Attributes:
        phi: Kernel positions (row-major) x heads, in float64.
        residuals: sqrt(sum_q ||E_q - Phi A_q||^2 / sum_q ||E_q||^2) of this Phi, over each set of queries.
        worst: The largest ||E_q - Phi A_q|| / max(||E_q||, 1) of a fitted query.
        rank: Rank of the stacked rows A of the fitted queries; below the number of heads where heads repeat others.
        singular_values: Those of A, largest first.
        transposed: None, or the number of groups of a transposed layer, whose convolutions have another layout.
    """

    phi: Float[Tensor, "j h"]
    residuals: Residuals
    worst: float
    rank: int
    singular_values: Float[Tensor, "s"]
    transposed: int | None

    def weights(self, kernel: Float[Tensor, "outputs inputs *kernel"]) -> Float[Tensor, "h i d"]:
        """W_h = sum_j Phi[j, h] W_j, in the kernel's dtype: the `weight` of a layer that imitates a convolution's.

        Raises:
            ValueError: The kernel has another number of positions.
        """
        if math.prod(kernel.shape[2:]) != self.phi.shape[0]:
            got = f"shape {tuple(kernel.shape)}"
            raise ValueError(bad("kernel", f"must have {self.phi.shape[0]} positions", got))
        slices = matrices_of(kernel, self.transposed or 1, transposed=self.transposed is not None)  # (j, i, d)
        return torch.einsum("jh,jid->hid", self.phi, slices.to(self.phi)).to(kernel)


def fit(
    operator: AttentionOperator, shifts: Shifts, padding_mode: str, *, transposed: int | None = None
) -> tuple[Fit, Fit | None, Residuals]:
    """Phi for all queries, Phi for those inside (None if there is none), and the residuals of a Phi_q for each query.

    Where images have rows of their own, all images count as more queries.
    """
    reduction, heads = Reduction.of(operator, shifts, padding_mode), operator.heads
    factors = [place for place in (reduction.everywhere, reduction.inside) if place is not None]
    solved = [solve(factor, heads, reduction.cut) for factor in factors]
    worst = [0.0 for _ in solved]
    for queries in _blocks(operator, shifts):
        stack, within = matrices(operator, shifts, padding_mode, queries), inside(operator.grid, shifts, queries)
        size = torch.linalg.matrix_norm(stack[..., heads:]).clamp_min(1)
        for index, ((phi, _), chosen) in enumerate(zip(solved, (torch.ones_like(within), within), strict=False)):
            apart = torch.linalg.matrix_norm(stack[..., :heads] @ phi.mT - stack[..., heads:])
            worst[index] = max(worst[index], float(((apart / size) * chosen).max()))
    found = [
        Fit(phi, reduction.residuals(phi), most, int((values > reduction.cut * values[:1]).sum()), values, transposed)
        for (phi, values), most in zip(solved, worst, strict=True)
    ]
    return found[0], found[1] if len(found) > 1 else None, reduction.each_query


@final
@dataclass(frozen=True, eq=False)
class Reduction:
    """[A_q^T | E_q^T] of all queries, stacked and reduced to triangles of heads + kernel positions columns."""

    inside: Float[Tensor, "_ columns"] | None  # of the queries all of whose taps lie in the image
    border: Float[Tensor, "_ columns"] | None  # of the others
    everywhere: Float[Tensor, "_ columns"]
    each_query: Residuals  # the largest that a query leaves with a Phi_q of its own
    cut: float  # singular values of A up to this part of the largest count as zero

    @staticmethod
    def of(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> "Reduction":
        """All queries, a block at a time; arguments as for `fit`."""
        cut = rank_tolerance(operator)
        factors: list[Tensor | None] = [None, None]  # of the queries inside, and at the border
        worst: list[float | None] = [None, None]
        for queries in _blocks(operator, shifts):
            # One factor per image and query: few rows, whatever the number of keys.
            reduced = torch.linalg.qr(matrices(operator, shifts, padding_mode, queries), mode="r").R
            alone = residual(reduced, solve(reduced, operator.heads, cut)[0])
            within = inside(operator.grid, shifts, queries)
            for place, chosen in enumerate((within, ~within)):
                if bool(chosen.any()):
                    factors[place] = _stacked(factors[place], reduced[:, chosen].flatten(0, 2))
                    worst[place] = max(float(alone[:, chosen].max()), worst[place] or 0.0)
        each_query = Residuals(worst[0], worst[1], max(most for most in worst if most is not None))
        return Reduction(factors[0], factors[1], _stacked(*factors), each_query, cut)

    def residuals(self, phi: Float[Tensor, "j h"]) -> Residuals:
        """||E - Phi A|| / ||E|| over the three sets."""
        return self.over(lambda place: residual(place, phi))

    def over(self, measure: Callable[[Tensor], Tensor]) -> Residuals:
        """A relative difference that depends on [A^T | E^T] by its R factor only, over the three sets."""
        within, border = (None if place is None else float(measure(place)) for place in (self.inside, self.border))
        return Residuals(within, border, float(measure(self.everywhere)))


def _blocks(operator: AttentionOperator, shifts: Shifts) -> tuple[Int[Tensor, "r"], ...]:
    """All queries, in parts whose [A^T | E^T] are of moderate size."""
    numbers = operator.batch * (operator.heads + len(shifts)) * operator.grid.key_count
    return all_queries(operator.grid, operator.device).split(max(_BLOCK // numbers, 1))


def matrices(
    operator: AttentionOperator, shifts: Shifts, padding_mode: str, queries: Int[Tensor, "r"]
) -> Float[Tensor, "b r m columns"]:
    """[A_q^T | E_q^T] in float64. A kernel position's column has a one at the key that it sees, or only zeros."""
    rows = operator.rows(queries).double().permute(0, 2, 3, 1)  # (b, r, m, h)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(bad("attention", "must have finite rows", "NaN or infinite probabilities"))
    keys = tap_keys(_padded(operator.grid, padding_mode), shifts, queries)  # (r, j), -1 for zeros
    indicators = (keys[:, None, :] == torch.arange(rows.shape[2], device=keys.device)[:, None]).double()  # (r, m, j)
    return torch.cat((rows, indicators.expand(rows.shape[0], -1, -1, -1)), -1)


def solve(
    stack: Float[Tensor, "*lead rows columns"], heads: int, cut: float
) -> tuple[Float[Tensor, "*lead j h"], Float[Tensor, "*lead s"]]:
    """The shortest Phi that minimises ||E^T - A^T Phi^T||, and A's singular values; zero are those up to `cut`."""
    left, values, right = torch.linalg.svd(stack[..., :heads], full_matrices=False)
    kept = values > cut * values[..., :1]
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)
    return (left.mT @ stack[..., heads:]).mT @ (inverse[..., None] * right), values


def residual(stack: Float[Tensor, "*lead rows columns"], phi: Float[Tensor, "*lead j h"]) -> Float[Tensor, "*lead"]:
    """||E - Phi A|| / ||E|| of [A^T | E^T]."""
    heads = phi.shape[-1]
    return relative(stack[..., :heads] @ phi.mT, stack[..., heads:])


def relative(
    found: Float[Tensor, "*lead rows columns"], wanted: Float[Tensor, "*lead rows columns"]
) -> Float[Tensor, "*lead"]:
    """||found - wanted|| / ||wanted||: 0 where both are zero, infinite where only wanted is zero."""
    apart, whole = torch.linalg.matrix_norm(found - wanted), torch.linalg.matrix_norm(wanted)
    ratio = apart / torch.where(whole > 0, whole, 1)
    return torch.where((whole > 0) | (apart == 0), ratio, math.inf)


def rank_tolerance(operator: AttentionOperator) -> float:
    """How far rounding can move a singular value of the rows, relative to the largest: eps sqrt(h), eps of their dtype.

    Relative errors of eps make a matrix of norm at most eps ||A||_F, and ||A||_F <= sqrt(h) times the largest value.
    """
    return max(torch.finfo(rows_dtype(operator)).eps, _ROUNDING) * math.sqrt(operator.heads)


def rows_dtype(operator: AttentionOperator) -> torch.dtype:
    """The dtype in which an operator computes its probabilities."""
    return operator.rows([0]).dtype


def _stacked(*parts: Tensor | None) -> Tensor:
    """The R factor of stacked matrices, some of which may be missing."""
    return torch.linalg.qr(torch.cat([part for part in parts if part is not None]), mode="r").R


def _padded(grid: Grid, padding_mode: str) -> Grid:
    """The grid under the convolution's own border rule."""
    if padding_mode not in BORDERS:
        raise ValueError(bad("padding_mode", f"must be one of {', '.join(BORDERS)}", repr(padding_mode)))
    if padding_mode != "zeros" and any(axis.spacing > 1 for axis in grid.axes):
        raise ValueError(bad("padding_mode", "must be 'zeros' for a transposed layer", repr(padding_mode)))
    return Grid(tuple(replace(axis, border=BORDERS[padding_mode]) for axis in grid.axes))
