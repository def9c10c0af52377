"""Image sets, the held-out split, and the statistics of channels."""

import pytest
import torch
from hypothesis import given, strategies as st

from attnconv.data.image_set import ImageSet, channel_statistics, held_out
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
        assert sides[0].tolist() == sides[1].tolist()  # one class: both rules agree

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
