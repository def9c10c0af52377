"""Base classes of attention operators: one row-stochastic matrix A_h per head, stored in structured form."""

import abc
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index
from attnconv.grid import Grid

Queries: TypeAlias = Int[Tensor, "r"] | Sequence[int]  # flat, row-major indices from 0
Images: TypeAlias = Float[Tensor, "b *sizes c"]
Weights: TypeAlias = Float[Tensor, "h i d"]  # one matrix per head, i = c / groups
Outputs: TypeAlias = Float[Tensor, "b *queries d"]
Factor: TypeAlias = Float[Tensor, "h _ _"]  # for one axis


@final
@dataclass(frozen=True, eq=False)
class WindowRows:
    """Probabilities of r queries over the keys in their windows.

    Attributes:
        rows: Probabilities, (b, h, r, *window) float64; b is 1 if they are the same for all images.
        shifts: Key position minus query position along each axis, (r, window size).
        present: Which entries of each window are keys, (r, *window); None if all are.
    """

    rows: Float64[Tensor, "#b h r *window"]
    shifts: tuple[Int[Tensor, "r _"], ...]
    present: Bool[Tensor, "r *window"] | None


class AttentionOperator(abc.ABC):
    """Base class of operators that apply attention to images: `Dense`, `Kronecker`, `Shift`, `Toeplitz`, `Content`.

    Attributes:
        grid: Grid of queries and keys.
        heads: Number of heads h.
        batch: 1 if the probabilities are the same for all images, otherwise the number of images b.
        device: Device of the operator's tensors.
    """

    grid: Grid
    heads: int
    batch: int
    device: torch.device

    @abc.abstractmethod
    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        """Compute sum_h A_h X W_h, (b, *query sizes, d): equation (12) of the paper without the bias.

        Args:
            x: Images, channels last, (b, *sizes, c).
            weight: One matrix per head, (h, i, d), with i = c / groups and d output channels.
            groups: Number of channel groups, as in a grouped convolution.
        """

    @abc.abstractmethod
    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        """Compute A_h V_h, with separate values V_h for each head."""

    @abc.abstractmethod
    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        """Return the probabilities of the given queries over all keys; indices are flat and row-major, from 0."""

    @abc.abstractmethod
    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        """Return the attention of the given queries to padding positions whose value is zero (border rule `zero`)."""

    def window_rows(self, queries: Queries) -> WindowRows:
        """Return the rows of the given queries over the keys in their windows; without windows, over all keys."""
        chosen = query_indices(queries, self.grid, self.device)
        rows, shifts = self.rows(chosen).double().unflatten(-1, self.grid.sizes), []
        for axis, index in zip(self.grid.axes, self.grid.unravel(chosen), strict=True):
            keys = torch.arange(axis.size, device=self.device) * axis.spacing
            shifts.append(keys - axis.query_positions(self.device)[index, None])
        return WindowRows(rows, tuple(shifts), None)

    def __repr__(self) -> str:
        about = f"heads={self.heads}, sizes={self.grid.sizes}, queries={self.grid.query_sizes}"
        return f"{type(self).__name__}({about}" + (f", batch={self.batch})" if self.batch > 1 else ")")

    def to_dense(self) -> Float[Tensor, "#b h n m"]:
        """Return all probabilities, n * m numbers per head; use this only on small grids."""
        return self.rows(all_queries(self.grid, self.device))


class LatticeOperator(AttentionOperator):
    """Base class of operators that implement `lattice_rows`, in addition to `contract` and `apply`."""

    @abc.abstractmethod
    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        """Return the probabilities of the given queries over all lattice points, including those with value zero."""

    @final
    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        return self.grid.fold(self.lattice_rows(queries))

    @final
    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        queries = query_indices(queries, self.grid, self.device)
        return (self.lattice_rows(queries) * self.grid.empty(self.device)).sum(-1)


def all_queries(grid: Grid, device: torch.device) -> Int[Tensor, "n"]:
    """Return the indices of all queries of the grid, flat and row-major."""
    return torch.arange(grid.query_count, device=device)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and softmax, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of products with a tensor: autocast's dtype if it applies, otherwise the tensor's."""
    kind = tensor.device.type
    narrow = tensor.dtype != torch.float64  # autocast does not convert float64
    if narrow and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast, for computing scores.

    Meta tensors have no autocast. `torch.compile` of torch 2.11 cannot trace `torch.amp.is_autocast_available`.
    """
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def has_values(tensor: Tensor) -> bool:
    """Return whether the values can be read: not during compilation, and not of meta or fake tensors."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def query_indices(queries: Queries, grid: Grid, device: torch.device) -> Int[Tensor, "r"]:
    """Return query indices as a tensor on `device`; only CPU tensors are checked, to avoid synchronisation."""
    if isinstance(queries, Sequence) and all(map(is_index, queries)):
        queries = torch.tensor(list(map(operator.index, queries)), dtype=torch.int64)
    if not isinstance(queries, Tensor) or queries.dtype not in (torch.int32, torch.int64):
        got = str(queries.dtype) if isinstance(queries, Tensor) else type(queries).__name__
        raise TypeError(bad("queries", "must be a list of integers, or an int32 or int64 tensor", got))
    if queries.device.type == "cpu" and has_values(queries) and queries.numel():
        low, high = int(queries.min()), int(queries.max())
        if low < 0 or high >= grid.query_count:
            requirement = f"must be from 0 to {grid.query_count - 1} for a grid of {grid.query_sizes} queries"
            raise ValueError(bad("queries", requirement, f"values from {low} to {high}"))
    return queries.to(device)
