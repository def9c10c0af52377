"""Augmentation: every change compared with its definition, and equal blends of images and labels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnconv.data.augmentation import augment, below, beta, grey, mix, normalise
from attnconv.data.image_set import uniform
from attnconv.data.settings import AugmentSettings
from tests.tolerances import tolerance

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CONSTANTS: dict[str, Any] = {"mean": MEAN, "std": STD}
ONLY_CROP = AugmentSettings("none", padding=4, border="zero")


def batch(n: int = 16, size: tuple[int, int] = (32, 32)) -> tuple[Tensor, Tensor]:
    """Return images, and the uniform random numbers of samples 100 and on."""
    return torch.randint(0, 256, (n, 3, *size), dtype=torch.uint8), uniform(3, 5, 100 + n)[100:]


def slow(image: Tensor, uniforms: Tensor, settings: AugmentSettings) -> Tensor:
    """Augment one image step by step in float64, in the order and with the random numbers that `augment` documents."""
    row, column, mirror, cut_row, cut_column, *colour = uniforms[:8]
    pixels, p = image.double() / 255, settings.padding or 0
    height, width = pixels.shape[1:]
    mode = "reflect" if settings.border == "reflect" else "constant"
    pixels = F.pad(pixels[None], (p, p, p, p), mode=mode)[0]
    top, left = int(below(row, 2 * p + 1)), int(below(column, 2 * p + 1))
    pixels = pixels[:, top : top + height, left : left + width]
    if settings.flip and float(mirror) < 0.5:
        pixels = pixels.flip(2)
    if settings.jitter:
        brightness, contrast, saturation = (1 + settings.jitter * (2 * float(c) - 1) for c in colour)
        pixels = (pixels * brightness).clamp(0, 1)
        pixels = (grey(pixels[None])[0].mean() * (1 - contrast) + pixels * contrast).clamp(0, 1)
        pixels = (grey(pixels[None])[0] * (1 - saturation) + pixels * saturation).clamp(0, 1)
    pixels = (pixels - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(STD).double()[:, None, None]
    side = settings.cutout or 0
    y, x = int(below(cut_row, height)) - side // 2, int(below(cut_column, width)) - side // 2
    pixels[:, max(y, 0) : max(y + side, 0), max(x, 0) : max(x + side, 0)] = 0
    return pixels


class TestAgainstTheObviousForm:
    @pytest.mark.parametrize("size", [(32, 32), (9, 14)])
    @pytest.mark.parametrize(
        "settings",
        [
            AugmentSettings("none", padding=4, border="zero", flip=True, cutout=0, jitter=0.0),
            AugmentSettings("none", padding=3, border="reflect", flip=False, cutout=0, jitter=0.0),
            AugmentSettings("none", padding=0, border="zero", flip=True, cutout=0, jitter=0.0),
            AugmentSettings("none", padding=0, border="zero", flip=False, cutout=5, jitter=0.0),
            AugmentSettings("none", padding=4, border="reflect", flip=True, cutout=8, jitter=0.2),
        ],
    )
    def test_image_by_image(self, settings: AugmentSettings, size: tuple[int, int]) -> None:
        images, uniforms = batch(16, size)
        fast = augment(images, uniforms, settings=settings, **CONSTANTS)
        expected = torch.stack([slow(image, row, settings) for image, row in zip(images, uniforms, strict=True)])
        torch.testing.assert_close(fast.double(), expected, **tolerance(torch.float32, scale=2))

    def test_recipes_are_their_settings(self) -> None:
        images, uniforms = batch()
        explicit = {
            "paper": AugmentSettings("none", padding=4, border="zero", flip=True),
            "modern": AugmentSettings("none", padding=4, border="reflect", flip=True, cutout=8, jitter=0.2),
        }
        for recipe, settings in explicit.items():
            named = AugmentSettings(recipe)  # type: ignore[arg-type]
            short, long = (augment(images, uniforms, settings=s, **CONSTANTS) for s in (named, settings))
            assert torch.equal(short, long)

    def test_nothing_random_is_normalisation(self) -> None:
        images, uniforms = batch()
        plain = augment(images, uniforms, settings=AugmentSettings("none"), **CONSTANTS)
        expected = (images.double() / 255 - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(STD).double()[
            :, None, None
        ]
        torch.testing.assert_close(plain.double(), expected, **tolerance(torch.float32))
        assert torch.equal(plain, normalise(images, MEAN, STD))

    def test_the_border_is_black_before_normalisation(self) -> None:
        white = torch.full((64, 3, 8, 8), 255, dtype=torch.uint8)
        shifted = augment(white, uniform(3, 5, 64), settings=ONLY_CROP, **CONSTANTS)
        black, full = (torch.tensor([(v - m) / s for m, s in zip(MEAN, STD, strict=True)]) for v in (0.0, 1.0))
        for channel in range(3):
            found = shifted[:, channel].unique()
            torch.testing.assert_close(found, torch.stack([black[channel], full[channel]]), **tolerance(torch.float32))

    def test_the_input_is_left_alone(self) -> None:
        images, uniforms = batch()
        before = images.clone()
        for recipe in ("none", "paper", "modern"):
            augment(images, uniforms, settings=AugmentSettings(recipe), **CONSTANTS)
        assert torch.equal(images, before)

    @pytest.mark.gpu
    def test_the_gpu_agrees(self) -> None:
        images, uniforms = batch()
        there = augment(images.cuda(), uniforms.cuda(), settings=AugmentSettings("modern"), **CONSTANTS)
        here = augment(images, uniforms, settings=AugmentSettings("modern"), **CONSTANTS)
        torch.testing.assert_close(there.cpu(), here, **tolerance(torch.float32))


class TestRandomness:
    @pytest.mark.parametrize("recipe", ["paper", "modern"])
    def test_an_image_fares_alike_in_any_batch(self, recipe: Any) -> None:
        images, uniforms = batch(20)
        settings = AugmentSettings(recipe)
        whole = augment(images, uniforms, settings=settings, **CONSTANTS)
        part = torch.tensor([17, 3, 11])
        assert torch.equal(augment(images[part], uniforms[part], settings=settings, **CONSTANTS), whole[part])

    def test_each_of_seed_epoch_and_sample_matters(self) -> None:
        images, uniforms = batch(16)
        base = augment(images, uniforms, settings=ONLY_CROP, **CONSTANTS)
        for others in (uniform(4, 5, 116)[100:], uniform(3, 6, 116)[100:], uniform(3, 5, 117)[101:]):
            assert not torch.equal(augment(images, others, settings=ONLY_CROP, **CONSTANTS), base)

    def test_switching_one_change_off_leaves_the_others(self) -> None:
        images, uniforms = batch(16)
        both = AugmentSettings("none", padding=4, border="zero", cutout=8)
        shifted = augment(images, uniforms, settings=ONLY_CROP, **CONSTANTS)
        cut = augment(images, uniforms, settings=both, **CONSTANTS)
        outside = cut != 0
        assert torch.equal(cut[outside], shifted[outside])

    def test_all_shifts_and_both_mirrors_are_as_frequent(self) -> None:
        """The position of a bright pixel shows the shift, of 9 x 9; a dimmer pixel on its left shows the flip."""
        n = 81 * 100
        images = torch.zeros(n, 1, 9, 9, dtype=torch.uint8)
        images[:, 0, 4, 4] = 255
        settings = AugmentSettings("none", padding=4, border="zero")
        moved = augment(images, uniform(0, 0, n), settings=settings, mean=(0.0,), std=(1.0,))
        counts = (moved == 1).sum(dim=0).flatten().double()
        assert int(counts.sum()) == n
        assert abs(float(((counts - 100) ** 2 / 100).sum()) - 80) < 4.5 * (2 * 80) ** 0.5
        images[:, 0, 4, 3] = 51
        mirrored = replace(settings, padding=0, flip=True)
        moved = augment(images, uniform(0, 0, n), settings=mirrored, mean=(0.0,), std=(1.0,))
        share = (moved[:, 0, 4, 5] > 0).double().mean()
        assert abs(share - 0.5) < 4 * 0.5 / n**0.5


class TestBadInput:
    def test_constants_must_fit_the_channels(self) -> None:
        images, _ = batch(2)
        with pytest.raises(ValueError, match=r"mean: .*got \(0\.5,\)"):
            normalise(images, (0.5,), STD)
        with pytest.raises(ValueError, match=r"std: .*got \(1\.0, 1\.0\)"):
            normalise(images, MEAN, (1.0, 1.0))
        with pytest.raises(ValueError, match=r"std: .*got \(1\.0, 0\.0, 1\.0\)"):
            normalise(images, MEAN, (1.0, 0.0, 1.0))

    def test_the_padding_must_fit_the_image(self) -> None:
        images, uniforms = batch(2, (4, 32))
        with pytest.raises(ValueError, match=r"augment\.padding: .*got 4"):
            augment(images, uniforms, settings=ONLY_CROP, **CONSTANTS)


def labelled(n: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return images whose pixels equal their label, so that blended pixels show how labels were blended."""
    labels = torch.arange(n).flip(0)
    return labels.float()[:, None, None, None].expand(n, 3, 8, 10).contiguous(), labels, uniform(1, 2, 500 + n)[500:]


