"""Heads replaced by kernels: exact where a head is a fixed mixing, class tokens untouched, errors as said."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.analysis import ConvolvedAttention, audit, replace_heads
from attnconv.analysis.convolved_attention import HeadMixing
from attnconv.analysis.head_kernels import LayerTokens, chosen_heads, fit_mixing, mixing_errors
from attnconv.analysis.score_terms import ScoreTerms
from tests.small_hf_vit import SmallHfViT
from tests.small_vit import AttentionPool, PoolingViT, SmallViT
from tests.tolerances import tolerance

NAME = "blocks.0.attn"


def sharp(prefix: int = 1, **more: Any) -> SmallViT:
    """A model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = SmallViT(prefix=prefix, **more)
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(8)
    return model


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def uniform(model: SmallViT, head: int) -> SmallViT:
    """One head of the first layer without queries: it averages all tokens."""
    attention = model.blocks[0].attn
    attention.qkv.weight.data[head * 16 : (head + 1) * 16] = 0
    return model


def tokens_of(model: SmallViT, count: int = 3) -> LayerTokens:
    inputs = torch.randn(count, 64 + model.num_prefix_tokens, 64, generator=torch.Generator().manual_seed(2))
    return LayerTokens(model.blocks[0].attn, inputs, (8, 8), model.num_prefix_tokens)


class TestExact:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    @pytest.mark.parametrize("fit", ["least_squares", "mean"])
    def test_a_head_that_averages_is_replaced_without_error(self, prefix: int, fit: Any) -> None:
        model = uniform(sharp(prefix), 2)
        result = replace_heads(model, images(), heads={NAME: [2]}, kernel_size=1, fit=fit)
        # `mean` counts the query's own key twice, once as its shift and once in the image's mean.
        most = 1e-3 if fit == "least_squares" else 0.03
        assert result.layer_errors[NAME] < most
        assert result.replaced[0].error < 10 * most

    @pytest.mark.parametrize("prefix", [0, 2])
    @pytest.mark.parametrize("shift", [(0, 0), (0, 1), (-1, 1)])
    def test_a_head_of_one_shift_is_its_tap(self, prefix: int, shift: tuple[int, int]) -> None:
        model = sharp(prefix)
        part = tokens_of(model)
        # All queries and keys at hand: one-hot places in the input make any shift.
        attention: Any = model.blocks[0].attn
        places = torch.arange(64).reshape(8, 8)
        target = torch.roll(places, (-shift[0], -shift[1]), (0, 1)).flatten()
        code = torch.nn.functional.normalize(torch.randn(64, 16), dim=1)
        inputs = part.inputs.clone()
        inputs[:, prefix:, 48:] = 0
        inputs[:, :, :32] = 0
        inputs[:, prefix:, :16], inputs[:, prefix:, 16:32] = code[target], code
        attention.qkv.weight.data[:16] = 4000 * torch.eye(16, 64)
        attention.qkv.weight.data[64:80] = torch.eye(64)[16:32]
        attention.qkv.weight.data[:16, 16:] = 0
        tokens = LayerTokens(attention, inputs, (8, 8), prefix)
        mixing = fit_mixing(tokens, 3, fit="mean")
        expected = torch.zeros(3, 3)
        expected[1 + shift[0], 1 + shift[1]] = 1
        torch.testing.assert_close(mixing.kernel[0], expected, **tolerance(torch.float32))
        missing, given = mixing_errors(tokens, mixing)
        inside = missing[:, 0].unflatten(1, (8, 8))[:, 1:-1, 1:-1]
        torch.testing.assert_close(inside, torch.zeros_like(inside), **tolerance(torch.float32))
        assert float(given.abs().max()) > 0.1

    def test_class_tokens_keep_their_attention(self) -> None:
        model = sharp(2)
        part = tokens_of(model)
        mixing = fit_mixing(part)
        new = ConvolvedAttention(part.attention, mixing, heads=range(4), grid=(8, 8))
        torch.testing.assert_close(
            new(part.inputs)[:, :2], part.attention(part.inputs)[:, :2], **tolerance(torch.float32)
        )

    def test_normalised_keys_are_read_as_well(self) -> None:
        part = tokens_of(sharp(1, qk_norm=True))
        new = ConvolvedAttention(part.attention, fit_mixing(part), heads=range(4), grid=(8, 8))
        torch.testing.assert_close(
            new(part.inputs)[:, :1], part.attention(part.inputs)[:, :1], **tolerance(torch.float32)
        )

    def test_no_head_replaced_is_the_model_itself(self) -> None:
        model = sharp()
        result = replace_heads(model, images(), count=0)
        torch.testing.assert_close(result.model(images()), model(images()), **tolerance(torch.float32))
        assert result.output_error == 0.0


