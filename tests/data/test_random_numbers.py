"""Counter-based random numbers: known answers, uniformity, and that a sample's numbers are its own."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from attnconv.data.random_numbers import Stream, below, fraction, integers, permutation, threefry, uniform, words

SAMPLES = torch.arange(20_000)


class TestThreefry:
    @pytest.mark.parametrize(
        ("key", "counter", "expected"),
        [  # Random123's kat_vectors, threefry2x32 with 20 rounds
            ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
            ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
            ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
        ],
    )
    def test_the_published_answers(
        self, key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        assert threefry(key, counter) == expected
        pair = threefry(key, (torch.tensor(counter[0]), torch.tensor(counter[1])))
        assert tuple(int(word) for word in pair) == expected

    def test_it_is_one_to_one(self) -> None:
        a, b = threefry((3, 4), (torch.arange(1 << 16), torch.tensor(7)))
        assert len((a << 31 | b >> 1).unique()) == 1 << 16


class TestUniform:
    @pytest.mark.parametrize("stream", list(Stream))
    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
    def test_mean_variance_and_histogram(self, seed: int, stream: Stream) -> None:
        numbers = uniform(seed, 3, SAMPLES, stream, 5).double()
        n = numbers.numel()
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        # Four deviations of the mean of n uniform numbers, and of their mean square.
        assert abs(numbers.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
        assert abs(numbers.square().mean() - 1 / 3) < 4 * math.sqrt(4 / 45 / n)
        counts = torch.histc(numbers.flatten(), bins=64, min=0, max=1)
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert abs(chi2 - 63) < 4.5 * math.sqrt(2 * 63)

    def test_nothing_is_correlated(self) -> None:
        """Columns, neighbouring samples, epochs, seeds and streams: each pair of sequences, as white as noise."""
        base = uniform(0, 0, SAMPLES, 0, 2)
        others = {
            "column": base[:, 1],
            "neighbour": uniform(0, 0, SAMPLES + 1, 0, 1)[:, 0],
            "epoch": uniform(0, 1, SAMPLES, 0, 1)[:, 0],
            "seed": uniform(1, 0, SAMPLES, 0, 1)[:, 0],
            "high half of the seed": uniform(1 << 32, 0, SAMPLES, 0, 1)[:, 0],
            "stream": uniform(0, 0, SAMPLES, 1, 1)[:, 0],
        }
        for name, other in others.items():
            correlation = torch.corrcoef(torch.stack([base[:, 0], other]))[0, 1]
            assert abs(correlation) < 4.5 / math.sqrt(len(SAMPLES)), name

    @given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
    def test_a_sample_keeps_its_numbers_in_any_batch(self, order: list[int], size: int, seed: int, epoch: int) -> None:
        whole = uniform(seed, epoch, torch.arange(12), Stream.AUGMENT, 3)
        part = torch.tensor(order[:size])
        assert torch.equal(uniform(seed, epoch, part, Stream.AUGMENT, 3), whole[part])

    def test_fewer_numbers_are_the_first_of_more(self) -> None:
        more = words(5, 6, SAMPLES[:10], 1, 7)
        for count in range(1, 8):
            assert torch.equal(words(5, 6, SAMPLES[:10], 1, count), more[:, :count])

    def test_the_bits_are_fixed_for_ever(self) -> None:
        """Runs are reproduced by these numbers: a change here changes every run."""
        assert words(42, 7, torch.tensor([0, 49_999]), Stream.AUGMENT, 3).tolist() == FIXED

    def test_the_top_of_the_range_stays_below_one(self) -> None:
        top = torch.tensor([0, 255, 256, 2**32 - 1])
        assert fraction(top).tolist() == [0.0, 0.0, 2.0**-24, 1 - 2.0**-24]

    @pytest.mark.gpu
    def test_the_gpu_has_the_same_bits(self) -> None:
        assert torch.equal(words(1, 2, SAMPLES.cuda(), 3, 4).cpu(), words(1, 2, SAMPLES, 3, 4))
        assert torch.equal(permutation(1, 2, 1000, device="cuda").cpu(), permutation(1, 2, 1000))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((-1, 0, 0, 1), r"seed: must be 0 to 2\^63 - 1, got -1"),
            ((2**63, 0, 0, 1), r"seed: must be 0 to 2\^63 - 1, got 9223372036854775808"),
            ((0, -2, 0, 1), r"epoch: must be 0 to 2\^32 - 1, got -2"),
            ((0, 0, -3, 1), r"stream: must be 0 to 2\^32 - 1, got -3"),
            ((0, 0, 0, 0), r"count: must be at least 1, got 0"),
        ],
    )
    def test_ranges(self, arguments: tuple[int, int, int, int], message: str) -> None:
        seed, epoch, stream, count = arguments
        with pytest.raises(ValueError, match=message):
            uniform(seed, epoch, SAMPLES[:2], stream, count)


class TestIntegers:
    @pytest.mark.parametrize("limit", [1, 2, 9, 10, 1000])
    def test_every_value_is_as_frequent(self, limit: int) -> None:
        numbers = integers(0, 0, SAMPLES, 0, 5, limit=limit)
        counts = torch.bincount(numbers.flatten(), minlength=limit).double()
        assert len(counts) == limit
        expected = numbers.numel() / limit
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - (limit - 1)) <= 4.5 * math.sqrt(2 * limit)

    def test_the_ends_are_exact(self) -> None:
        assert below(torch.tensor([0, 2**32 - 1]), 2**31 - 1).tolist() == [0, 2**31 - 2]

    @pytest.mark.parametrize("limit", [0, 2**31])
    def test_range(self, limit: int) -> None:
        with pytest.raises(ValueError, match=rf"limit: must be 1 to 2\^31 - 1, got {limit}"):
            integers(0, 0, SAMPLES, 0, 1, limit=limit)


class TestPermutation:
    @given(st.integers(0, 300), st.integers(0, 2**63 - 1), st.integers(0, 1000))
    def test_it_is_a_permutation(self, n: int, seed: int, epoch: int) -> None:
        assert torch.equal(permutation(seed, epoch, n).sort().values, torch.arange(n))

    def test_it_depends_on_everything(self) -> None:
        orders = [permutation(0, 0, 50), permutation(0, 1, 50), permutation(1, 0, 50), permutation(0, 0, 50, stream=1)]
        assert len({tuple(order.tolist()) for order in orders}) == 4
        assert torch.equal(orders[0], permutation(0, 0, 50))

    def test_all_orders_are_as_frequent(self) -> None:
        """All 24 orders of 4 samples over 4800 epochs."""
        counts: dict[tuple[int, ...], int] = {}
        for epoch in range(4800):
            order = tuple(permutation(0, epoch, 4).tolist())
            counts[order] = counts.get(order, 0) + 1
        chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
        assert len(counts) == 24
        assert abs(chi2 - 23) < 4.5 * math.sqrt(2 * 23)

    def test_range(self) -> None:
        with pytest.raises(ValueError, match=r"n: must be at least 0, got -1"):
            permutation(0, 0, -1)


FIXED = [[2652955607, 4292170730, 2471020088], [2909088695, 94334640, 1959643194]]
