"""Base classes of positional encodings, which compute attention scores. See `docs/own-encoding.md`.

`mass_off_nearest` bounds the probability that a Gaussian head assigns to keys other than the one nearest to its centre,
on any grid that contains this key. If the centre is offset from it by f, |f| <= 1/2, a key k positions away has the
relative weight exp(-alpha (k^2 - 2 k f)). Along one axis, the nearest key has probability at least 1 / S, where

    S(alpha, f) = sum_k exp(-alpha (k^2 - 2 k f))
                = exp(alpha f^2) sqrt(pi / alpha) (1 + 2 sum_{n >= 1} exp(-pi^2 n^2 / alpha) cos(2 pi n f))   (Poisson)
"""

import abc
import copy
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index, whole
from attnconv.grid import Grid
from attnconv.operators.base import AttentionOperator, all_queries, full_precision, has_values, score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import axis_sum, below_largest
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.toeplitz import Toeplitz


@final
@dataclass(frozen=True, eq=False)
class Gaussians:
    """Parameters of heads with Gaussian attention: the score of shift delta is -1/2 |S_h^T (delta - Delta_h)|^2.

    Attributes:
        centres: Delta, (h, dims), in positions; a parameter of the encoding.
        root_precision: S, (h, dims, dims), in 1 / position; the precision matrix is P = S S^T.
        spread: The parameter of the encoding that determines S; multiplying it by a number multiplies S by this number.
    """

    centres: nn.Parameter
    root_precision: Float[Tensor, "h dims dims"]
    spread: nn.Parameter

    @property
    def precision(self) -> Float64[Tensor, "h dims dims"]:
        """Precision matrices P = S S^T, in 1 / position^2, in float64 on the CPU."""
        root = self.root_precision.detach().cpu().double()
        return root @ root.mT

    @property
    def covariance(self) -> Float64[Tensor, "h dims dims"]:
        """Covariance matrices P^-1, in position^2; raises `ValueError` if any P is singular."""
        inverse, info = torch.linalg.inv_ex(self.precision)
        if bool(info.any()):
            got = f"singular matrices for heads {info.nonzero().flatten().tolist()}"
            raise ValueError(bad("root_precision", "must be invertible", got))
        return inverse

    @property
    def alpha(self) -> Float64[Tensor, "h dims"] | None:
        """Sharpness along each axis, diag(P) / 2, in 1 / position^2; None if any P is not diagonal."""
        precision = self.precision
        along = precision.diagonal(dim1=-2, dim2=-1)
        return along / 2 if bool((torch.diag_embed(along) == precision).all()) else None


