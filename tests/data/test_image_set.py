"""Image sets, their splits, and batches: every image once, and the same global batches for any number of processes."""

import pytest
import torch
from hypothesis import given, strategies as st

from attnconv.data.image_set import Batch, Batches, ImageSet, channel_statistics, held_out, uniform
from tests.tolerances import tolerance


def image_set(n: int = 4) -> ImageSet:
    return ImageSet(torch.randint(0, 256, (n, 3, 5, 7), dtype=torch.uint8), torch.arange(n))


class TestImageSet:
    def test_what_it_says_of_itself(self) -> None:
        some = image_set()
        assert (len(some), some.channels, some.size) == (4, 3, (5, 7))

    def test_take_keeps_images_and_labels_together(self) -> None:
        some = image_set()
        taken = some.take(torch.tensor([3, 1]))
        assert taken.labels.tolist() == [3, 1]
        torch.testing.assert_close(taken.images, some.images[[3, 1]], rtol=0, atol=0)

    def test_to_moves_both(self) -> None:
        there = image_set().to("meta")
        assert {there.images.device.type, there.labels.device.type} == {"meta"}

    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((4, 3, 5), r"images: .*got shape \(4, 3, 5\)"),
            ((4, 3, 0, 7), r"images: .*got shape \(4, 3, 0, 7\)"),
        ],
    )
    def test_shapes(self, shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ImageSet(torch.zeros(shape, dtype=torch.uint8), torch.arange(4))

    @pytest.mark.usefixtures("unhooked")
    def test_dtypes(self) -> None:
        with pytest.raises(ValueError, match=r"images: .*got .*torch\.float32"):
            ImageSet(torch.zeros(4, 3, 5, 7), torch.arange(4))
        with pytest.raises(ValueError, match=r"labels: .*got shape \(4,\) of torch\.int32"):
            ImageSet(torch.zeros(4, 3, 5, 7, dtype=torch.uint8), torch.arange(4, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"labels: .*got shape \(3,\)"):
            ImageSet(torch.zeros(4, 3, 5, 7, dtype=torch.uint8), torch.arange(3))


class TestHeldOut:
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data(), st.booleans(), st.integers(0, 99))
    def test_both_sides_make_up_the_whole(self, labels: list[int], data: st.DataObject, even: bool, seed: int) -> None:
        count = data.draw(st.integers(0, len(labels) - 1))
        kept, out = held_out(torch.tensor(labels), count, seed=seed, stratify=even)
        assert len(out) == count
        assert sorted([*kept.tolist(), *out.tolist()]) == list(range(len(labels)))
        assert out.tolist() == sorted(out.tolist())
        if even:
            for label in set(labels):
                share = sum(labels[number] == label for number in out.tolist())
                assert abs(share - labels.count(label) * count / len(labels)) < 1

    def test_it_is_a_function_of_the_seed(self) -> None:
        labels = torch.arange(100) % 10
        first, again, other = (held_out(labels, 20, seed=seed)[1].tolist() for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_without_strata_it_is_the_beginning_of_the_order(self) -> None:
        sides = [held_out(torch.zeros(50, dtype=torch.int64), 20, seed=3, stratify=even)[1] for even in (True, False)]
        assert sides[0].tolist() == sides[1].tolist()  # with one class, both rules agree

    @pytest.mark.parametrize("count", [-1, 10, 11])
    def test_something_must_be_left(self, count: int) -> None:
        with pytest.raises(ValueError, match=rf"data\.validation: .*got {count}\."):
            held_out(torch.zeros(10, dtype=torch.int64), count, seed=0)


class TestChannelStatistics:
    def test_against_floats(self) -> None:
        images = torch.randint(0, 256, (6, 3, 5, 7), dtype=torch.uint8)
        floats = images.double().div(255).movedim(1, 0).flatten(1)
        mean, std = channel_statistics(images)
        torch.testing.assert_close(torch.tensor(mean).double(), floats.mean(dim=1), **tolerance(torch.float32))
        deviation = floats.std(dim=1, correction=0)
        torch.testing.assert_close(torch.tensor(std).double(), deviation, **tolerance(torch.float32))

    def test_a_constant_channel_is_left_alone(self) -> None:
        assert channel_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)) == ((0.2,), (1.0,))


def numbered(n: int) -> ImageSet:
    """Return images with their index (mod 256) as pixel value and 10 times their index as label."""
    images = torch.arange(n).remainder(256).to(torch.uint8)[:, None, None, None].expand(n, 1, 2, 2).contiguous()
    return ImageSet(images, torch.arange(n) * 10)


def samples_of(batch: Batch) -> list[int]:
    """Return the indices of a batch's images in their set."""
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
