"""Heads replaced by kernels: exact for heads that are kernels, unchanged class tokens, correct errors."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect import audit
from attnconv.surgery import replace_heads
from attnconv.surgery.convolved_attention import fit_mixing, mixing_errors
from attnconv.surgery.replaceable_attention import LayerTokens
from experiments.small_vit import AttentionPool, PoolingViT, SmallViT
from tests.inspect.sharp_vit import NAME, images, layer_tokens, mean_mixing, sharp, tokens_of
from tests.small_hf_vit import SmallHfViT
from tests.tolerances import tolerance

DTYPES = (torch.float32, torch.float16)


def uniform(model: SmallViT, head: int) -> SmallViT:
    """Set the queries of one head of layer 0 to zero, so that it averages all tokens."""
    attention = model.blocks[0].attn
    attention.qkv.weight.data[head * 16 : (head + 1) * 16] = 0
    return model


def attend_far_away(model: SmallViT) -> None:
    """Let all heads of layer 1 attend to the token four columns away: to the right or left, wherever there is one."""
    places = torch.arange(64).reshape(8, 8)
    code = 10 * torch.nn.functional.normalize(torch.randn(64, 16), dim=1)
    for weight in (
        model.patch_embed.proj,
        *(part for block in model.blocks for part in (block.attn.proj, block.mlp.fc2)),
    ):
        weight.weight.data[:32] = 0  # these channels contain only positions
    model.pos_embed.data[0, :, :16] = code[places.roll(4, 1).flatten()]
    model.pos_embed.data[0, :, 16:32] = code
    attention = model.blocks[1].attn
    attention.qkv.weight.data[:128] = 0
    for head in range(4):
        attention.qkv.weight.data[16 * head : 16 * head + 16, :16] = 4000 * torch.eye(16)
        attention.qkv.weight.data[64 + 16 * head : 80 + 16 * head, 16:32] = torch.eye(16)


def circular_shift(prefix: int, shift: tuple[int, int]) -> LayerTokens:
    """Return tokens with positions as codes, such that head 0 attends to one circular shift."""
    model = sharp(prefix)
    attention: Any = model.blocks[0].attn
    places = torch.arange(64).reshape(8, 8)
    target = torch.roll(places, (-shift[0], -shift[1]), (0, 1)).flatten()
    code = torch.nn.functional.normalize(torch.randn(64, 16), dim=1)
    inputs = tokens_of(model).inputs.clone()
    inputs[:, prefix:, 48:] = 0
    inputs[:, :, :32] = 0
    inputs[:, prefix:, :16], inputs[:, prefix:, 16:32] = code[target], code
    attention.qkv.weight.data[:16] = 4000 * torch.eye(16, 64)
    attention.qkv.weight.data[64:80] = torch.eye(64)[16:32]
    attention.qkv.weight.data[:16, 16:] = 0
    return layer_tokens(attention, inputs, (8, 8), prefix)


def test_costs_in_half_precision_equal_those_in_float32() -> None:
    model = sharp()
    model.head.weight.data.mul_(1000)  # the squares of the outputs exceed the largest float16 number
    exact, rounded = (replace_heads(copy.deepcopy(model).to(dtype), images().to(dtype), count=1) for dtype in DTYPES)
    costs = [{(head.layer, head.head): head.cost for head in found.candidates} for found in (exact, rounded)]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


class TestExact:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    def test_a_head_that_averages_is_replaced_without_error(self, prefix: int) -> None:
        result = replace_heads(uniform(sharp(prefix), 2), images(), heads={NAME: [2]}, kernel_size=1)
        assert result.layer_errors[NAME] < 1e-3
        assert result.replaced[0].error < 0.01

    @pytest.mark.parametrize("prefix", [0, 2])
    @pytest.mark.parametrize("shift", [(0, 0), (0, 1), (-1, 1)])
    def test_a_head_of_one_shift_is_its_tap(self, prefix: int, shift: tuple[int, int]) -> None:
        tokens = circular_shift(prefix, shift)
        mixing = mean_mixing(tokens, 3)
        expected = torch.zeros(3, 3)
        expected[1 + shift[0], 1 + shift[1]] = 1
        torch.testing.assert_close(mixing.weights[0, :9].reshape(3, 3), expected, **tolerance(torch.float32))
        missing, given = mixing_errors(tokens, mixing)
        inside = missing[:, 0].unflatten(1, (8, 8))[:, 1:-1, 1:-1]
        torch.testing.assert_close(inside, torch.zeros_like(inside), **tolerance(torch.float32))
        assert float(given.abs().max()) > 0.1

    @pytest.mark.parametrize("made", [mean_mixing, fit_mixing])
    @pytest.mark.parametrize("shift", [(0, 4), (2, -3)])
    def test_a_full_kernel_is_exact_for_a_circular_shift(self, made: Any, shift: tuple[int, int]) -> None:
        missing, given = mixing_errors(tokens := circular_shift(0, shift), made(tokens, 15))
        assert float(missing[:, 0].norm()) < 1e-3 * float(given[:, 0].norm())
        assert float(mixing_errors(tokens, made(tokens, 3))[0][:, 0].norm()) > 0.5 * float(given[:, 0].norm())

    def test_no_head_replaced_is_the_model_itself(self) -> None:
        model = sharp()
        result = replace_heads(model, images(), count=0)
        torch.testing.assert_close(result.model(images()), model(images()), **tolerance(torch.float32))
        assert result.output_error == 0.0


class Then(nn.Module):
    """Model followed by a function of its output."""

    def __init__(self, inner: nn.Module, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.what = inner, what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.inner(x))


class Options(nn.Module):
    """Model with more inputs than images."""

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
    with pytest.raises(ValueError, match=r"options: .*got size"):
        replace_heads(model, images(), count=4, options={"size": 2.0})


@pytest.mark.parametrize(("prefix", "heads"), [(0, [1, 3]), (0, [0, 1, 2, 3]), (1, [1, 3])])
@pytest.mark.parametrize("hugging_face", [False, True])
def test_replaced_heads_are_named_where_attention_is_read(prefix: int, heads: list[int], hugging_face: bool) -> None:
    model: nn.Module = SmallHfViT(sharp(prefix)) if hugging_face else sharp(prefix)
    first, second = (f"vit.layers.{i}.attention" if hugging_face else f"blocks.{i}.attn" for i in range(2))
    changed = replace_heads(model, images(), heads={first: heads}).model
    named = ", ".join(map(str, heads))
    with pytest.warns(UserWarning, match=f"left out: {first}"):
        found = audit(changed, images())
    assert f"its heads {named} were replaced" in "".join(found.left_out.values())
    assert [layer.name for layer in audit(changed, images(), layers=[second]).layers] == [second]


class TestErrors:
    def test_a_full_kernel_has_all_shifts(self) -> None:
        full, largest = (replace_heads(sharp(1), images(), count=8, kernel_size=size) for size in ("full", 15))
        torch.testing.assert_close(full.model(images()), largest.model(images()), rtol=0, atol=0)
        kernel = next(value for name, value in full.model.named_parameters() if name.endswith("attn.kernel"))
        assert kernel.shape[1:] == (15, 15)

    def test_each_layer_uses_the_kernel_that_is_worth_it(self) -> None:
        model, (near, far) = sharp(0), ("blocks.0.attn", "blocks.1.attn")
        for head in range(4):
            uniform(model, head)  # 1 x 1 is enough, and larger kernels reduce an error that is nearly 0
        attend_far_away(model)
        single = {size: replace_heads(model, images(), count=8, kernel_size=size) for size in (1, 3, 15)}
        both = replace_heads(model, images(), count=8, kernel_size=("full", 1, 3))
        assert {entry.layer: entry.kernel_size for entry in both.candidates} == {near: 1, far: 15}
        for entry in both.candidates:
            assert entry in single[entry.kernel_size].candidates
        assert both.output_error < 0.1 * single[3].output_error

    def test_least_squares_is_nearer_than_the_mean_on_its_own_images(self) -> None:
        part = tokens_of(sharp(), 6)
        errors = [mixing_errors(part, made(part, 3))[0].norm() for made in (fit_mixing, mean_mixing)]
        assert errors[0] < errors[1]

    def test_the_cost_predicts_the_change_of_the_output(self) -> None:
        """The cost is first order, so compare it for a small change, with a small `proj`."""
        model = sharp(0)
        for block in model.blocks:
            block.attn.proj.weight.data.mul_(0.01)
        candidates = replace_heads(model, images(16), count=0).candidates
        for entry in (candidates[0], candidates[-1]):
            changed = replace_heads(model, images(16), heads={entry.layer: [entry.head]})
            assert changed.output_error == pytest.approx(entry.cost, rel=0.6)

    def test_costs_are_averages_over_enough_directions(self) -> None:
        """All images are equal, so that costs and errors refer to the same image; the changes are of first order."""
        model, image = sharp(0), images(1).expand(8, -1, -1, -1)
        for block in model.blocks:
            block.attn.proj.weight.data.mul_(1e-3)
        off = []
        for name in (NAME, "blocks.1.attn"):
            for head in range(4):
                changed = replace_heads(model, image, heads={name: [head]})
                off.append(changed.replaced[0].cost / changed.output_error - 1)
        assert torch.tensor(off).square().mean().sqrt() < 0.15

    def test_the_last_layer_costs_nothing_where_class_tokens_alone_are_read(self) -> None:
        candidates = replace_heads(sharp(1), images(), count=0).candidates
        assert {entry.layer for entry in candidates[:4]} == {"blocks.1.attn"}
        assert all(entry.cost == 0 for entry in candidates[:4])
        assert all(entry.cost > 0 for entry in candidates[4:])

    def test_a_uniform_head_is_constant(self) -> None:
        candidates = replace_heads(uniform(sharp(0), 1), images(), count=0).candidates
        constant = [(entry.layer, entry.head) for entry in candidates if entry.constancy >= 0.99]
        assert constant == [(NAME, 1)]

    def test_attention_after_the_first_output_costs_nothing(self) -> None:
        """Some models return the features of several layers, starting with layer 0."""
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

    @pytest.mark.parametrize("kernel_size", [3, 15])
    def test_a_mean_kernel_gives_no_more_than_there_is(self, kernel_size: int) -> None:
        """Shifts that few queries can read have large means, whose sum could exceed 1 on a small image."""
        part = tokens_of(sharp(1))
        mixing = mean_mixing(part, kernel_size)
        torch.testing.assert_close(mixing.weights.sum(1), torch.ones(4), **tolerance(torch.float32))


class TestHuggingFaceNames:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    def test_it_is_the_same_in_every_layout(self, prefix: int, nested: bool) -> None:
        """The same weights under other names give the same ranking, kernels and output."""
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
        with pytest.raises(ValueError, match=r"attn_mask: .*got a mask"):
            new(torch.randn(1, 65, 64), torch.zeros(1, 1, 65, 65))

    @pytest.mark.parametrize("words", [{"count": 1, "layers": ["blocks.1.attn"]}, {"heads": {"blocks.1.attn": [0]}}])
    def test_what_computes_another_formula_is_refused(self, words: Any) -> None:
        model = sharp()
        model.blocks[1].attn.register_forward_hook(lambda _module, _args, output: 2 * output)
        with pytest.raises(ValueError, match=r"model.blocks.1.attn: .*whose output differs by 0.5"):
            replace_heads(model, images(), **words)


class TestLayers:
    def test_what_cannot_be_replaced_is_left_out_by_name(self) -> None:
        model = PoolingViT().eval()
        result = replace_heads(model, images(), count=3)
        assert {entry.layer for entry in result.candidates} == {"blocks.0.attn", "blocks.1.attn"}
        assert list(result.left_out) == ["attn_pool"]
        assert re.search("none of its queries is a token of the image", result.left_out["attn_pool"])
        assert isinstance(result.model.attn_pool, AttentionPool)

    def test_a_module_of_another_formula_too(self) -> None:
        model = sharp()
        model.blocks[1].attn.register_forward_hook(lambda _module, _args, output: 2 * output)
        result = replace_heads(model, images(), count=4)
        assert {entry.layer for entry in result.replaced} == {"blocks.0.attn"}
        assert "whose output differs by 0.5" in result.left_out["blocks.1.attn"]

    def test_layers_say_what_to_choose_from(self) -> None:
        result = replace_heads(sharp(), images(), count=4, layers=["blocks.1.attn"])
        assert [entry.layer for entry in result.candidates] == ["blocks.1.attn"] * 4
        assert result.left_out == {}

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (
                "attn_pool",
                r"model.attn_pool: .*got AttentionPool.*: .*none of its queries",
            ),
            ("blocks.2.attn", r"layers: .*blocks.0.attn, .*got 'blocks.2.attn'"),
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
            ({"count": 1, "kernel_size": 2}, "kernel_size: must be an odd integer, or 'full', got 2"),
            ({"count": 1, "kernel_size": 17}, "kernel_size: .*got 17"),
            ({"count": 1, "kernel_size": (3, 17)}, "kernel_size: .*got 17"),
            ({"count": 1, "kernel_size": ()}, r"kernel_size: must contain at least one size, got \(\)"),
            ({"count": -1}, "count: .*got -1"),
            ({"count": 9}, "count: .*got 9"),
            ({"heads": {NAME: [9]}}, r"heads\['blocks.0.attn'\]: .*from 0 to 3, got \[9\]"),
            ({"heads": {NAME: [-1]}}, r"heads\['blocks.0.attn'\]: .*from 0 to 3, got \[-1\]"),
            ({"heads": {"blocks.7.attn": []}}, r"heads: .*blocks.1.attn, got 'blocks.7.attn'"),
            ({"count": 1, "layers": []}, r"layers: .*got \[\]"),
            ({"count": 1, "layers": ["nope"]}, r"layers: .*blocks.0.attn, blocks.1.attn, got 'nope'"),
        ],
    )
    def test_arguments_out_of_range(self, arguments: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            replace_heads(sharp(), images(), **arguments)

    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"count": 1, "kernel_size": "Full"}, "kernel_size: must be .* 'full', got 'Full'"),
            ({"heads": {NAME: 1}}, r"heads\['blocks.0.attn'\]: .*got 1"),
            ({"heads": {NAME: [0.5]}}, r"heads\['blocks.0.attn'\]: .*got \[0.5\]"),
            ({"heads": [NAME]}, r"heads: .*got \['blocks.0.attn'\]"),
            ({"count": 1, "layers": NAME}, "layers: .*got 'blocks.0.attn'"),
            ({"count": 1, "images": [[0.0]]}, "images: must be a tensor .*got list"),
        ],
    )
    def test_arguments_of_other_kinds(self, arguments: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            replace_heads(sharp(), **{"images": images(), **arguments})

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            (lambda out: out.detach(), "model: .*differentiable.*got no gradient"),
            (lambda out: 0 * out, "model: .*got zeros"),
            (lambda out: out / 0, "model: .*got NaN or infinity"),
            (lambda out: out.argmax(1), r"model: .*6 images.*got shape \(6,\) of torch.int64"),
            (lambda out: out.mean(0), r"model: .*6 images.*got shape \(10,\) of torch.float32"),
            (lambda out: out.sum(), r"model: .*6 images.*got shape \(\) of torch.float32"),
            (lambda out: ((out,),), "model: .*got no tensor"),
        ],
    )
    def test_outputs_against_which_nothing_can_be_measured(self, what: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace_heads(Then(sharp(), what), images(), count=1)

    def test_a_bare_attention_has_no_place_to_be_replaced_in(self) -> None:
        attention = sharp(0).blocks[0].attn
        tokens = torch.randn(2, 64, 64)
        with pytest.raises(ValueError, match=r"model: .*got Attention"):
            replace_heads(attention, tokens, count=1, grid=(8, 8))
        assert len(replace_heads(nn.Sequential(attention), tokens, count=1, grid=(8, 8)).layer_errors) == 1

    def test_one_image_is_too_few(self) -> None:
        with pytest.raises(ValueError, match=r"images: .*got 1"):
            replace_heads(sharp(), images(1), count=1)

    def test_images_that_tell_nothing(self) -> None:
        blank, broken = images(), images()
        blank[3] = 0.5
        broken[7, 0, 0, 0] = torch.nan
        for given, message in (
            (blank, "images: .*got .*in image 3"),
            (broken, "images: must be finite, got NaN or infinity in image 7"),
            (images()[:, :, :30], r"images: .*got .*\(8, 3, 30, 32\)"),
        ):
            with pytest.raises(ValueError, match=message):
                replace_heads(sharp(), given, count=1)

    def test_a_gate_is_refused(self) -> None:
        model = sharp()
        model.blocks[0].attn.gate = nn.Linear(64, 64)
        with pytest.raises(ValueError, match=r"got Attention with gate"):
            replace_heads(model, images(), count=1, layers=["blocks.0.attn"])
