"""Block sizes and thresholds of kernels. They affect time and memory, but not results.

Block sizes are in bytes, tuned on two-core x86 machines; those for GPUs are from data sheets.
"""

from collections.abc import Sequence

from torch import Tensor

# Kronecker factors: mixed values of all heads that are in memory at a time; on a CPU they fit in cache.
KRONECKER_BLOCK = 2**22
# On a GPU, a product over 16 MiB takes about as long as its launch. Larger blocks would only use more memory.
KRONECKER_BLOCK_GPU = 2**24
# Long axes are computed by head and tile, so that each launch processes about a hundredth of a block.
KRONECKER_LONG_BLOCK_GPU = 2**28
LONG_AXIS = 96  # minimum number of keys for which factors are computed as bands
BAND_TILE = 32  # queries of a long axis that share a range of keys
STRIP = 256  # columns of a wide image that are contracted at a time, so that neighbouring rows stay in cache
LEAST_COLUMNS = 8  # minimum number of columns in a part of an image with short axes, to avoid thin products
LEAST_ROWS = 16  # minimum number of queries in a block, to avoid thin products

# Scores with relative biases, which stay in cache from the product to the softmax.
SCORES_BLOCK = 2**21

# Toeplitz operators.
ALL_ROWS = 2**24  # maximum number of probabilities for computing all rows at once, near the break-even point
WINDOW_TILE = 64  # queries per tile, over all axes
WINDOW_BLOCK = 2**23  # gathered keys
SPECTRUM_BLOCK = 2**28  # transformed numbers
ROWS_BLOCK = 2**26  # rows that are computed without the spectrum

# Separable scores use a table over shifts if a factor has more than this number of entries per query of the grid.
FACTOR_ENTRIES = 64


def block_bytes(device: str, *, long: bool = False) -> int:
    """Return the size in bytes of a block of mixed values on a device type (`cpu`, `cuda`, ..)."""
    if device == "cpu":
        return KRONECKER_BLOCK
    return KRONECKER_LONG_BLOCK_GPU if long else KRONECKER_BLOCK_GPU


def are_short(factors: Sequence[Tensor]) -> bool:
    """Return whether no axis is long enough for bands."""
    return all(factor.shape[2] < LONG_AXIS for factor in factors)


def spans(count: int, length: int) -> list[slice]:
    """Split range(count) into slices of `length`; the last one may be shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
