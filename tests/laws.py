"""Contract of attention operators, tested for all operators in a registry: a new operator adds a line to `OPERATORS`.

A case is an operator on a grid and the tensors that its values depend on, so that gradients can be tested. Expected
values are `operator.to_dense()` contracted by one einsum. The matrix itself is compared with docs/grid.md
(tests/test_grid.py) and with the softmax of explicit scores (tests/layers).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnconv.encodings import ENCODING_NAMES, Encoding, encoding_named
from attnconv.grid import BORDERS, Border, Grid, Padding
from attnconv.operators import AttentionOperator, Content, Dense, Kronecker, Shift, Toeplitz

CHANNELS = 12  # of images: divisible for sinusoids over one, two and three axes
HEADS = 3

Maker = Callable[[Grid, torch.dtype, int], tuple[AttentionOperator, list[Tensor]]]


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def dense(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    scores = numbers(batch, HEADS, grid.query_count, grid.lattice_count, dtype=dtype)
    return Dense.from_scores(grid, scores), [scores]


def kronecker(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    scores = [numbers(HEADS, axis.queries, axis.lattice_size, dtype=dtype) for axis in grid.axes]
    return Kronecker.from_scores(grid, scores), scores


def shift(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    anchor = numbers(2, dtype=dtype)
    shifts = torch.randint(-2, 4, (HEADS, grid.dims)).tolist()
    return Shift(grid, shifts, anchor), [anchor]


def kernel(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    """Return an operator of shifts that are close together, which runs as a convolution."""
    anchor = numbers(2, dtype=dtype)
    return Shift(grid, [[step % 2] * (grid.dims - 1) + [step] for step in range(HEADS)], anchor), [anchor]


def toeplitz(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    table = numbers(HEADS, *(axis.shift_count for axis in grid.axes), dtype=dtype)
    return Toeplitz(grid, table), [table]


def content(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    queries = numbers(batch, HEADS, grid.query_count, 4, dtype=dtype)
    keys = numbers(batch, HEADS, grid.lattice_count, 4, dtype=dtype)
    biases = [numbers(1, HEADS, grid.query_count, axis.lattice_size, dtype=dtype) for axis in grid.axes]
    return Content(grid, queries * 0.5, keys, biases=biases), [queries, keys, *biases]


def content_of_shared_keys(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
    queries = numbers(batch, HEADS, grid.query_count, 4, dtype=dtype)
    keys = numbers(batch, 1, grid.lattice_count, 4, dtype=dtype)
    return Content(grid, queries * 0.5, keys), [queries, keys]


def by_encoding(make: Callable[[int], Encoding]) -> Maker:
    """Return a maker of an encoding's operators, for custom encodings too."""

    def maker(grid: Grid, dtype: torch.dtype, batch: int) -> tuple[AttentionOperator, list[Tensor]]:
        encoding = make(grid.dims).to(dtype)
        x = torch.randn(batch, *grid.sizes, CHANNELS, dtype=torch.float64).to(dtype)
        return encoding.operator(grid, x), list(encoding.parameters())

    return maker


def _named(name: str) -> Maker:
    return by_encoding(lambda dims: encoding_named(name, CHANNELS, HEADS, dims))


OPERATORS: dict[str, Maker] = {
    "dense": dense,
    "kronecker": kronecker,
    "shift": shift,
    "kernel": kernel,
    "toeplitz": toeplitz,
    "content": content,
    "content, shared keys": content_of_shared_keys,
    **{name: _named(name) for name in ENCODING_NAMES},
}

SIZES = [(1,), (6,), (1, 1), (4, 6), (5, 3), (3, 2, 4)]  # one, even, odd, non-square


@dataclass(frozen=True)
class Layout:
    """Grid over an image: of a layer without a window, of a convolution (window), or of a transposed convolution."""

    sizes: tuple[int, ...]
    border: Border
    stride: int | tuple[int, ...] = 1
    padding: Padding = 1
    window: tuple[int, ...] | None = None
    transposed: bool = False

    def grid(self) -> Grid:
        if self.transposed:
            assert self.window is not None
            return Grid.transposed(self.sizes, stride=self.stride, padding=self.padding, window=self.window)
        return Grid.make(self.sizes, stride=self.stride, padding=self.padding, border=self.border, window=self.window)

    @property
    def on_pixels(self) -> bool:
        """Whether every query is at a pixel, as content scores require."""
        return all(axis.spacing == 1 and axis.stride * (axis.queries - 1) < axis.size for axis in self.grid().axes)


LAYOUTS = [
    *(Layout(sizes, border, 1 + i % 2) for i, sizes in enumerate(SIZES) for border in BORDERS),
    *(Layout((5, 4), border, 3, 2) for border in BORDERS),
    *(Layout((5, 4), border, 1, ((2, 0), (0, 1))) for border in BORDERS),  # asymmetric padding
    *(
        Layout((6, 5), border, 2, ((0, 1), (1, 2)), window=(3, 5)) for border in BORDERS
    ),  # kernels 3 x 3, dilated (1, 2)
    *(Layout((4, 5), border, 1, 2, window=(2, 1)) for border in BORDERS),  # queries outside the image
    Layout((4,), "zero", 3, 0, window=(4,), transposed=True),
    Layout((3, 2), "zero", 2, ((1, 0), (0, 2)), window=(3, 5), transposed=True),
    Layout((2, 1, 3), "zero", 2, 0, window=(2, 1, 3), transposed=True),
]

NARROW = [  # one query along the last axis
    Layout((10, 3), "renormalise", 3),
    Layout((17, 3), "replicate", (1, 2), ((0, 0), (0, 0)), window=(3, 3)),
    Layout((2, 9, 3), "replicate", (1, 1, 2), ((0, 0), (1, 0), (0, 0)), window=(1, 3, 3)),
    Layout((12, 1), "zero"),
    Layout((9,), "zero", 1, 0, window=(9,)),
    Layout((8, 1), "zero", 2, 0, window=(3, 1), transposed=True),
]

WITH_CONTENT = {"learned-content", "sinusoidal", "absolute-sinusoidal", "absolute-learned"}
CASES = [(name, layout) for name in OPERATORS for layout in LAYOUTS if layout.on_pixels or name not in WITH_CONTENT]


def images(grid: Grid, dtype: torch.dtype, batch: int, channels: int = CHANNELS) -> Tensor:
    return torch.randn(batch, *grid.sizes, channels, dtype=torch.float64).to(dtype)


def contracted(operator: AttentionOperator, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Contract with the stored matrix, one head at a time."""
    return contracted_by(operator.to_dense(), operator.grid, x, weight, groups)


def contracted_by(matrix: Tensor, grid: Grid, x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Contract with a given matrix."""
    matrix = matrix.to(x.dtype).expand(x.shape[0], -1, -1, -1)
    parts = zip(x.flatten(1, -2).chunk(groups, -1), weight.chunk(groups, 2), strict=True)
    out = torch.cat([torch.einsum("bhnm,bmi,hid->bnd", matrix, part, block) for part, block in parts], -1)
    return out.unflatten(1, grid.query_sizes)
