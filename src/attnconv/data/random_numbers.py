"""Random numbers as a function of (seed, epoch, sample, stream): the same bits on every device and in every batch.

An ordinary generator has a state, so what it gives an image depends on everything drawn before: on the batch size, the
number of processes, on where a training was resumed. Here the numbers are *encrypted counters* instead (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011):

    key      = Threefry(seed; epoch, stream)
    numbers  = Threefry(key; sample, 0), Threefry(key; sample, 1), ...

Threefry-2x32 with 20 rounds takes only additions, rotations and exclusive ors of 32-bit words. They are done on int64
tensors with masks, so that nothing ever overflows and CPU, CUDA and MPS agree bit for bit.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias, TypeVar, final

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from attnconv._util.errors import bad

Word = TypeVar("Word", int, Tensor)
Words: TypeAlias = Callable[[int, int, Int64[Tensor, "n"], int, int], Int64[Tensor, "n count"]]  # as `words`

MASK = 0xFFFFFFFF
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


class Stream(IntEnum):
    """One number per use, so that no two uses share their random numbers."""

    SHUFFLE = 0
    SPLIT = 1
    AUGMENT = 2
    MIX = 3


def threefry(key: tuple[int, int], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Threefry-2x32, 20 rounds: a bijection of the counter for each key.

    Args:
        key: two words in [0, 2^32).
        counter: two words in [0, 2^32), integers or int64 tensors that broadcast.

    Returns:
        Two words in [0, 2^32) of the same kind.

    Example:
        >>> [hex(word) for word in threefry((0, 0), (0, 0))]
        ['0x6b200159', '0x99ba4efe']
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    a, b = (counter[0] + keys[0]) & MASK, (counter[1] + keys[1]) & MASK
    for turn in range(20):
        by = _ROTATIONS[turn % 8]
        a = (a + b) & MASK
        b = ((b << by | b >> (32 - by)) & MASK) ^ a  # b < 2^32 and by < 30: the shift stays below 2^62
        if turn % 4 == 3:
            step = turn // 4 + 1
            a, b = (a + keys[step % 3]) & MASK, (b + (keys[(step + 1) % 3] + step)) & MASK
    return a, b


def words(seed: int, epoch: int, samples: Int64[Tensor, " n"], stream: int, count: int) -> Int64[Tensor, "n count"]:
    """Uniform integers in [0, 2^32): the random bits behind everything else in this module.

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        samples: numbers of the samples, each 0 to 2^32 - 1; the result is on their device.
        stream: what the numbers are for, 0 to 2^32 - 1; see `Stream`.
        count: how many numbers each sample gets, at least 1. A smaller count gives the first ones of a larger.

    Returns:
        The numbers, one row per sample.

    Raises:
        ValueError: if the seed, epoch, stream or count is out of range.
    """
    for name, value, bits in (("seed", seed, 63), ("epoch", epoch, 32), ("stream", stream, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(bad(name, f"must be 0 to 2^{bits} - 1", value))
    if count < 1:
        raise ValueError(bad("count", "must be at least 1", count))
    key = threefry((seed >> 32, seed & MASK), (int(epoch), int(stream)))
    blocks = torch.arange((count + 1) // 2, device=samples.device)
    pair = threefry(key, (samples[:, None] & MASK, blocks))
    return torch.stack(pair, dim=-1).flatten(1)[:, :count]


@final
class WordsOfASet:
    """`words` for training: those of a whole set are made when an epoch first asks, and a batch's are looked up.

    Threefry is 160 small operations whatever the number of samples. Batch after batch they cost a GPU more time than
    the changes that they decide.

    Args:
        size: number of samples in the set; they are 0 to size - 1.

    Example:
        >>> some, draw = torch.tensor([7, 2]), WordsOfASet(10)
        >>> torch.equal(draw(0, 3, some, Stream.AUGMENT, 4), words(0, 3, some, Stream.AUGMENT, 4))
        True
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._of: tuple[int, int, torch.device] | None = None
        self._tables: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, seed: int, epoch: int, samples: Int64[Tensor, "n"], stream: int, count: int
    ) -> Int64[Tensor, "n count"]:
        """The same numbers as `words` gives."""
        if self._of != (seed, epoch, samples.device):
            self._of, self._tables = (seed, epoch, samples.device), {}
        if (stream, count) not in self._tables:
            everyone = torch.arange(self.size, device=samples.device)
            self._tables[stream, count] = words(seed, epoch, everyone, stream, count)
        return self._tables[stream, count][samples]


def uniform(seed: int, epoch: int, samples: Int64[Tensor, " n"], stream: int, count: int) -> Float32[Tensor, "n count"]:
    """Uniform numbers in [0, 1), multiples of 2^-24, which float32 holds exactly.

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        samples: numbers of the samples, each 0 to 2^32 - 1; the result is on their device.
        stream: what the numbers are for; see `Stream`.
        count: how many numbers each sample gets, at least 1.

    Returns:
        The numbers, one row per sample. A row depends on its sample alone, not on the other rows.

    Raises:
        ValueError: if the seed, epoch, stream or count is out of range.

    Example:
        >>> both = uniform(0, 3, torch.tensor([7, 12]), Stream.AUGMENT, 2)
        >>> torch.equal(both[1:], uniform(0, 3, torch.tensor([12]), Stream.AUGMENT, 2))
        True
    """
    return fraction(words(seed, epoch, samples, stream, count))


def fraction(numbers: Int64[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Turn integers in [0, 2^32) into float32 numbers in [0, 1) by their upper 24 bits, exactly."""
    return (numbers >> 8).to(torch.float32) * 2.0**-24


def below(numbers: Int64[Tensor, "*shape"], limit: int) -> Int64[Tensor, "*shape"]:
    """Turn integers in [0, 2^32) into integers in [0, limit), exactly; the bias is below limit / 2^32."""
    if not 1 <= limit < 1 << 31:
        raise ValueError(bad("limit", "must be 1 to 2^31 - 1", limit))
    return numbers * limit >> 32


def integers(
    seed: int, epoch: int, samples: Int64[Tensor, " n"], stream: int, count: int, *, limit: int
) -> Int64[Tensor, "n count"]:
    """Uniform integers in [0, limit).

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        samples: numbers of the samples, each 0 to 2^32 - 1; the result is on their device.
        stream: what the numbers are for; see `Stream`.
        count: how many numbers each sample gets, at least 1.
        limit: the first integer that is not drawn, 1 to 2^31 - 1.

    Returns:
        The integers, one row per sample.

    Raises:
        ValueError: if an argument is out of range.
    """
    return below(words(seed, epoch, samples, stream, count), limit)


def permutation(
    seed: int, epoch: int, n: int, *, stream: int = Stream.SHUFFLE, device: torch.device | str | None = None
) -> Int64[Tensor, " n"]:
    """A random order of n samples: each sample draws 63 bits, and the samples are sorted by them.

    Args:
        seed: the run's seed, 0 to 2^63 - 1.
        epoch: 0 to 2^32 - 1.
        n: number of samples, at least 0.
        stream: what the order is for; see `Stream`.
        device: where the result shall be; its values do not depend on it.

    Returns:
        The integers 0 to n - 1 in random order.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> permutation(seed=0, epoch=1, n=5).sort().values.tolist()
        [0, 1, 2, 3, 4]
    """
    if n < 0:
        raise ValueError(bad("n", "must be at least 0", n))
    draws = words(seed, epoch, torch.arange(n, device=device), stream, 2)
    return torch.argsort(draws[:, 0] << 31 | draws[:, 1] >> 1, stable=True)