class Encoding(nn.Module, abc.ABC):
    """Base class of positional encodings: attention scores of each head from positions and, optionally, content.

    The other parts of the library, such as layers, statistics and the explorer, access encodings only through the
    methods of this class, and therefore support any subclass that implements them.

    Args:
        heads: Number of heads h, at least 1.
        dims: Number of axes, 1 to 3.

    Attributes:
        undecayed: Names of parameters excluded from weight decay, such as centres, which may be far from 0.
        by_head: Names of parameters and submodules with one part per head along axis 0; None disables `select_heads`.
        reads_content: Whether scores depend on the image's content; if False, they depend only on positions.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, or `dims` is not 1, 2 or 3.
    """

    reads_content: bool = True
    undecayed: ClassVar[tuple[str, ...]] = ()
    by_head: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__()
        self.heads = whole("heads", heads, 1)
        self.dims = whole("dims", dims, 1, 3)

    @abc.abstractmethod
    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> AttentionOperator:
        """Return the attention operator for images x on a grid; position-only encodings ignore the values of x."""

    @abc.abstractmethod
    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        """Return the terms of the attention scores at all lattice points; attention is the softmax of their sum.

        Lattice points are keys and padding (see `attnconv.grid`). The dictionary has one entry for each term of the
        paper's equations (7) and (8) that the encoding uses. The possible names are `content-content`,
        `content-position`, `position-content` and `position-position`.
        """

    def gaussians(self) -> Gaussians | None:
        """Return the parameters of Gaussian heads; None, the default, if the heads are not Gaussian."""
        return None

    def mass_off(self) -> Float64[Tensor, "h"] | None:
        """Return an upper bound on each head's attention to keys other than the one nearest to its centre.

        The default implementation supports Gaussian heads with diagonal precision matrices and returns None for others.
        """
        heads = self.gaussians()
        if heads is None or heads.centres.is_meta or (alpha := heads.alpha) is None:
            return None
        centres = heads.centres.detach().cpu().double()
        return mass_off_nearest(alpha, centres - centres.round())

    def hard_shifts(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the single shift (key minus query) that each head attends to, or None if any head is soft.

        A head is hard if its `mass_off` is at most the machine epsilon of the parameters' dtype, and soft otherwise.
        """
        heads, mass = self.gaussians(), self.mass_off()
        if heads is None or mass is None or not bool((mass <= torch.finfo(heads.centres.dtype).eps).all()):
            return None
        # Clamping keeps sums of shifts within int64, and changes no result, because no image has 2^40 positions.
        nearest = heads.centres.detach().cpu().double().round().clamp(-(2.0**40), 2.0**40)
        return tuple(tuple(int(v) for v in row) for row in nearest.tolist())

    @final
    def select_heads(self, heads: Sequence[int]) -> "Encoding":
        """Return a copy of the encoding with only the given heads, in the given order; heads may be repeated.

        Args:
            heads: Indices of one or more heads, from 0.

        Raises:
            ValueError: If `heads` is empty or contains anything else, or `by_head` is None.

        Example:
            >>> from attnconv import Quadratic
            >>> encoding = Quadratic(9)
            >>> bool((encoding.select_heads([8, 0]).centres == encoding.centres[[8, 0]]).all())
            True
        """
        name = type(self).__name__
        if self.by_head is None:
            fix = f"Set {name}.by_head; use () if no parameter is split by head."
            raise ValueError(bad("by_head", "must name the parameters that are split by head", f"None in {name}", fix))
        chosen = [operator.index(head) for head in heads if is_index(head)]
        if not chosen or len(chosen) < len(heads) or not all(0 <= head < self.heads for head in chosen):
            raise ValueError(bad("heads", f"must contain one or more indices from 0 to {self.heads - 1}", list(heads)))
        picked = copy.deepcopy(self)
        picked.heads = len(chosen)
        for path, parameter in list(picked.named_parameters()):
            if path.partition(".")[0] in self.by_head:
                owner, _, leaf = path.rpartition(".")
                parts = parameter.detach().unflatten(0, (self.heads, -1))[chosen].flatten(0, 1)
                setattr(picked.get_submodule(owner), leaf, nn.Parameter(parts, requires_grad=parameter.requires_grad))
        for module in picked.modules():
            if isinstance(module, nn.Linear):
                module.out_features = module.weight.shape[0]
        return picked

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dims={self.dims}"


class SeparableEncoding(Encoding):
    """Base class of position-only encodings whose score is a sum over axes; subclasses implement `axis_scores`."""

    reads_content = False
    smooth = False
    """Whether scores are polynomials of the shift, so that wide heads may be compressed along long axes."""

    @abc.abstractmethod
    def axis_scores(self, axis: int, shifts: Float[Tensor, "n lattice"]) -> Float[Tensor, "h n lattice"]:
        """Return the contribution of one axis to the score of each head.

        Args:
            axis: Index of the axis, from 0 (height in 2-D).
            shifts: Key minus query along the axis, whole numbers in at least float32; one row per query, one column per
                key or padding point.
        """

    @final
    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Kronecker | Toeplitz:
        return separable_operator(grid, x, self.heads, self._scores, smooth=self.smooth)

    @final
    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "1 h n lattice"]]:
        indices = grid.unravel(all_queries(grid, x.device))  # of all queries along each axis
        scores = zip(self._scores(grid, x.device, score_dtype(x.dtype)), indices, strict=True)
        return {"position-position": axis_sum([score.index_select(1, index) for score, index in scores])[None]}

    def _scores(self, grid: Grid, device: torch.device, dtype: torch.dtype, *, table: bool = False) -> list[Tensor]:
        shifts = [axis.all_shifts(device)[None] if table else axis.shifts(device) for axis in grid.axes]
        with full_precision(device):
            return [self.axis_scores(axis, along.to(dtype)) for axis, along in enumerate(shifts)]


class JointEncoding(Encoding):
    """Base class of position-only encodings whose score is not a sum over axes; subclasses implement `scores`."""

    reads_content = False

    @abc.abstractmethod
    def scores(self, shifts: Float[Tensor, "*shifts dims"]) -> Float[Tensor, "h *shifts"]:
        """Return the score of every shift for each head.

        Args:
            shifts: Key position minus query position, one integer value per axis in the last dimension. The dtype is
                float64 (float32 on MPS) because the softmax depends on small differences between large scores.
        """

    @final
    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Toeplitz:
        shifts = _points([axis.all_shifts(x.device) for axis in grid.axes])
        with full_precision(x.device):
            return Toeplitz(grid, self.scores(shifts.to(widest(x.device))), dtype=score_dtype(x.dtype))

    @final
    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "1 h n lattice"]]:
        queries = _points([axis.query_positions(x.device) for axis in grid.axes]).flatten(0, -2)
        lattice = _points([axis.lattice_positions(x.device) for axis in grid.axes]).flatten(0, -2)
        with full_precision(x.device):
            scores = self.scores((lattice[None, :] - queries[:, None]).to(widest(x.device)))
            return {"position-position": below_largest(scores).to(score_dtype(x.dtype))[None]}


def gaussians_of(encoding: object, argument: str) -> Gaussians:
    """Return the Gaussian heads of an encoding that was passed as `argument`; raise an error if it has none."""
    if not isinstance(encoding, Encoding):
        raise TypeError(bad(argument, "must be an encoding", type(encoding).__name__))
    heads = encoding.gaussians()
    if heads is None:
        requirement = "must have Gaussian heads, such as those of Quadratic or GeneralizedQuadratic"
        raise ValueError(bad(argument, requirement, type(encoding).__name__))
    return heads


def mass_off_nearest(
    alpha: Float64[Tensor, "*heads dims"], offset: Float64[Tensor, "*#heads #dims"]
) -> Float64[Tensor, "*heads"]:
    """Compute 1 - prod_a 1 / S(alpha_a, f_a), with alpha in 1 / position^2 and f = `offset` from -1/2 to 1/2."""
    # For float64 precision, 8 terms on either side suffice if alpha >= 1, and 3 of the Poisson sum if alpha < 1.
    steps = torch.arange(1, 9, device=alpha.device, dtype=alpha.dtype)
    sharp, beside = alpha.clamp_min(1)[..., None], offset[..., None]
    direct = torch.exp(-sharp * steps * (steps - 2 * beside)) + torch.exp(-sharp * steps * (steps + 2 * beside))
    blunt, waves = alpha.clamp_max(1), steps[:3]
    ripples = torch.exp(-(math.pi**2) * waves.square() / blunt[..., None]) * torch.cos(2 * math.pi * waves * beside)
    poisson = torch.exp(blunt * offset.square()) * (math.pi / blunt).sqrt() * (1 + 2 * ripples.sum(-1)) - 1
    others = torch.where(alpha < 1, poisson, direct.sum(-1))  # S - 1 without cancellation
    return -torch.expm1(-torch.log1p(others).sum(-1))


def separable_operator(
    grid: Grid,
    x: Float[Tensor, "b *sizes c"],
    heads: int,
    scores: Callable[..., list[Float[Tensor, "h _ _"]]],
    *,
    smooth: bool = False,
) -> Kronecker | Toeplitz:
    """Return the operator for scores that are sums over axes; `scores` returns a tensor (h, queries, lattice) per axis.

    The result is a `Kronecker`, unless one axis is so long that its factor is nearly as large as the full attention
    matrix. The result is then a `Toeplitz`, and `scores` is called with `table=True` to return (h, 1, shifts) per axis.
    """
    largest = max(axis.queries * axis.lattice_size for axis in grid.axes)
    few = heads * largest <= block_sizes.ALL_ROWS or largest <= block_sizes.FACTOR_ENTRIES * grid.query_count
    if few or not has_values(x):
        return Kronecker.from_scores(grid, scores(grid, x.device, score_dtype(x.dtype)), smooth=smooth)
    rows = [row[:, 0] for row in scores(grid, x.device, widest(x.device), table=True)]
    return Toeplitz(grid, axis_sum(rows).unflatten(-1, [row.shape[1] for row in rows]), dtype=score_dtype(x.dtype))


def _points(axes: list[Tensor]) -> Tensor:
    """Return all points of the product of axes, (*axes, dims)."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's MPS, which does not support float64."""
    return torch.float32 if device.type == "mps" else torch.float64