class Then(nn.Module):
    """A model and what is done with its output."""

    def __init__(self, inner: nn.Module, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.what = inner, what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.inner(x))


class Options(nn.Module):
    """A model that takes more than images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = sharp()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.inner(scale * x)
        return out


def test_options_reach_every_pass() -> None:
    model = Options()
    doubled = replace_heads(model, images(), count=4, options={"scale": 2.0})
    expected = replace_heads(model.inner, 2.0 * images(), count=4)
    assert doubled.output_error == pytest.approx(expected.output_error)
    assert [entry.cost for entry in doubled.candidates] == pytest.approx([entry.cost for entry in expected.candidates])
    with pytest.raises(ValueError, match=r"options: must be what the forward pass of Options takes by name, got size"):
        replace_heads(model, images(), count=4, options={"size": 2.0})


@pytest.mark.parametrize(("prefix", "heads"), [(0, [1, 3]), (0, [0, 1, 2, 3]), (1, [1, 3])])
@pytest.mark.parametrize("hugging_face", [False, True])
def test_replaced_heads_are_named_where_attention_is_read(prefix: int, heads: list[int], hugging_face: bool) -> None:
    model: nn.Module = SmallHfViT(sharp(prefix)) if hugging_face else sharp(prefix)
    first, second = (f"vit.layers.{i}.attention" if hugging_face else f"blocks.{i}.attn" for i in range(2))
    changed = replace_heads(model, images(), heads={first: heads}).model
    named = ", ".join(map(str, heads))
    with pytest.raises(ValueError, match=rf"module '{first}\S*' .* its heads {named} were replaced by fixed kernels"):
        audit(changed, images())
    assert [layer.name for layer in audit(changed, images(), layers=[second]).layers] == [second]


class TestModule:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    @pytest.mark.parametrize("kernel_size", [1, 3, 5])
    def test_it_computes_the_formula(self, prefix: int, kernel_size: int) -> None:
        """The module, with a convolution, against regressors times coefficients."""
        part = tokens_of(sharp(prefix))
        fitted = fit_mixing(part, kernel_size)
        new = ConvolvedAttention(part.attention, fitted, heads=[0, 1, 2, 3], grid=(8, 8))
        missing, _ = mixing_errors(part, fitted)
        source: Any = part.attention
        change = source.proj(missing.transpose(1, 2).flatten(2)) - source.proj.bias
        expected = part.attention(part.inputs)[:, prefix:] + change
        torch.testing.assert_close(new(part.inputs)[:, prefix:], expected, **tolerance(torch.float32))

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("heads", [[2], [0, 3], [0, 1, 2, 3]])
    def test_it_computes_the_formula_behind_masks(self, heads: list[int], turned: bool) -> None:
        """Two windows for each image, the second cut in halves; a bias by head; rotary positions."""
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
        part = LayerTokens(attention, inputs, (4, 4), 0, terms, 2)
        assert part.terms.blocks()
        mixing = fit_mixing(part)
        new = ConvolvedAttention(
            attention, chosen_heads(mixing, heads), heads=heads, grid=(4, 4), added=True, masked=True
        )
        missing, given = mixing_errors(part, mixing)
        given[:, heads] += missing[:, heads]
        named = {"mask": added, **({"position_embeddings": (wave.cos(), wave.sin())} if turned else {})}
        torch.testing.assert_close(new(inputs, **named), part.parts.finish(given), **tolerance(torch.float32))
        with pytest.raises(ValueError, match="attn_mask: must be None"):
            ConvolvedAttention(attention, mixing, heads=range(4), grid=(4, 4))(inputs, mask=added)

    def test_other_heads_are_untouched(self) -> None:
        """With the replaced head's columns of `proj` zero, only the others are seen."""
        model = sharp()
        part = tokens_of(model)
        model.blocks[0].attn.proj.weight.data[:, 16:32] = 0
        mixing = fit_mixing(part)
        one = HeadMixing(mixing.kernel[[1]], mixing.profile[[1]], mixing.rest[[1]], mixing.prefix[[1]])
        new = ConvolvedAttention(part.attention, one, heads=[1], grid=(8, 8))
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
        """As training on several devices wants it."""
        changed = replace_heads(sharp(prefix, qk_norm=qk_norm), images(), heads={NAME: heads}).model
        changed(images()).square().sum().backward()
        assert [name for name, weight in changed.get_submodule(NAME).named_parameters() if weight.grad is None] == []

    @pytest.mark.parametrize("learns", ["weight", "bias"])
    def test_what_is_frozen_stays_frozen(self, learns: str) -> None:
        model = sharp()
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.endswith(learns))
        new = replace_heads(model, images(), heads={NAME: [1]}).model.get_submodule(NAME)
        for name in ("qkv", "proj", "prefix_query"):
            found = {part for part, weight in new.get_submodule(name).named_parameters() if weight.requires_grad}
            assert found == {learns}

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
        """Compiled modules that have run do not ask for the hooks that costs are taken with."""
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
        new = ConvolvedAttention(part.attention, fit_mixing(part), heads=range(4), grid=(8, 8))
        with pytest.raises(ValueError, match="tokens: must be 1 before an image of 8 x 8, got 50"):
            new(torch.zeros(1, 50, 64))


