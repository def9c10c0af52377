"""Mixup and CutMix: blends of pixels and labels agree, and Beta numbers are Beta numbers."""

import pytest
import torch
from torch import Tensor

from attnconv.data.augmentation import beta, mix
from attnconv.data.random_numbers import uniform
from attnconv.data.settings import AugmentSettings
from tests.tolerances import tolerance


def batch(n: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Images whose pixels are all their own label, so that a blend of pixels tells the blend of labels."""
    labels = torch.arange(n).flip(0)
    return labels.float()[:, None, None, None].expand(n, 3, 8, 10).contiguous(), labels, uniform(1, 2, 500 + n)[500:]


class TestMix:
    def test_off_is_one_hot(self) -> None:
        images, labels, uniforms = batch()
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(), classes=64)
        assert torch.equal(mixed, images)
        assert torch.equal(soft.argmax(dim=1), labels)
        assert torch.equal(soft.sum(dim=1), soft.max(dim=1).values)

    @pytest.mark.parametrize("chosen", [{"mixup": 0.2}, {"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 0.5, "cutmix": 1.0}])
    def test_labels_are_blended_like_pixels(self, chosen: dict[str, float]) -> None:
        images, labels, uniforms = batch()
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(**chosen), classes=64)  # type: ignore[arg-type]
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(64), **tolerance(torch.float32))
        assert int((soft > 0).sum(dim=1).max()) == 2
        seen, said = mixed.mean(dim=(1, 2, 3)), soft @ torch.arange(64.0)
        torch.testing.assert_close(seen, said, **tolerance(torch.float32))
        assert not torch.equal(mixed, images)

    def test_cutmix_pastes_and_mixup_blends(self) -> None:
        images, labels, uniforms = batch()
        pasted, _ = mix(images, labels, uniforms, settings=AugmentSettings(cutmix=1.0), classes=64)
        assert torch.equal(pasted, pasted.round())
        blended, _ = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0), classes=64)
        assert torch.equal(blended, blended[:, :, :1, :1].expand_as(blended))
        both, _ = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0, cutmix=1.0), classes=64)
        flat = (both == both[:, :, :1, :1]).flatten(1).all(dim=1)
        assert 10 < int(flat.sum()) < 54

    def test_how_much_depends_on_the_sample_alone(self) -> None:
        images, labels, uniforms = batch()
        settings = AugmentSettings(mixup=0.7)
        _, whole = mix(images, labels, uniforms, settings=settings, classes=64)
        part = torch.arange(10, 30)
        _, some = mix(images[part], labels[part], uniforms[part], settings=settings, classes=64)
        own = torch.arange(len(part))
        torch.testing.assert_close(some[own, labels[part]], whole[part, labels[part]], rtol=0, atol=0)

    def test_a_batch_of_one_stays_itself(self) -> None:
        images, labels, uniforms = (tensor[:1] for tensor in batch())
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0), classes=64)
        torch.testing.assert_close(mixed, images, **tolerance(torch.float32))
        assert float(soft[0, labels[0]]) == 1.0

    def test_half_precision_is_kept(self) -> None:
        images, labels, uniforms = batch()
        mixed, soft = mix(
            images.bfloat16(), labels, uniforms, settings=AugmentSettings(mixup=1.0, cutmix=1.0), classes=64
        )
        assert (mixed.dtype, soft.dtype) == (torch.bfloat16, torch.float32)

    @pytest.mark.parametrize("label", [-1, 64])
    def test_labels_must_be_classes(self, label: int) -> None:
        images, labels, uniforms = batch()
        labels[5] = label
        with pytest.raises(RuntimeError, match="Class values must be"):
            mix(images, labels, uniforms, settings=AugmentSettings(), classes=64)


class TestBeta:
    @pytest.mark.parametrize("a", [0.1, 0.2, 0.5, 1.0])
    def test_moments(self, a: float) -> None:
        """Mean 1/2, variance 1 / (4 (2a + 1)), and symmetric."""
        n = 100_000
        draws = beta(a, uniform(0, 0, n)[:, :24]).double()
        variance = 1 / (4 * (2 * a + 1))
        assert abs(draws.mean() - 0.5) < 4 * (variance / n) ** 0.5
        assert abs(draws.var() - variance) < 0.01 * variance
        assert 0.0 <= draws.min() <= draws.max() <= 1.0

    def test_at_one_it_is_uniform(self) -> None:
        draws = beta(1.0, uniform(0, 0, 64_000)[:, :24])
        counts = torch.histc(draws, bins=32, min=0, max=1)
        assert abs(float(((counts - 2000) ** 2 / 2000).sum()) - 31) < 4.5 * (2 * 31) ** 0.5
