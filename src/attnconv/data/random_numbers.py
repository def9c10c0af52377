"""Random numbers as a function of (seed, epoch, sample), from numpy's Philox generator.

If one generator ran through a whole training, an image's numbers would depend on everything drawn before: the batch
size, the number of processes, where the training was resumed. Here each (seed, epoch, stream) is the key of its own
generator, and its numbers are drawn for the whole set at once, on the CPU.

The numbers are the raw words of the bit generator: NumPy keeps those the same in all releases, unlike the results of
the methods of `np.random.Generator`.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnconv._util.errors import bad

COLUMNS = 36
"""Numbers per sample and epoch: `augment` uses the first 8, `mix` the others."""


class Stream(IntEnum):
    """What numbers are for; no two uses share theirs."""

    SHUFFLE = 0
    SPLIT = 1
    AUGMENT = 2


def uniform(seed: int, epoch: int, n: int) -> Float32[Tensor, "n 36"]:
    """Uniform numbers in [0, 1) for augmentation, multiples of 2^-24, which float32 holds exactly.

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        n: number of samples, at least 0. A sample's row does not depend on it.

    Returns:
        One row per sample, on the CPU.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> torch.equal(uniform(0, 3, 5), uniform(0, 3, 9)[:5])
        True
    """
    words = _words(seed, epoch, Stream.AUGMENT, (n, COLUMNS))
    return torch.from_numpy((words >> 40).astype(np.float32) * np.float32(2.0**-24))


def below(uniforms: Float32[Tensor, "*shape"], limit: int) -> Int64[Tensor, "*shape"]:
    """Turn numbers from `uniform` into integers in [0, limit); the bias is below limit / 2^24."""
    return (uniforms * limit).to(torch.int64)


def permutation(seed: int, epoch: int, n: int, *, stream: Stream = Stream.SHUFFLE) -> Int64[Tensor, " n"]:
    """A random order of n samples: each draws 64 bits, and the samples are sorted by them.

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        n: number of samples, at least 0.
        stream: what the order is for.

    Returns:
        The integers 0 to n - 1 in random order, on the CPU.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> permutation(seed=0, epoch=1, n=5).sort().values.tolist()
        [0, 1, 2, 3, 4]
    """
    return torch.from_numpy(np.argsort(_words(seed, epoch, stream, (n,)), kind="stable"))


def _words(seed: int, epoch: int, stream: Stream, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    for name, value, bits in (("seed", seed, 63), ("epoch", epoch, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(bad(name, f"must be 0 to 2^{bits} - 1", value))
    if shape[0] < 0:
        raise ValueError(bad("n", "must be at least 0", shape[0]))
    return np.random.Philox(key=seed << 64 | epoch << 32 | stream).random_raw(shape)