class TestErrors:
    def test_least_squares_is_nearer_than_the_mean_on_its_own_images(self) -> None:
        part = tokens_of(sharp(), 6)
        errors = [mixing_errors(part, fit_mixing(part, 3, fit=fit))[0].norm() for fit in ("least_squares", "mean")]
        assert errors[0] < errors[1]

    def test_the_cost_predicts_the_change_of_the_output(self) -> None:
        """First order, so it is held where a replacement changes little: `proj` made small."""
        model = sharp(0)
        for block in model.blocks:
            block.attn.proj.weight.data.mul_(0.01)
        candidates = replace_heads(model, images(16), count=0).candidates
        for entry in (candidates[0], candidates[-1]):
            changed = replace_heads(model, images(16), heads={entry.layer: [entry.head]})
            assert changed.output_error == pytest.approx(entry.cost, rel=0.6)

    def test_the_last_layer_costs_nothing_where_class_tokens_alone_are_read(self) -> None:
        candidates = replace_heads(sharp(1), images(), count=0).candidates
        assert {entry.layer for entry in candidates[:4]} == {"blocks.1.attn"}
        assert all(entry.cost == 0 for entry in candidates[:4])
        assert all(entry.cost > 0 for entry in candidates[4:])

    def test_heads_below_a_constancy_are_passed_over(self) -> None:
        model = uniform(sharp(0), 1)
        result = replace_heads(model, images(), count=1, least_constancy=0.99)
        assert [(entry.layer, entry.head) for entry in result.replaced] == [(NAME, 1)]
        with pytest.raises(ValueError, match=r"count: must be at most 1.*got 2"):
            replace_heads(model, images(), count=2, least_constancy=0.99)

    def test_attention_after_the_first_output_costs_nothing(self) -> None:
        """As in models that give the features of several layers, first those of the first."""
        model = sharp(0)
        plain = Then(model, lambda out: out)
        seen: list[Tensor] = []
        model.blocks[0].register_forward_hook(lambda _module, _args, out: seen.append(out))
        several = Then(model, lambda out: (seen.pop(), out))
        names = {entry.layer for entry in replace_heads(plain, images(), count=0).candidates if entry.cost == 0}
        assert names == set()
        names = {entry.layer for entry in replace_heads(several, images(), count=0).candidates if entry.cost == 0}
        assert names == {"inner.blocks.1.attn"}

    def test_zeros_stay_without_error(self) -> None:
        model = sharp()
        model.blocks[0].attn.qkv.weight.data[128:144] = 0
        if model.blocks[0].attn.qkv.bias is not None:
            model.blocks[0].attn.qkv.bias.data[128:144] = 0
        assert replace_heads(model, images(), heads={NAME: [0]}).replaced[0].error == 0
        nn.init.zeros_(model.blocks[0].attn.proj.weight)
        nn.init.zeros_(model.blocks[0].attn.proj.bias)
        assert replace_heads(model, images(), heads={NAME: [1]}).layer_errors == {NAME: 0.0}

    @pytest.mark.parametrize("kernel_size", [1, 3, 15])
    def test_window_mass_is_a_mean_over_tokens(self, kernel_size: int) -> None:
        part = tokens_of(uniform(sharp(1), 2))
        taps = part.taps(kernel_size)
        window_mass = taps.mass(fit_mixing(part, kernel_size).profile)
        seen = {1: 1, 3: (3 * 6 + 2 * 2) ** 2 / 64, 15: 64}[kernel_size]  # keys that a query sees, in the mean
        assert float(window_mass[2]) == pytest.approx(seen / 65, rel=1e-4)
        assert float(window_mass.max()) < 1

    @pytest.mark.parametrize("kernel_size", [3, 15])
    def test_a_mean_kernel_gives_no_more_than_there_is(self, kernel_size: int) -> None:
        """Shifts that few queries can read have large means; on a small image they came to more than 1."""
        part = tokens_of(sharp(1))
        mixing = fit_mixing(part, kernel_size, fit="mean")
        total = mixing.kernel.sum((1, 2)) + mixing.rest + mixing.prefix.sum(1)
        torch.testing.assert_close(total, torch.ones(4), **tolerance(torch.float32))


