"""Random numbers: the same for all NumPy releases, uniform, and a function of seed, epoch and sample."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from attnconv.data.augmentation import below
from attnconv.data.image_set import AUGMENT, COLUMNS, SPLIT, permutation, uniform

N = 20_000


class TestUniform:
    @pytest.mark.parametrize("epoch", [0, 3, 2**32 - 1])
    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
    def test_mean_variance_and_histogram(self, seed: int, epoch: int) -> None:
        numbers = uniform(seed, epoch, N)[:, :5].double()
        n = numbers.numel()
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        # Four standard deviations of the mean of n uniform numbers, and of their mean square.
        assert abs(numbers.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
        assert abs(numbers.square().mean() - 1 / 3) < 4 * math.sqrt(4 / 45 / n)
        counts = torch.histc(numbers.flatten(), bins=64, min=0, max=1)
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert abs(chi2 - 63) < 4.5 * math.sqrt(2 * 63)

    def test_nothing_is_correlated(self) -> None:
        """Columns, neighbouring samples, epochs and seeds are uncorrelated, for each pair of sequences."""
        base = uniform(0, 0, N + 1)
        others = {
            **{f"column {column}": base[:-1, column] for column in range(1, COLUMNS)},
            "neighbour": base[1:, 0],
            "epoch": uniform(0, 1, N)[:, 0],
            "seed": uniform(1, 0, N)[:, 0],
            "high half of the seed": uniform(1 << 32, 0, N)[:, 0],
        }
        for name, other in others.items():
            correlation = torch.corrcoef(torch.stack([base[:-1, 0], other]))[0, 1]
            assert abs(correlation) < 4.5 / math.sqrt(N), name

    @given(st.integers(0, 12), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
    def test_a_row_does_not_depend_on_the_size_of_the_set(self, n: int, seed: int, epoch: int) -> None:
        assert torch.equal(uniform(seed, epoch, n), uniform(seed, epoch, 12)[:n])

    def test_the_bits_are_fixed_for_ever(self) -> None:
        """Runs are reproducible because of these numbers; if they change, every run changes."""
        assert (uniform(42, 7, 50_000)[[0, -1], :3] * 2**24).tolist() == FIXED
        assert permutation(42, 7, 10).tolist() == FIXED_ORDER


class TestBelow:
    @pytest.mark.parametrize("limit", [1, 2, 9, 10, 1000])
    def test_every_value_is_as_frequent(self, limit: int) -> None:
        numbers = below(uniform(0, 0, N)[:, :5], limit)
        counts = torch.bincount(numbers.flatten(), minlength=limit).double()
        assert len(counts) == limit
        expected = numbers.numel() / limit
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - (limit - 1)) <= 4.5 * math.sqrt(2 * limit)

    def test_the_ends_are_exact(self) -> None:
        ends = torch.tensor([0, 1 - 2.0**-24])
        for limit in (*range(1, 5000), 2**24 - 1, 2**24):
            assert below(ends, limit).tolist() == [0, limit - 1]

    @pytest.mark.gpu
    def test_a_gpu_has_the_same_integers(self) -> None:
        numbers = uniform(1, 2, N)
        for limit in (2, 9, 1000):
            assert torch.equal(below(numbers.cuda(), limit).cpu(), below(numbers, limit))


class TestPermutation:
    @given(st.integers(0, 300), st.integers(0, 2**63 - 1), st.integers(0, 1000))
    def test_it_is_a_permutation(self, n: int, seed: int, epoch: int) -> None:
        assert torch.equal(permutation(seed, epoch, n).sort().values, torch.arange(n))

    def test_it_depends_on_everything(self) -> None:
        orders = [permutation(0, 0, 50), permutation(0, 1, 50), permutation(1, 0, 50)]
        orders += [permutation(0, 0, 50, stream=stream) for stream in (SPLIT, AUGMENT)]
        assert len({tuple(order.tolist()) for order in orders}) == 5
        assert torch.equal(orders[0], permutation(0, 0, 50))

    def test_all_orders_are_as_frequent(self) -> None:
        """Count all 24 orders of 4 samples over 4800 epochs."""
        counts: dict[tuple[int, ...], int] = {}
        for epoch in range(4800):
            order = tuple(permutation(0, epoch, 4).tolist())
            counts[order] = counts.get(order, 0) + 1
        chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
        assert len(counts) == 24
        assert abs(chi2 - 23) < 4.5 * math.sqrt(2 * 23)


FIXED = [[5799815, 9153502, 15168778], [12912945, 1821335, 16215138]]
FIXED_ORDER = [5, 4, 6, 9, 8, 2, 0, 7, 1, 3]
