"""What an attention operator is: the probabilities of a grid's queries over its keys, never stored unless asked for.

An operator A holds one row-stochastic matrix A_h per head. It knows its structure and offers four things:

    contract(x, W) = sum_h A_h X W_h        the layer's work, equation (12) of the paper without its bias
    apply(V)       = (A_h V_h)_h            per-head values, for factored weights W_h = W_val,h W_out,h
    rows(queries)                           the probabilities of chosen queries over the image's keys
    padding_mass(queries)                   what those rows put on lattice points that hold zeros

Everything else (the dense matrix, statistics, figures) is made from these.
"""

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnconv._util.errors import bad
from attnconv.grid import Grid


class AttentionOperator(abc.ABC):
    """Attention probabilities on a grid. Abstract: see `Dense`, `Kronecker`, `Shift`, `Toeplitz`, `Content`.

    Attributes:
        grid: Where the queries stand over the keys.
        heads: Number of heads h.
        batch: 1 where all images share the probabilities, else the number of images b.
    """

    grid: Grid
    heads: int
    batch: int

    @abc.abstractmethod
    def contract(
        self, x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h i d"], groups: int = 1
    ) -> Float[Tensor, "b *queries d"]:
        """sum_h A_h X W_h, equation (12) without the bias.

        Args:
            x: Images, channels last.
            weight: One matrix per head; i = c / groups, and with groups the j-th d / groups outputs see the j-th
                c / groups inputs, as in a grouped convolution.
            groups: Number of channel groups.
        """

    @abc.abstractmethod
    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        """A_h V_h for every head: the weighted means of per-head values."""

    @abc.abstractmethod
    def rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r m"]:
        """Probabilities of chosen queries (flat, row-major) over all image keys (flat, row-major)."""

    @abc.abstractmethod
    def padding_mass(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r"]:
        """The probability that chosen queries put on lattice points that hold zeros; 0 without zero padding."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where the operator's tensors live."""

    def to_dense(self) -> Float[Tensor, "#b h n m"]:
        """The matrix of all probabilities: n * m numbers per head, so for small grids only."""
        return self.rows(all_queries(self.grid, self.device))


def all_queries(grid: Grid, device: torch.device) -> Int[Tensor, "n"]:
    """Every query of the grid, flat and row-major."""
    return torch.arange(grid.query_count, device=device)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores and softmax use: at least float32, whatever the layer's own."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which products with a tensor are computed: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    narrow = tensor.dtype != torch.float64  # autocast leaves float64 as it is
    if narrow and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Where scores are computed: autocast is off, on devices that have it."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers to look at: not while a compiler traces, nor in a tensor that stands for its shape."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def check_queries(queries: Any, grid: Grid) -> None:
    """Refuse query indices outside the grid (on the host only: a look at a device's tensor would stall it).

    Raises:
        TypeError: The indices are no tensor of whole numbers.
        ValueError: An index is negative or not below the number of queries.
    """
    if not isinstance(queries, Tensor) or queries.dtype not in (torch.int32, torch.int64):
        got = str(queries.dtype) if isinstance(queries, Tensor) else type(queries).__name__
        raise TypeError(bad("queries", "must be a tensor of int64 indices", got, "Use torch.tensor([0, 1])."))
    if queries.device.type != "cpu" or not has_values(queries) or queries.numel() == 0:
        return
    low, high = int(queries.min()), int(queries.max())
    if low < 0 or high >= grid.query_count:
        requirement = f"must lie in 0 .. {grid.query_count - 1} on a grid of {grid.query_sizes}"
        raise ValueError(bad("queries", requirement, f"{low} .. {high}"))
