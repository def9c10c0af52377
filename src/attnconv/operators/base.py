"""The attention operator: one row-stochastic matrix A_h per head, known by its structure."""

import abc
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index
from attnconv.grid import Grid

Queries: TypeAlias = Int[Tensor, "r"] | Sequence[int]  # indices, flat and row-major
Images: TypeAlias = Float[Tensor, "b *sizes c"]
Weights: TypeAlias = Float[Tensor, "h i d"]  # one matrix per head, i = c / groups
Outputs: TypeAlias = Float[Tensor, "b *queries d"]
Factor: TypeAlias = Float[Tensor, "h _ _"]  # of one axis


class AttentionOperator(abc.ABC):
    """Attention probabilities on a grid. Abstract: see `Dense`, `Kronecker`, `Shift`, `Toeplitz`, `Content`.

    Attributes:
        grid: Positions of queries and keys.
        heads: Number of heads h.
        batch: 1 where all images share the probabilities, else the number of images b.
        device: Device of the operator's tensors.
    """

    grid: Grid
    heads: int
    batch: int
    device: torch.device

    @abc.abstractmethod
    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        """sum_h A_h X W_h, equation (12) without the bias.

        Args:
            x: Images, channels last: (b, *sizes, c).
            weight: One matrix per head, (h, i, d) with i = c / groups.
            groups: Number of channel groups, as in a grouped convolution.
        """

    @abc.abstractmethod
    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        """A_h V_h for every head: the weighted means of per-head values."""

    @abc.abstractmethod
    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        """Probabilities of chosen queries (flat, row-major) over all image keys (flat, row-major)."""

    @abc.abstractmethod
    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        """The probability that chosen queries put on lattice points that hold zeros; 0 without zero padding."""

    def __repr__(self) -> str:
        about = f"heads={self.heads}, sizes={self.grid.sizes}, queries={self.grid.query_sizes}"
        return f"{type(self).__name__}({about}" + (f", batch={self.batch})" if self.batch > 1 else ")")

    def to_dense(self) -> Float[Tensor, "#b h n m"]:
        """The matrix of all probabilities: n * m numbers per head, so for small grids only."""
        return self.rows(all_queries(self.grid, self.device))


class LatticeOperator(AttentionOperator):
    """An operator defined by its rows over the lattice. Abstract: implement `lattice_rows`, and how to contract."""

    @abc.abstractmethod
    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        """Probabilities of chosen queries over all lattice points, those that hold zeros included."""

    @final
    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        return self.grid.fold(self.lattice_rows(queries))

    @final
    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        queries = query_indices(queries, self.grid, self.device)
        return (self.lattice_rows(queries) * self.grid.empty(self.device)).sum(-1)


def all_queries(grid: Grid, device: torch.device) -> Int[Tensor, "n"]:
    """Every query of the grid, flat and row-major."""
    return torch.arange(grid.query_count, device=device)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and softmax: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which products with a tensor are computed: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    narrow = tensor.dtype != torch.float64  # autocast leaves float64 as it is
    if narrow and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Context without autocast, for scores."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def has_values(tensor: Tensor) -> bool:
    """Whether values can be read: not while a compiler traces, nor of meta and fake tensors."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def query_indices(queries: Queries, grid: Grid, device: torch.device) -> Int[Tensor, "r"]:
    """Query indices as a tensor on `device`; checked only on the CPU, where reading them does not synchronise."""
    if isinstance(queries, Sequence) and all(map(is_index, queries)):
        queries = torch.tensor(list(map(operator.index, queries)), dtype=torch.int64)
    if not isinstance(queries, Tensor) or queries.dtype not in (torch.int32, torch.int64):
        got = str(queries.dtype) if isinstance(queries, Tensor) else type(queries).__name__
        raise TypeError(bad("queries", "must be int64 indices, a tensor or a list", got))
    if queries.device.type == "cpu" and has_values(queries) and queries.numel():
        low, high = int(queries.min()), int(queries.max())
        if low < 0 or high >= grid.query_count:
            requirement = f"must lie in 0 .. {grid.query_count - 1} on a grid of {grid.query_sizes}"
            raise ValueError(bad("queries", requirement, f"{low} .. {high}"))
    return queries.to(device)
