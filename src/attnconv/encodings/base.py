"""Base classes of positional encodings: scores of shifts, laid over a grid. See `docs/own-encoding.md`.

The mass of Gaussian heads off the nearest key has a bound on every grid that holds it. With the centre f from that key,
|f| <= 1/2, keys at distance k weigh exp(-alpha (k^2 - 2 k f)), so the nearest one gets at least 1 / S along an axis,
whose second form is Poisson's formula:

    S(alpha, f) = sum_k exp(-alpha (k^2 - 2 k f))
                = exp(alpha f^2) sqrt(pi / alpha) (1 + 2 sum_{n >= 1} exp(-pi^2 n^2 / alpha) cos(2 pi n f))
"""

import abc
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Grid
from attnconv.operators.base import AttentionOperator, all_queries, full_precision, has_values, score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import axis_sum, below_largest
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.toeplitz import Toeplitz


@final
@dataclass(frozen=True, eq=False)
class Gaussians:
    """Heads whose score is -1/2 |S_h^T (delta - Delta_h)|^2: Gaussians over the shift.

    Attributes:
        centres: Delta, (h, dims) in pixels: the parameter itself.
        root_precision: S, (h, dims, dims); the precision is P = S S^T, in 1 / pixel^2.
        spread: The parameter that S is proportional to.
    """

    centres: nn.Parameter
    root_precision: Float[Tensor, "h dims dims"]
    spread: nn.Parameter

    @property
    def precision(self) -> Float64[Tensor, "h dims dims"]:
        """P = S S^T, in float64 on the CPU."""
        root = self.root_precision.detach().cpu().double()
        return root @ root.mT

    @property
    def covariance(self) -> Float64[Tensor, "h dims dims"]:
        """P^-1 in pixel^2; ValueError where a head has none."""
        inverse, info = torch.linalg.inv_ex(self.precision)
        if bool(info.any()):
            got = f"singular heads {info.nonzero().flatten().tolist()}"
            raise ValueError(bad("root_precision", "must be invertible to have a covariance", got))
        return inverse

    @property
    def alpha(self) -> Float64[Tensor, "h dims"] | None:
        """Sharpness along each axis, s^2 / 2; None where a head's axes are not the image's."""
        precision = self.precision
        along = precision.diagonal(dim1=-2, dim2=-1)
        return along / 2 if bool((torch.diag_embed(along) == precision).all()) else None


class Encoding(nn.Module, abc.ABC):
    """Attention scores of each head as a function of positions and, optionally, of content.

    `plan`, error bounds, pruning, head records and the explorer only use the methods below, so they work with a custom
    encoding.

    Args:
        heads: Number of heads h, at least 1.
        dims: Number of axes, 1 to 3.

    Attributes:
        undecayed: Names of the parameters without weight decay (a centre has no reason to be small).
        by_head: Names of the parameters and submodules whose first axis holds one equal part per head, in order; None
            where the class does not say.
        reads_content: Whether scores depend on the image, or on the shift only.
    """

    reads_content: bool = True
    undecayed: ClassVar[tuple[str, ...]] = ()
    by_head: ClassVar[tuple[str, ...] | None] = None
    heads: int
    dims: int

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__()
        self.heads = whole("heads", heads, 1)
        self.dims = whole("dims", dims, 1, 3)

    @abc.abstractmethod
    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> AttentionOperator:
        """The encoding laid over a grid. Position-only encodings read no value of x."""

    @abc.abstractmethod
    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        """The terms of the score, each over the whole lattice; their sum is what the softmax sees.

        Keys are those of equations (7) and (8) that the encoding has: `content-content`, `content-position`,
        `position-content`, `position-position`.
        """

    def gaussians(self) -> Gaussians | None:
        """The heads as Gaussians; None, the default, where they are none."""
        return None

    def mass_off(self) -> Float64[Tensor, "h"] | None:
        """Upper bound of each head's attention off the key nearest to its centre; None if unknown.

        By default it is known of Gaussians along the axes.
        """
        heads = self.gaussians()
        if heads is None or heads.centres.is_meta or (alpha := heads.alpha) is None:
            return None
        centres = heads.centres.detach().cpu().double()
        return mass_off_nearest(alpha, centres - centres.round())

    def hard_shifts(self) -> tuple[tuple[int, ...], ...] | None:
        """The only shift that each head attends to; None where a head is soft.

        A head is hard if on an unbounded grid its mass off the nearest shift is below the parameters' eps.
        """
        heads, mass = self.gaussians(), self.mass_off()
        if heads is None or mass is None or not bool((mass <= torch.finfo(heads.centres.dtype).eps).all()):
            return None
        # No image is as large as 2^40 pixels: beyond it all places are alike, and int64 holds sums of them.
        nearest = heads.centres.detach().cpu().double().round().clamp(-(2.0**40), 2.0**40)
        return tuple(tuple(int(v) for v in row) for row in nearest.tolist())

    @final
    def select_heads(self, heads: Sequence[int]) -> "Encoding":
        """A copy with these heads only, in this order; a head may occur twice.

        Args:
            heads: One or more of 0 .. self.heads - 1.

        Raises:
            ValueError: No head or one that does not exist is named, or `by_head` is None.

        Example:
            >>> from attnconv import Quadratic
            >>> encoding = Quadratic(9)
            >>> bool((encoding.select_heads([8, 0]).centres == encoding.centres[[8, 0]]).all())
            True
        """
        name = type(self).__name__
        if self.by_head is None:
            fix = f"Set {name}.by_head, () if heads have no parameters of their own."
            raise ValueError(bad("by_head", "must name the parameters with a part per head", f"None in {name}", fix))
        if not heads or any(not 0 <= head < self.heads for head in heads):
            raise ValueError(bad("heads", f"must be one or more of 0 .. {self.heads - 1}", list(heads)))
        picked = copy.deepcopy(self)
        picked.heads = len(heads)
        for path, parameter in list(picked.named_parameters()):
            if path.partition(".")[0] in self.by_head:
                owner, _, leaf = path.rpartition(".")
                parts = parameter.detach().unflatten(0, (self.heads, -1))[list(heads)].flatten(0, 1)
                setattr(picked.get_submodule(owner), leaf, nn.Parameter(parts, requires_grad=parameter.requires_grad))
        for module in picked.modules():
            if isinstance(module, nn.Linear):
                module.out_features = module.weight.shape[0]
        return picked

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dims={self.dims}"