class TestHuggingFaceNames:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    def test_it_is_the_same_in_every_layout(self, prefix: int, nested: bool) -> None:
        """The same weights under other names: the same ranking, the same kernels, the same output."""
        plain = sharp(prefix)
        wanted = replace_heads(plain, images(), count=5)
        result = replace_heads(SmallHfViT(copy.deepcopy(plain), nested=nested), images(), count=5)
        names = {f"vit.layers.{number}.attention": f"blocks.{number}.attn" for number in range(2)}
        found = [(names[entry.layer], entry.head) for entry in result.replaced]
        assert found == [(entry.layer, entry.head) for entry in wanted.replaced]
        assert result.output_error == pytest.approx(wanted.output_error, rel=1e-3)
        assert list(result.layer_errors.values()) == pytest.approx(list(wanted.layer_errors.values()), rel=1e-3)
        torch.testing.assert_close(
            result.model(images())["logits"], wanted.model(images()), **tolerance(torch.float32, scale=10)
        )

    def test_pairs_stay_pairs_and_learn(self) -> None:
        result = replace_heads(SmallHfViT(sharp()), images(), heads={"vit.layers.0.attention": [1]})
        new: Any = result.model.get_submodule("vit.layers.0.attention")
        assert new(torch.randn(1, 65, 64))[1] is None
        result.model(images())["logits"].square().sum().backward()
        assert float(new.kernel.grad.abs().max()) > 0
        with pytest.raises(ValueError, match=r"attn_mask: must be None.*got a mask"):
            new(torch.randn(1, 65, 64), torch.zeros(1, 1, 65, 65))

    @pytest.mark.parametrize("words", [{"count": 1, "layers": ["blocks.1.attn"]}, {"heads": {"blocks.1.attn": [0]}}])
    def test_what_computes_another_formula_is_refused(self, words: Any) -> None:
        model = sharp()
        model.blocks[1].attn.register_forward_hook(lambda _module, _args, output: 2 * output)
        with pytest.raises(
            ValueError, match=r"model.blocks.1.attn: must compute what its parts say, .*whose output is 0.5 away"
        ):
            replace_heads(model, images(), **words)


