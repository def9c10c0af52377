"""The module with replaced heads and its fit: formula, class tokens, masks, shifts, trainable parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect.module_adapters import Projection
from attnconv.inspect.score_modifiers import ScoreTerms
from attnconv.surgery import ConvolvedAttention, replace_heads
from attnconv.surgery.convolved_attention import (
    Taps,
    convolved,
    convolved_by_fft,
    convolved_directly,
    fit_mixing,
    mixing_errors,
)
from tests.inspect.sharp_vit import NAME, images, layer_tokens, mean_mixing, sharp, tokens_of
from tests.tolerances import tolerance

GRID = (3, 4)


class TestClassTokens:
    def test_class_tokens_keep_their_attention(self) -> None:
        model = sharp(2)
        part = tokens_of(model)
        mixing = fit_mixing(part)
        new = ConvolvedAttention(part, mixing, heads=range(4))
        torch.testing.assert_close(
            new(part.inputs)[:, :2], part.attention(part.inputs)[:, :2], **tolerance(torch.float32)
        )

    def test_normalised_keys_are_read_as_well(self) -> None:
        part = tokens_of(sharp(1, qk_norm=True))
        new = ConvolvedAttention(part, fit_mixing(part), heads=range(4))
        torch.testing.assert_close(
            new(part.inputs)[:, :1], part.attention(part.inputs)[:, :1], **tolerance(torch.float32)
        )


class TestModule:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    @pytest.mark.parametrize("kernel_size", [1, 3, 5])
    def test_it_computes_the_formula(self, prefix: int, kernel_size: int) -> None:
        """Compare the module, which uses a convolution, with regressors times coefficients."""
        part = tokens_of(sharp(prefix))
        fitted = fit_mixing(part, kernel_size)
        new = ConvolvedAttention(part, fitted, heads=[0, 1, 2, 3])
        missing, _ = mixing_errors(part, fitted)
        source: Any = part.attention
        change = source.proj(missing.transpose(1, 2).flatten(2)) - source.proj.bias
        expected = part.attention(part.inputs)[:, prefix:] + change
        torch.testing.assert_close(new(part.inputs)[:, prefix:], expected, **tolerance(torch.float32))

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("heads", [[2], [0, 3], [0, 1, 2, 3]])
    def test_it_computes_the_formula_behind_masks(self, heads: list[int], turned: bool) -> None:
        """Two windows per image, the second masked into halves; a bias per head; rotary positions."""
        generator = torch.Generator().manual_seed(3)
        halves = torch.arange(16) % 4 < 2
        cut = torch.where(halves[:, None] == halves, 0.0, -100.0)
        added = torch.stack((torch.zeros(16, 16), cut))[:, None] + torch.randn(1, 4, 16, 16, generator=generator)
        wave = torch.randn(16, 16, generator=generator)
        terms = ScoreTerms(added=added)
        if turned:
            terms = ScoreTerms(wave.cos()[None], wave.sin()[None], added=added)
        attention: Any = sharp(0).blocks[0].attn
        inputs = torch.randn(6, 16, 64, generator=generator)
        part = layer_tokens(attention, inputs, (4, 4), terms=terms, sequences=2)
        assert Taps.of_layer(part, 3).spread is not None
        mixing = fit_mixing(part)
        new = ConvolvedAttention(part, mixing, heads=heads)
        missing, given = mixing_errors(part, mixing)
        given[:, heads] += missing[:, heads]
        named = {"mask": added, **({"position_embeddings": (wave.cos(), wave.sin())} if turned else {})}
        torch.testing.assert_close(new(inputs, **named), part.parts.finish(given), **tolerance(torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            low = new(inputs, **named)
        torch.testing.assert_close(low.float(), part.parts.finish(given), **tolerance(torch.bfloat16, scale=4))
        with pytest.raises(ValueError, match="attn_mask: must be None"):
            ConvolvedAttention(replace(part, terms=ScoreTerms()), mixing, heads=range(4))(inputs, mask=added)

    @pytest.mark.parametrize("prefix", [0, 1])
    @pytest.mark.parametrize("form", ["tokens x tokens", "keys"])
    def test_masked_keys_are_not_read_if_the_mask_was_empty_during_the_fit(self, prefix: int, form: str) -> None:
        attention: Any = sharp(prefix).blocks[0].attn
        inputs = torch.randn(6, prefix + 16, 64, generator=torch.Generator().manual_seed(3))
        empty = torch.zeros(1, 1, prefix + 16, prefix + 16)
        part = layer_tokens(attention, inputs, (4, 4), terms=ScoreTerms(added=empty), prefix=prefix)
        new = ConvolvedAttention(part, fit_mixing(part), heads=range(4))
        plain = layer_tokens(attention, inputs, (4, 4), prefix)
        expected = ConvolvedAttention(plain, fit_mixing(plain), heads=range(4))(inputs)
        torch.testing.assert_close(new(inputs, mask=empty), expected, **tolerance(torch.float32))
        mask = empty.clone()
        mask[..., 9:] = -torch.inf  # image tokens
        mask[..., :prefix] = -torch.inf  # class tokens
        mask = mask if form == "tokens x tokens" else mask[:, :, :1]
        others = inputs.clone()
        others[:, 9:] = 0
        others[:, :prefix] = 0
        outputs = new(inputs, mask=mask), new(others, mask=mask)
        torch.testing.assert_close(*(each[:, prefix:9] for each in outputs), **tolerance(torch.float32))

    def test_other_heads_are_untouched(self) -> None:
        """If the columns of `proj` for the replaced head are zero, only the other heads affect the output."""
        model = sharp()
        part = tokens_of(model)
        model.blocks[0].attn.proj.weight.data[:, 16:32] = 0
        new = ConvolvedAttention(part, fit_mixing(part), heads=[1])
        torch.testing.assert_close(new(part.inputs), part.attention(part.inputs), **tolerance(torch.float32))

    def test_its_kernels_learn(self) -> None:
        result = replace_heads(sharp(), images(), heads={NAME: [0, 3]})
        result.model(images()).square().sum().backward()
        new = result.model.get_submodule(NAME)
        for name in ("kernel", "rest", "prefix"):
            gradient = new.get_parameter(name).grad
            assert gradient is not None
            assert float(gradient.abs().max()) > 0

    @pytest.mark.parametrize("heads", [[0], [0, 1, 2, 3]])
    @pytest.mark.parametrize(("prefix", "qk_norm"), [(0, False), (0, True), (2, False), (2, True)])
    def test_every_parameter_learns(self, prefix: int, qk_norm: bool, heads: list[int]) -> None:
        """Distributed training requires a gradient for every parameter."""
        changed = replace_heads(sharp(prefix, qk_norm=qk_norm), images(), heads={NAME: heads}).model
        changed(images()).square().sum().backward()
        assert [name for name, weight in changed.get_submodule(NAME).named_parameters() if weight.grad is None] == []

    @pytest.mark.parametrize("learns", ["weight", "bias"])
    def test_what_is_frozen_stays_frozen(self, learns: str) -> None:
        model = sharp()
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.endswith(learns))
        new = replace_heads(model, images(), heads={NAME: [1]}).model.get_submodule(NAME)
        for name in ("query", "key", "value", "proj", "prefix_query"):
            found = {part for part, weight in new.get_submodule(name).named_parameters() if weight.requires_grad}
            assert found == {learns}

    def test_separate_projections_stay_frozen_or_without_bias(self) -> None:
        part = tokens_of(sharp())
        query, key = part.parts.query, part.parts.key
        assert query.bias is not None
        frozen, unbiased = Projection(query.weight.detach(), query.bias.detach()), Projection(key.weight, None)
        apart = replace(part, parts=replace(part.parts, query=frozen, key=unbiased))
        new = ConvolvedAttention(apart, fit_mixing(part), heads=[1])
        assert new.query is not None
        assert not any(weight.requires_grad for weight in new.query.parameters())
        assert new.key is not None
        assert new.key.bias is None
        assert all(weight.requires_grad for module in (new.key, new.value) for weight in module.parameters())

    def test_it_is_replaced_under_all_its_names(self) -> None:
        class TwoNames(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = sharp(0).blocks[0].attn
                self.inner = sharp(0)
                self.inner.blocks[0].attn = self.first

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.inner(x)
                return out

        result = replace_heads(TwoNames(), images(), heads={"first": [0]})
        assert result.output_error > 0
        assert isinstance(result.model.first, ConvolvedAttention)
        assert result.model.inner.blocks[0].attn is result.model.first

    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize("whole", [False, True])
    def test_it_is_the_same_in_a_compiled_model(self, whole: bool) -> None:
        """Compiled modules that have run ignore the hooks for computing costs."""
        wanted = replace_heads(sharp(0), images(), count=2)
        model = sharp(0)
        (model if whole else model.blocks[0]).compile(backend="eager")
        with torch.no_grad():
            model(images())
            result = replace_heads(model, images(), count=2)
            assert result.replaced == wanted.replaced
            torch.testing.assert_close(result.model(images()), wanted.model(images()), **tolerance(torch.float32))

    def test_it_is_the_same_in_inference_mode(self) -> None:
        model = sharp(0)
        wanted = replace_heads(model, images(), count=2)
        with torch.inference_mode():
            result = replace_heads(model, images() + 0, count=2)
        assert result.replaced == wanted.replaced
        assert result.output_error == pytest.approx(wanted.output_error)
        result.model(images()).square().sum().backward()

    def test_the_model_given_stays(self) -> None:
        model = sharp()
        before = model(images())
        result = replace_heads(model, images(), count=3)
        torch.testing.assert_close(model(images()), before, rtol=0, atol=0)
        assert not any(isinstance(module, ConvolvedAttention) for module in model.modules())
        assert sum(isinstance(module, ConvolvedAttention) for module in result.model.modules()) > 0

    def test_another_image_size_is_refused(self) -> None:
        part = tokens_of(sharp())
        new = ConvolvedAttention(part, fit_mixing(part), heads=range(4))
        with pytest.raises(ValueError, match=r"tokens: .*got 50"):
            new(torch.zeros(1, 50, 64))


def test_without_contrast_the_kernel_is_the_mean_attention() -> None:
    """For constant values all kernels with the same sum are equal; the one nearest to mean attention is chosen."""
    part = tokens_of(sharp(0))
    flat = replace(part, inputs=part.inputs[:, :1].expand_as(part.inputs).contiguous())
    fitted, mean = fit_mixing(flat, 3), mean_mixing(flat, 3)
    torch.testing.assert_close(fitted.weights[:, :9], mean.weights[:, :9], rtol=0, atol=1e-3)
    missing, given = mixing_errors(flat, fitted)
    assert missing.norm() < 1e-4 * given.norm()


def test_contrast_of_the_size_of_half_precisions_rounding_does_not_move_the_kernel() -> None:
    part = tokens_of(sharp(0))
    flat = part.inputs.mean(1, keepdim=True)
    moved = []
    for contrast in (1e-3, 1e-1):
        low = replace(part, inputs=flat + contrast * (part.inputs - flat))
        fitted, mean = fit_mixing(low, 3), mean_mixing(low, 3)
        moved.append(float((fitted.weights - mean.weights).abs().max()))
    assert moved[0] < 0.02 < 0.1 < moved[1]


def columns_of(taps: Taps, values: Tensor, profile: Tensor) -> Tensor:
    """Return the columns of R, (z, b, h, n, d)."""
    index, factors = taps.columns(profile)
    columns = taps.sources(values)[:, :, index].unflatten(0, (-1, len(factors))) * factors[..., None]
    return columns.flatten(0, 1).movedim(3, 0)


def test_with_contrast_the_fit_is_the_least_squares() -> None:
    part = tokens_of(sharp(0))
    fitted, mean = fit_mixing(part, 3), mean_mixing(part, 3)
    with torch.no_grad():
        rows, values = part.maps_and_values()
        regressors = columns_of(Taps.of_layer(part, 3), values, fitted.profile).movedim(0, -1)
        regressors = regressors.transpose(0, 1).flatten(1, 3).double()
        target = (rows @ values).transpose(0, 1).flatten(1).double()
        best = torch.linalg.lstsq(regressors, target[..., None]).solution[..., 0]
    given_up = (best - fitted.weights[:, :10]).norm(dim=1) / (best - mean.weights[:, :10]).norm(
        dim=1
    )  # interpolated from the mean attention
    assert bool((given_up < 0.02).all())


def regions() -> Tensor:
    """Two windows of one image: the first has no mask, the second is masked into left and right parts."""
    part = torch.zeros(2, *GRID)
    part[1, :, 2:] = 1
    label = part.flatten(1)
    return label[:, :, None] == label[:, None]


def neighbour(token: int, down: int, right: int) -> int | None:
    row, column = token // GRID[1] + down, token % GRID[1] + right
    return row * GRID[1] + column if 0 <= row < GRID[0] and 0 <= column < GRID[1] else None


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("before", [0, 2])
def test_columns_are_what_loops_find(size: int, masked: bool, before: int) -> None:
    generator = torch.Generator().manual_seed(size)
    every = torch.ones(2 if masked else 1, 12 + before, 12 + before, dtype=torch.bool)
    allowed, reads = every[:, before:, before:], every[:, before:, :before]  # views of image tokens and class tokens
    if masked:
        allowed.copy_(regions())
        reads[1, :5, 1:] = False
    values = torch.randn(4, 2, before + 12, 3, generator=generator, dtype=torch.float64)
    profile = torch.rand(2, size, size, generator=generator, dtype=torch.float64)
    taps = Taps.of(GRID, size, before, values)
    taps = taps.masked(every) if masked else taps
    columns = columns_of(taps, values, profile)
    half = size // 2
    shifts = [(down, right) for down in range(-half, half + 1) for right in range(-half, half + 1)]
    first, values = values.split((before, 12), 2)
    expected = torch.zeros(len(shifts) + 1 + before, *values.shape, dtype=torch.float64)
    for sequence in range(4):
        may = allowed[sequence % len(allowed)]
        for query in range(12):
            places = [neighbour(query, *shift) for shift in shifts]
            inside = [place is not None and bool(may[query, place]) for place in places]
            mass = profile.flatten(1)
            ratio = mass.sum(1) / mass[:, torch.tensor(inside)].sum(1)
            for tap, place in enumerate(places):
                if inside[tap]:
                    expected[tap, sequence, :, query] = ratio[:, None].clamp(max=size**2) * values[sequence, :, place]
            expected[len(shifts), sequence, :, query] = values[sequence][:, may[query]].mean(1)
            for token in range(before):
                if reads[sequence % len(reads), query, token]:
                    expected[len(shifts) + 1 + token, sequence, :, query] = first[sequence, :, token]
    torch.testing.assert_close(columns, expected, **tolerance(torch.float64))


def test_a_head_without_mass_keeps_its_kernel() -> None:
    assert Taps.of(GRID, 3, 0, torch.zeros(())).ratio(torch.zeros(1, 3, 3)).tolist() == [[[1.0] * 12]]


class TestConvolution:
    @pytest.mark.parametrize(
        ("grid", "kernel_size"), [((6, 6), 11), ((5, 8), 5), ((1, 7), 13), ((3, 4), 9), ((33, 40), 79), ((4, 4), 1)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_fft_and_direct_convolution_agree(
        self, grid: tuple[int, int], kernel_size: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        planes = torch.randn(2, *grid, 6, generator=generator, dtype=torch.float64).permute(0, 3, 1, 2)
        kernels = torch.randn(3, kernel_size, kernel_size, generator=generator, dtype=torch.float64) / kernel_size
        wide = [tensor.to(dtype).double().requires_grad_() for tensor in (planes, kernels)]
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in wide]
        expected, found = convolved_directly(*wide), convolved_by_fft(*inputs)
        torch.testing.assert_close(found, expected.to(dtype), **tolerance(dtype))
        weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad(found, inputs, weight.to(dtype))
        for gradient, right in zip(
            gradients, torch.autograd.grad(expected, wide, weight.to(dtype).double()), strict=True
        ):
            scale = float(right.abs().max())
            torch.testing.assert_close(gradient.double() / scale, right / scale, **tolerance(dtype), check_dtype=False)

    @pytest.mark.parametrize(("size", "kernel_size", "by_fft"), [(8, 15, False), (40, 79, True), (40, 3, False)])
    def test_large_kernels_use_an_fft(self, size: int, kernel_size: int, by_fft: bool) -> None:
        planes, kernels = torch.randn(1, 2, size, size), torch.randn(1, kernel_size, kernel_size)
        with torch.profiler.profile() as profile:
            convolved(planes, kernels)
        assert by_fft == any("fft" in event.name for event in profile.events())