class TestMix:
    def test_off_is_one_hot(self) -> None:
        images, labels, uniforms = labelled()
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(), classes=64)
        assert torch.equal(mixed, images)
        assert torch.equal(soft.argmax(dim=1), labels)
        assert torch.equal(soft.sum(dim=1), soft.max(dim=1).values)

    @pytest.mark.parametrize("chosen", [{"mixup": 0.2}, {"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 0.5, "cutmix": 1.0}])
    def test_labels_are_blended_like_pixels(self, chosen: dict[str, float]) -> None:
        images, labels, uniforms = labelled()
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(**chosen), classes=64)  # type: ignore[arg-type]
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(64), **tolerance(torch.float32))
        assert int((soft > 0).sum(dim=1).max()) == 2
        seen, said = mixed.mean(dim=(1, 2, 3)), soft @ torch.arange(64.0)
        torch.testing.assert_close(seen, said, **tolerance(torch.float32))
        assert not torch.equal(mixed, images)

    def test_cutmix_pastes_and_mixup_blends(self) -> None:
        images, labels, uniforms = labelled()
        pasted, _ = mix(images, labels, uniforms, settings=AugmentSettings(cutmix=1.0), classes=64)
        assert torch.equal(pasted, pasted.round())
        blended, _ = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0), classes=64)
        assert torch.equal(blended, blended[:, :, :1, :1].expand_as(blended))
        both, _ = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0, cutmix=1.0), classes=64)
        flat = (both == both[:, :, :1, :1]).flatten(1).all(dim=1)
        assert 10 < int(flat.sum()) < 54

    def test_how_much_depends_on_the_sample_alone(self) -> None:
        images, labels, uniforms = labelled()
        settings = AugmentSettings(mixup=0.7)
        _, whole = mix(images, labels, uniforms, settings=settings, classes=64)
        part = torch.arange(10, 30)
        _, some = mix(images[part], labels[part], uniforms[part], settings=settings, classes=64)
        own = torch.arange(len(part))
        torch.testing.assert_close(some[own, labels[part]], whole[part, labels[part]], rtol=0, atol=0)

    def test_a_batch_of_one_stays_itself(self) -> None:
        images, labels, uniforms = (tensor[:1] for tensor in labelled())
        mixed, soft = mix(images, labels, uniforms, settings=AugmentSettings(mixup=1.0), classes=64)
        torch.testing.assert_close(mixed, images, **tolerance(torch.float32))
        assert float(soft[0, labels[0]]) == 1.0

    def test_half_precision_is_kept(self) -> None:
        images, labels, uniforms = labelled()
        mixed, soft = mix(
            images.bfloat16(), labels, uniforms, settings=AugmentSettings(mixup=1.0, cutmix=1.0), classes=64
        )
        assert (mixed.dtype, soft.dtype) == (torch.bfloat16, torch.float32)

    @pytest.mark.parametrize("label", [-1, 64])
    def test_labels_must_be_classes(self, label: int) -> None:
        images, labels, uniforms = labelled()
        labels[5] = label
        with pytest.raises(RuntimeError, match="Class values must be"):
            mix(images, labels, uniforms, settings=AugmentSettings(), classes=64)


class TestBeta:
    @pytest.mark.parametrize("a", [0.1, 0.2, 0.5, 1.0])
    def test_moments(self, a: float) -> None:
        """The mean is 1/2, the variance 1 / (4 (2a + 1)), and the distribution is symmetric."""
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