class SeparableEncoding(Encoding):
    """A position-only encoding whose score is a sum over axes: implement `axis_scores`."""

    reads_content = False

    @abc.abstractmethod
    def axis_scores(self, axis: int, shifts: Float[Tensor, "n lattice"]) -> Float[Tensor, "h n lattice"]:
        """One axis's part of the score, for each head.

        Args:
            axis: Index of the axis, 0 for the first (height in 2-D).
            shifts: Key minus query along that axis, whole numbers: one row per query, one column per lattice point.
        """

    @final
    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Kronecker | Toeplitz:
        return separable_operator(grid, x, self.heads, self._scores)

    @final
    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "1 h n lattice"]]:
        indices = grid.unravel(all_queries(grid, x.device))  # of every query along each axis
        scores = zip(self._scores(grid, x.device, score_dtype(x.dtype)), indices, strict=True)
        return {"position-position": axis_sum([score.index_select(1, index) for score, index in scores])[None]}

    def _scores(self, grid: Grid, device: torch.device, dtype: torch.dtype, *, table: bool = False) -> list[Tensor]:
        shifts = [axis.all_shifts(device)[None] if table else axis.shifts(device) for axis in grid.axes]
        with full_precision(device):
            return [self.axis_scores(axis, along.to(dtype)) for axis, along in enumerate(shifts)]


class JointEncoding(Encoding):
    """A position-only encoding whose score couples the axes: implement `scores`."""

    reads_content = False

    @abc.abstractmethod
    def scores(self, shifts: Float[Tensor, "*shifts dims"]) -> Float[Tensor, "h *shifts"]:
        """The score of every shift, for each head.

        Args:
            shifts: Key minus query, whole numbers, one per axis in the last dimension; in float64 on devices that
                have it, since only differences of scores count.
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
    """The Gaussian heads of an encoding that was passed as `argument`; other encodings are refused."""
    if not isinstance(encoding, Encoding):
        raise TypeError(bad(argument, "must be an encoding", type(encoding).__name__))
    heads = encoding.gaussians()
    if heads is None:
        requirement = "must have Gaussian heads, as Quadratic and GeneralizedQuadratic have"
        raise ValueError(bad(argument, requirement, type(encoding).__name__))
    return heads


def mass_off_nearest(
    alpha: Float64[Tensor, "*heads dims"], offset: Float64[Tensor, "*#heads #dims"]
) -> Float64[Tensor, "*heads"]:
    """1 - prod_a 1 / S(alpha_a, f_a), with alpha in 1 / pixel^2 and `offset` f between -1/2 and 1/2 pixel."""
    # From alpha = 1 on, eight terms on either side reach float64; below, three of Poisson's formula.
    steps = torch.arange(1, 9, device=alpha.device, dtype=alpha.dtype)
    sharp, beside = alpha.clamp_min(1)[..., None], offset[..., None]
    direct = torch.exp(-sharp * steps * (steps - 2 * beside)) + torch.exp(-sharp * steps * (steps + 2 * beside))
    blunt, waves = alpha.clamp_max(1), steps[:3]
    ripples = torch.exp(-(math.pi**2) * waves.square() / blunt[..., None]) * torch.cos(2 * math.pi * waves * beside)
    poisson = torch.exp(blunt * offset.square()) * (math.pi / blunt).sqrt() * (1 + 2 * ripples.sum(-1)) - 1
    others = torch.where(alpha < 1, poisson, direct.sum(-1))  # S - 1 without cancellation
    return -torch.expm1(-torch.log1p(others).sum(-1))


def separable_operator(
    grid: Grid, x: Float[Tensor, "b *sizes c"], heads: int, scores: Callable[..., list[Float[Tensor, "h _ _"]]]
) -> Kronecker | Toeplitz:
    """The operator of scores that are a sum over axes: a Kronecker product of `scores`, (h, queries, lattice) per axis.

    For one long axis, where a factor would be the whole matrix, they are wanted as a table, (h, 1, shifts).
    """
    largest = max(axis.queries * axis.lattice_size for axis in grid.axes)
    few = heads * largest <= block_sizes.ALL_ROWS or largest <= block_sizes.FACTOR_ENTRIES * grid.query_count
    if few or not has_values(x):
        return Kronecker.from_scores(grid, scores(grid, x.device, score_dtype(x.dtype)))
    rows = [row[:, 0] for row in scores(grid, x.device, widest(x.device), table=True)]
    return Toeplitz(grid, axis_sum(rows).unflatten(-1, [row.shape[1] for row in rows]), dtype=score_dtype(x.dtype))


def _points(axes: list[Tensor]) -> Tensor:
    """All points of a product of axes: (*axes, dims)."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def widest(device: torch.device) -> torch.dtype:
    """float64, but for Apple's MPS, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64
