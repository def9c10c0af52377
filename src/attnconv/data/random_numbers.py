"""Random numbers as a function of (seed, epoch, sample), from numpy's Philox generator, for the whole set at once.

They do not depend on the batch size, the number of processes or where a training was resumed. They are raw words of
the bit generator, which NumPy keeps the same in all releases, unlike the methods of `np.random.Generator`.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnconv._util.errors import bad

COLUMNS = 36  # numbers per sample and epoch: `augment` uses the first 8, `mix` the others


class Stream(IntEnum):
    """What numbers are for; no two uses share theirs."""

    SHUFFLE = 0
    SPLIT = 1
    AUGMENT = 2


def uniform(seed: int, epoch: int, n: int) -> Float32[Tensor, "n 36"]:
    """Draw uniform numbers in [0, 1) for augmentation, multiples of 2^-24, which float32 holds exactly.

    A sample's row does not depend on the number of samples, n. Seeds are 0 to 2^63 - 1, epochs 0 to 2^32 - 1.
    """
    words = _words(seed, epoch, Stream.AUGMENT, (n, COLUMNS))
    return torch.from_numpy((words >> 40).astype(np.float32) * np.float32(2.0**-24))


def below(uniforms: Float32[Tensor, "*shape"], limit: int) -> Int64[Tensor, "*shape"]:
    """Turn numbers from `uniform` into integers in [0, limit); the bias is below limit / 2^24."""
    return (uniforms * limit).to(torch.int64)


def permutation(seed: int, epoch: int, n: int, *, stream: Stream = Stream.SHUFFLE) -> Int64[Tensor, " n"]:
    """Draw a random order of n samples: each draws 64 bits, and the samples are sorted by them."""
    return torch.from_numpy(np.argsort(_words(seed, epoch, stream, (n,)), kind="stable"))


def _words(seed: int, epoch: int, stream: Stream, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    for name, value, most in (("seed", seed, 2**63 - 1), ("epoch", epoch, 2**32 - 1), ("n", shape[0], 2**63 - 1)):
        if not 0 <= value <= most:
            raise ValueError(bad(name, f"must be 0 to {most}", value))
    return np.random.Philox(key=seed << 64 | epoch << 32 | stream).random_raw(shape)
