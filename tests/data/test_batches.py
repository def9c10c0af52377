"""Batches: every image once, the same global batches on any number of processes."""

import pytest
import torch
from hypothesis import given, strategies as st

from attnconv.data.image_set import Batch, Batches, ImageSet
from attnconv.data.random_numbers import uniform


def numbered(n: int) -> ImageSet:
    """Images that know their number by their first pixel."""
    images = torch.arange(n).remainder(256).to(torch.uint8)[:, None, None, None].expand(n, 1, 2, 2).contiguous()
    return ImageSet(images, torch.arange(n) * 10)


def samples_of(batch: Batch) -> list[int]:
    """Numbers of a batch's images in their set."""
    return (batch.labels // 10).tolist()


class TestOrder:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_every_image_comes_once_with_its_label(self, shuffle: bool) -> None:
        batches = Batches(numbered(23), batch_size=5, shuffle=shuffle)
        found = list(batches)
        assert [len(batch.labels) for batch in found] == [5, 5, 5, 5, 3]
        assert len(batches) == 5
        samples = [sample for batch in found for sample in samples_of(batch)]
        assert (samples == list(range(23))) is not shuffle
        assert sorted(samples) == list(range(23))
        assert torch.cat([batch.labels for batch in found]).tolist() == [sample * 10 for sample in samples]
        assert torch.cat([batch.images for batch in found])[:, 0, 0, 0].tolist() == samples

    def test_each_epoch_has_its_order_and_keeps_it(self) -> None:
        batches = Batches(numbered(30), batch_size=30, seed=4, shuffle=True)

        def order(epoch: int) -> list[int]:
            batches.epoch = epoch
            (batch,) = batches
            return samples_of(batch)

        first, second, again = order(0), order(1), order(0)
        assert first == again
        assert first != second

    def test_an_incomplete_batch_can_be_dropped(self) -> None:
        batches = Batches(numbered(23), batch_size=5, drop_last=True)
        assert [len(batch.labels) for batch in batches] == [5, 5, 5, 5]
        assert len(batches) == 4


class TestProcesses:
    @given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
    def test_together_they_see_the_global_batches(self, n: int, each: int, world: int, drop: bool) -> None:
        size = each * world
        if drop and n < size:
            return
        one = list(Batches(numbered(n), batch_size=size, seed=2, shuffle=True, drop_last=drop))
        shares = [
            Batches(numbered(n), batch_size=size, seed=2, shuffle=True, drop_last=drop, rank=rank, world=world)
            for rank in range(world)
        ]
        parts = [list(share) for share in shares]
        assert [len(part) for part in parts] == [len(share) for share in shares]
        assert all(len(batch.labels) > 0 for part in parts for batch in part)
        for number, batch in enumerate(one):
            together = [part[number] for part in parts if number < len(part)]
            assert [sample for part in together for sample in samples_of(part)] == samples_of(batch)
            if len(batch.labels) == size:
                assert [len(part.labels) for part in together] == [each] * world


class TestRandomNumbers:
    @given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 5))
    def test_a_sample_has_its_numbers_in_any_batch_and_process(
        self, n: int, each: int, world: int, shuffle: bool, epoch: int
    ) -> None:
        wanted = uniform(2, epoch, n)
        for rank in range(world):
            batches = Batches(numbered(n), batch_size=each * world, seed=2, shuffle=shuffle, rank=rank, world=world)
            batches.epoch = epoch
            for batch in batches:
                assert torch.equal(batch.uniforms, wanted[samples_of(batch)])


class TestBadInput:
    def test_batch_size(self) -> None:
        with pytest.raises(ValueError, match=r"batch_size: .*got 0"):
            Batches(numbered(3), batch_size=0)
        with pytest.raises(ValueError, match=r"batch_size: .*got 3"):
            Batches(numbered(9), batch_size=3, world=2)
        with pytest.raises(ValueError, match=r"batch_size: .*got 10"):
            Batches(numbered(9), batch_size=10, drop_last=True)
