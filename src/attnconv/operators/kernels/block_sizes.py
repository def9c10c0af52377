"""Sizes by which kernels split their work or change their form. They decide time and memory, never results.

Blocks are in bytes, measured on a two-core x86 machine with 4 MiB of cache; those of a GPU come from data sheets.
"""

from collections.abc import Sequence

from torch import Tensor

# Kronecker factors. Mixed values of all heads that are held at a time; on a CPU they stay in cache.
KRONECKER_BLOCK = 2**22
# On a GPU a product over 16 MiB takes about as long as its launch. Larger blocks would only cost memory.
KRONECKER_BLOCK_GPU = 2**24
# Long axes go head by head and tile by tile there: a launch sees a hundredth of a block.
KRONECKER_LONG_BLOCK_GPU = 2**28
LONG_AXIS = 96  # keys from which on a factor is cut into the bands of its heads
BAND_TILE = 32  # queries of a long axis that share a range of keys
STRIP = 256  # columns of a wide image that are contracted at a time: the rows around a block stay in cache too
LEAST_COLUMNS = 8  # of a part of an image with short axes: fewer make thin products
LEAST_ROWS = 16  # queries in a block: fewer make thin products

# Scores with relative biases: they stay in cache from the product to the softmax.
SCORES_BLOCK = 2**21

# Scores of shifts.
ALL_ROWS = 2**24  # probabilities up to which all rows are computed at once: about where both forms cost the same
WINDOW_TILE = 64  # queries of a tile, over all axes
WINDOW_BLOCK = 2**23  # gathered keys
SPECTRUM_BLOCK = 2**28  # transformed numbers
ROWS_BLOCK = 2**26  # rows that a spectrum cannot give

# Separable scores become a table over shifts where a factor has more entries than this for each query of the grid.
FACTOR_ENTRIES = 64


def block_bytes(device: str, *, long: bool = False) -> int:
    """Bytes of mixed values in a block on a kind of device (`cpu`, `cuda`, ..), on short axes or on long ones."""
    if device == "cpu":
        return KRONECKER_BLOCK
    return KRONECKER_LONG_BLOCK_GPU if long else KRONECKER_BLOCK_GPU


def are_short(factors: Sequence[Tensor]) -> bool:
    """Whether no axis is long enough for bands."""
    return all(factor.shape[2] < LONG_AXIS for factor in factors)


def spans(count: int, length: int) -> list[slice]:
    """`count` places in parts of `length`, the last one shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