class TestLayers:
    def test_what_cannot_be_replaced_is_passed_over_by_name(self) -> None:
        model = PoolingViT().eval()
        result = replace_heads(model, images(), count=3)
        assert {entry.layer for entry in result.candidates} == {"blocks.0.attn", "blocks.1.attn"}
        assert list(result.passed_over) == ["attn_pool"]
        assert "1 queries look at 64 keys" in result.passed_over["attn_pool"]
        assert isinstance(result.model.attn_pool, AttentionPool)

    def test_a_module_of_another_formula_too(self) -> None:
        model = sharp()
        model.blocks[1].attn.register_forward_hook(lambda _module, _args, output: 2 * output)
        result = replace_heads(model, images(), count=4)
        assert {entry.layer for entry in result.replaced} == {"blocks.0.attn"}
        assert "whose output is 0.5 away" in result.passed_over["blocks.1.attn"]

    def test_layers_say_what_to_choose_from(self) -> None:
        result = replace_heads(sharp(), images(), count=4, layers=["blocks.1.attn"])
        assert [entry.layer for entry in result.candidates] == ["blocks.1.attn"] * 4
        assert result.passed_over == {}

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (
                "attn_pool",
                r"model.attn_pool: must have attention that can be read, got AttentionPool. It is not: 1 queries look",
            ),
            ("blocks.2.attn", r"layers: must name attention modules, as blocks.0.attn, .*got 'blocks.2.attn'"),
        ],
    )
    def test_layers_that_cannot_be_chosen_from(self, layer: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace_heads(PoolingViT().eval(), images(), count=1, layers=["blocks.0.attn", layer])


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "heads, count: .*got heads=None, count=None"),
            ({"count": 1, "kernel_size": 2}, "kernel_size: must be odd, got 2"),
            ({"count": 1, "least_constancy": 2.0}, "least_constancy: .*got 2.0"),
            ({"count": -1}, "count: .*got -1"),
            ({"heads": {NAME: [9]}}, "heads: must be from 0 to 3 in blocks.0.attn, got 9"),
            ({"heads": {NAME: [-1]}}, "heads: must be from 0 to 3 in blocks.0.attn, got -1"),
            ({"heads": {"blocks.7.attn": []}}, "heads: must name heads of .*blocks.1.attn, got 'blocks.7.attn'"),
            ({"heads": {NAME: [0]}, "least_constancy": 0.5}, "least_constancy: must be 0 where `heads`.*got 0.5"),
            ({"count": 1, "layers": []}, r"layers: must be a list of at least one name, or None, got \[\]"),
            ({"count": 1, "layers": ["nope"]}, "layers: .*as blocks.0.attn, blocks.1.attn, got 'nope'"),
        ],
    )
    def test_arguments_out_of_range(self, arguments: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            replace_heads(sharp(), images(), **arguments)

    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"heads": {NAME: 1}}, "heads: must be a mapping .* to lists of heads, got {'blocks.0.attn': 1}"),
            ({"heads": {NAME: [0.5]}}, "heads: must be whole numbers in blocks.0.attn, got 'float' object"),
            ({"heads": [NAME]}, r"heads: must be a mapping .*got \['blocks.0.attn'\]"),
            ({"count": 1, "layers": NAME}, "layers: must be a list of .*got 'blocks.0.attn'"),
            ({"count": 1, "images": [[0.0]]}, "images: must be a tensor, .*got list"),
        ],
    )
    def test_arguments_of_other_kinds(self, arguments: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            replace_heads(sharp(), **{"images": images(), **arguments})

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            (lambda out: out.detach(), "model: must have gradients from its attention to its output, got none"),
            (lambda out: 0 * out, "model: must give numbers that are not all zero for an image, got zeros"),
            (lambda out: out / 0, "model: must give finite numbers, got NaN or infinity"),
            (lambda out: out.argmax(1), r"model: must first give .*got shape \(6,\) of torch.int64 for 6 images"),
            (lambda out: out.mean(0), r"model: must first give .*got shape \(10,\) of torch.float32 for 6 images"),
            (lambda out: out.sum(), r"model: must first give .*got shape \(\) of torch.float32 for 6 images"),
            (lambda out: ((out,),), "model: must give a tensor, got none among its outputs"),
        ],
    )
    def test_outputs_against_which_nothing_can_be_measured(self, what: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace_heads(Then(sharp(), what), images(), count=1)

    def test_a_bare_attention_has_no_place_to_be_replaced_in(self) -> None:
        attention = sharp(0).blocks[0].attn
        tokens = torch.randn(2, 64, 64)
        with pytest.raises(ValueError, match="model: must hold its attention in a module inside it, got Attention"):
            replace_heads(attention, tokens, count=1, grid=(8, 8))
        assert len(replace_heads(nn.Sequential(attention), tokens, count=1, grid=(8, 8)).layer_errors) == 1

    @pytest.mark.usefixtures("unhooked")
    def test_an_unknown_fit(self) -> None:
        with pytest.raises(ValueError, match="fit: must be one of least_squares, mean, got 'median'"):
            replace_heads(sharp(), images(), count=1, fit="median")  # type: ignore[arg-type]

    def test_one_image_is_too_few(self) -> None:
        with pytest.raises(ValueError, match=r"images: must be at least 2.*got 1"):
            replace_heads(sharp(), images(1), count=1)

    def test_images_that_tell_nothing(self) -> None:
        blank, broken = images(), images()
        blank[3] = 0.5
        broken[7, 0, 0, 0] = torch.nan
        for given, message in (
            (blank, "images: must have pixels that differ, got one value everywhere in image 3"),
            (broken, "images: must be finite, got NaN or infinity in image 7"),
            (images()[:, :, :30], r"images: must be what the forward pass of SmallViT takes, got .*\(8, 3, 30, 32\)"),
        ):
            with pytest.raises(ValueError, match=message):
                replace_heads(sharp(), given, count=1)

    def test_a_gate_is_refused(self) -> None:
        model = sharp()
        model.blocks[0].attn.gate = nn.Linear(64, 64)
        with pytest.raises(ValueError, match=r"must be softmax attention of known parts, got Attention with gate"):
            replace_heads(model, images(), count=1, layers=["blocks.0.attn"])
