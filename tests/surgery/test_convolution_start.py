"""Initialisation of a ViT as a convolution: mass, errors, and invalid arguments."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv import audit
from attnconv.inspect import TokenOperator, visit_attention
from attnconv.operators.base import AttentionOperator
from attnconv.surgery import LayerStart, convolution_start as module, initialize
from attnconv.surgery.convolution_start import AxisFeatures, cosines
from experiments.small_vit import Attention, SmallViT
from tests.small_hf_vit import SmallHfViT
from tests.tolerances import tolerance

FILTERS = torch.randn(72, 72, 3, 3, generator=torch.Generator().manual_seed(3))


COPY = {"values": "mimetic", "identity": 1.0, "noise": 0.0}  # each head copies its own channels


def as_convolution(model: Any, *, values: Any = "unchanged", mass: Any = 0.9, **more: Any) -> dict[str, LayerStart]:
    return initialize(model, values=values, mass=mass, **more)


def model_of(**more: Any) -> SmallViT:
    torch.manual_seed(0)
    return SmallViT(**more)


class Turning(Attention):
    """Attention with rotary positions."""

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        return super().forward(x) if position_embeddings is None else x


class TestMass:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    @pytest.mark.parametrize("options", [{}, COPY], ids=["default", "copy"])
    def test_heads_hold_what_was_asked_for_in_every_layer(self, prefix: int, options: Any) -> None:
        starts = as_convolution(model_of(prefix=prefix, depth=3), **options)
        assert list(starts) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
        for start in starts.values():
            assert float(start.mass.mean()) == pytest.approx(0.9, abs=1e-3)
            assert start.filter_error == 0

    def test_half_precision_sums_over_many_images(self) -> None:
        many = torch.randn(1100, 3, 32, 32)  # 70,400 queries, above the largest float16 number
        starts = as_convolution(model_of(depth=1).half(), images=many.half(), mass=0.5)
        assert float(starts["blocks.0.attn"].mass.mean()) == pytest.approx(0.5, abs=0.01)

    def test_the_mass_is_that_of_the_model_as_it_is_read(self) -> None:
        model = model_of()
        images = torch.randn(2, 3, 32, 32)
        starts = as_convolution(model, images=images)

        def visit(name: str, operator: AttentionOperator) -> None:
            assert isinstance(operator, TokenOperator)
            rows = operator.rows(torch.arange(64)).unflatten(2, (8, 8)).unflatten(4, (8, 8))
            start = starts[name]
            for head, (down, right) in enumerate(start.shifts.tolist()):
                inside = [rows[:, head, i, j, i + down, j + right] for i in range(1, 7) for j in range(1, 7)]
                assert float(torch.stack(inside).mean()) == pytest.approx(float(start.mass[head]), abs=0.02)

        visit_attention(model, images, visit)

    def test_fewer_heads_than_shifts_go_on_in_the_next_layer(self) -> None:
        starts = as_convolution(model_of(depth=3))
        shifts = torch.cat([start.shifts for start in starts.values()]).tolist()
        assert len({tuple(shift) for shift in shifts[:9]}) == 9
        assert shifts[0] == shifts[9] == [0, 0]

    @pytest.mark.parametrize(("heads", "dim"), [(9, 144), (12, 192), (16, 256)])
    def test_the_score_is_the_mass_whatever_the_number_of_heads(self, heads: int, dim: int) -> None:
        model, images = model_of(dim=dim, num_heads=heads, depth=1), torch.randn(2, 3, 32, 32)
        as_convolution(model, images=images, mass=0.99)
        (layer,) = audit(model, images).layers
        assert layer.statistics.convolution_score == pytest.approx(0.99, abs=0.01)
        assert layer.statistics.coverage == pytest.approx(0.99, abs=0.01)

    def test_little_room_in_a_head_is_enough_where_sharpness_is_free(self) -> None:
        """Eight dimensions for two axes of eight positions suffice: a shift is an exact rotation of sinusoids."""
        start = as_convolution(model_of(dim=72, num_heads=9), mass=0.99)["blocks.0.attn"]
        assert float(start.mass.min()) > 0.95

    def test_scores_become_sharp_enough_where_positions_are_short(self) -> None:
        """Warnings are errors in this test suite."""
        start = as_convolution(model_of(depth=1), mass=0.9999, position_length=0.01)["blocks.0.attn"]
        assert float(start.mass.mean()) == pytest.approx(0.9999, abs=5e-5)

    def test_positions_lost_in_rounding_leave_a_model_that_can_be_trained(self) -> None:
        model = model_of(dim=72, num_heads=9, depth=1)
        with pytest.warns(UserWarning, match="less than mass=0.9"):
            start = as_convolution(model, position_length=1e-8)["blocks.0.attn"]
        assert bool(start.mass.isfinite().all())
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        assert all(bool(part.grad.isfinite().all()) for part in model.parameters() if part.grad is not None)

    def test_a_mass_that_is_not_reached_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SHARPEST", 3.0)
        with pytest.warns(UserWarning, match=r"less than mass=0.9: .* in blocks.0.attn, 0") as said:
            starts = as_convolution(model_of())
        assert f"{float(starts['blocks.0.attn'].mass.mean()):.3f} in" in str(said[0].message)


class TestError:
    def test_sharp_heads_are_the_convolution(self) -> None:
        model = model_of(dim=144, num_heads=9)
        starts = as_convolution(model, mass=0.9999)
        for start in starts.values():
            assert start.error < 2e-3

    def test_the_error_falls_with_the_mass(self) -> None:
        errors = [as_convolution(model_of(), mass=mass)["blocks.0.attn"].error for mass in (0.5, 0.9, 0.99, 0.999)]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 10 * errors[-1]

    def test_shorter_positions_leave_more_of_the_content_at_a_larger_error(self) -> None:
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(7))
        shares, errors = [], []
        for length in (1.0, 0.3, 0.1):
            model = model_of()
            start = as_convolution(model, position_length=length)["blocks.0.attn"]
            with torch.no_grad():
                tokens = model.patch_embed(images) + model.pos_embed[:, -model.patch_embed.num_patches :]
                seen = model.blocks[0].norm1(tokens)
            shares.append(float(seen.var(0).sum() / seen.square().mean(0).sum()))
            errors.append(start.error)
            assert float(start.mass.mean()) == pytest.approx(0.9, abs=1e-3)
        assert shares == sorted(shares)
        assert shares[2] > 2 * shares[0]
        assert errors == sorted(errors)

    def test_given_filters_of_low_rank_are_met(self) -> None:
        """Rank 4 per tap fits heads of 8; the layer equals F.conv2d, except in the subspace of positions."""
        factors = torch.randn(2, 9, 72, 4, generator=torch.Generator().manual_seed(4))
        filters = torch.einsum("tdr,tcr->dct", factors[0], factors[1]).unflatten(2, (3, 3))
        model = model_of(dim=72, num_heads=9)
        images = torch.randn(2, 3, 32, 32)
        start = as_convolution(model, values=filters, images=images, mass=0.9999)["blocks.0.attn"]
        assert start.filter_error < 1e-5
        assert model.cls_token is not None
        basis = torch.cat((model.pos_embed[0], model.cls_token[0])).detach()
        seen = []
        block = model.blocks[0]
        handle = block.attn.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        model(images)
        handle.remove()
        out = block.attn(seen[0])[:, 1:]
        image = F.pad(seen[0][:, 1:].transpose(1, 2).unflatten(-1, (8, 8)), (1, 1, 1, 1), mode="replicate")
        expected = F.conv2d(image, filters, block.attn.proj.bias).flatten(2).transpose(1, 2)
        # `pos_embed` and the class token's constant span the subspace of positions.
        _, sizes, directions = torch.linalg.svd(basis, full_matrices=False)
        span = directions[sizes > 1e-3 * sizes[0]]
        expected = expected - expected @ span.T @ span
        relative = ((out - expected).norm() / expected.norm()).item()
        assert relative == pytest.approx(start.error, abs=1e-3)
        assert relative < 0.05
        # Relative to the given filters, the part of the output inside the span is missing.
        whole = F.conv2d(image, filters, block.attn.proj.bias).flatten(2).transpose(1, 2)
        assert start.given_error == pytest.approx(((out - whole).norm() / whole.norm()).item(), abs=1e-3)
        assert start.given_error > relative

    def test_filters_of_full_rank_say_what_is_lost(self) -> None:
        with pytest.warns(UserWarning, match=r"values: .*got rank 72") as said:
            start = as_convolution(model_of(dim=72, num_heads=9), values=FILTERS)["blocks.0.attn"]
        singular = torch.linalg.svdvals(FILTERS.permute(2, 3, 0, 1))
        expected = (singular[..., 8:].square().sum() / singular.square().sum()).sqrt()
        assert start.filter_error == pytest.approx(float(expected), rel=1e-4)
        assert start.given_error > start.filter_error - 0.1 > 0.5 > start.error
        words = str(said[0].message)
        assert f"{start.filter_error:.3f} in blocks.0.attn, 0." in words

    @pytest.mark.parametrize(("part", "said"), [(0.005, False), (0.02, True)])
    def test_a_loss_of_filters_is_said_from_one_percent_on(self, part: float, said: bool) -> None:
        """Rank 8 per tap fits heads of 8; a ninth direction is lost."""
        basis = torch.linalg.qr(torch.randn(72, 9))[0]
        sizes = torch.tensor([8**-0.5] * 8 + [part])
        filters = ((basis * sizes) @ basis.T)[:, :, None, None].expand(-1, -1, 3, 3)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            starts = as_convolution(model_of(dim=72, num_heads=9, depth=1), values=filters)
        assert starts["blocks.0.attn"].filter_error == pytest.approx(part, rel=1e-3)
        assert [str(warning.message).split(":")[0] for warning in heard] == ["values"] * said

    def test_filters_that_fit_are_taken_without_a_word(self) -> None:
        """Warnings are errors in this test suite."""
        starts = as_convolution(model_of(dim=72, num_heads=9), values=FILTERS[:, :, 1:2, 1:2])
        assert max(start.filter_error for start in starts.values()) < 1e-5

    def test_without_given_filters_there_is_one_error(self) -> None:
        for start in as_convolution(model_of()).values():
            assert start.given_error == start.error


class TestTraining:
    def test_queries_and_keys_learn(self) -> None:
        model = model_of()
        as_convolution(model)
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        gradient = model.blocks[0].attn.qkv.weight.grad
        assert gradient is not None
        assert float(gradient[:128].abs().max()) > 0

    def test_only_the_named_layers_change_their_queries(self) -> None:
        model = model_of()
        before = model.blocks[0].attn.qkv.weight.detach().clone()
        assert list(as_convolution(model, layers=[1])) == ["blocks.1.attn"]
        torch.testing.assert_close(model.blocks[0].attn.qkv.weight.detach(), before, rtol=0, atol=0)


class TestHuggingFaceNames:
    @pytest.mark.parametrize("options", [{}, COPY], ids=["default", "copy"])
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    def test_it_is_the_same_in_every_layout(self, prefix: int, nested: bool, options: Any) -> None:
        plain = model_of(prefix=prefix)
        other = SmallHfViT(copy.deepcopy(plain), nested=nested)
        wanted = as_convolution(plain, **options)
        found = as_convolution(other, **options)
        assert list(found) == ["vit.layers.0.attention", "vit.layers.1.attention"]
        for one, two in zip(found.values(), wanted.values(), strict=True):
            assert one.error == pytest.approx(two.error, rel=1e-2)
            torch.testing.assert_close(one.mass, two.mass, rtol=1e-3, atol=1e-3)
        images = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(other(images)["logits"], plain(images), rtol=1e-2, atol=1e-3)

    def test_layer_scales_of_several_numbers_are_refused(self) -> None:
        model = SmallHfViT(model_of())
        model.vit.layers[1].layer_scale1.lambda1.data[3] = 2
        with pytest.raises(ValueError, match=r"model.vit.layers.1.layer_scale1: .*got several"):
            as_convolution(model)


class TestRefusals:
    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mass": 1.0}, "mass: .*got 1.0"),
            ({"values": "gabor"}, "values: .*got 'gabor'"),
            ({"values": FILTERS}, r"values: must have shape \(64, 64, K, K\).*got \(72, 72, 3, 3\)"),
            ({"values": torch.tensor(1.0)}, r"values: must have shape \(64, 64, K, K\).*got \(\)"),
            ({"values": torch.ones(64, 64, 1, 1, device="meta")}, "values: must be finite.*on meta"),
            ({"layers": [5]}, r"layers: .*got \[5\]"),
            ({"layers": []}, r"layers: .*got \[\]"),
            ({"layers": ["0"]}, r"layers: .*got \['0'\]"),
            ({"kernel_size": 4}, "kernel_size: .*got 4"),
            ({"position_length": 0.0}, "position_length: .*got 0.0"),
        ],
    )
    def test_arguments_out_of_range(self, arguments: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            as_convolution(model_of(), **arguments)

    @pytest.mark.parametrize(
        ("images", "message"),
        [
            (torch.zeros(2, 3, 32, 32), "images: .*got .*in image 0, 1"),
            (torch.full((1, 3, 32, 32), torch.nan), "images: must be finite"),
            (torch.randn(2, 3, 30, 32), "images: .*forward pass of SmallViT.*30, 32"),
        ],
    )
    def test_images_that_tell_nothing(self, images: Tensor, message: str) -> None:
        model = model_of()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            as_convolution(model, images=images)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    def test_models_without_numbers(self) -> None:
        model = model_of()
        with pytest.raises(ValueError, match=r"model: .*got .* meta device"):
            as_convolution(copy.deepcopy(model).to("meta"))
        model.head.bias.data[0] = torch.nan
        with pytest.raises(ValueError, match=r"head.bias: .*got NaN .*\(in model\)"):
            as_convolution(model)

    def test_models_of_another_kind(self) -> None:
        with pytest.raises(ValueError, match=r"model: .*got Linear"):
            as_convolution(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"model.blocks.0.attn: .*got Attention with q_norm"):
            as_convolution(model_of(qk_norm=True))

    def test_attention_of_other_terms(self) -> None:
        norm, turning, biased = Attention(64, 4), Turning(64, 4), Attention(64, 4)
        norm.norm = nn.LayerNorm(64)  # type: ignore[assignment]
        biased.relative_position_bias_table = nn.Parameter(torch.zeros(1, 4))
        biased.relative_position_index = torch.zeros(65, 65, dtype=torch.int64)
        for attention, words in (
            (norm, "got Attention with a norm before"),
            (turning, "got Turning with rotary positions"),
            (biased, "got Attention with a relative position bias"),
        ):
            model = model_of()
            model.blocks[1].attn = attention
            with pytest.raises(ValueError, match=rf"model.blocks.1.attn: .*{words}"):
                as_convolution(model)

    def test_a_refused_model_is_as_it_was(self) -> None:
        """A hook scales the input between the block's norm and its attention."""
        model = model_of()
        model.blocks[1].attn.register_forward_pre_hook(lambda _module, args: (2 * args[0],))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"model.blocks.1.attn: .*got Attention with"):
            as_convolution(model)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    def test_blocks_and_positions_of_another_kind(self) -> None:
        model = model_of()
        model.blocks[1].mlp.fc2 = nn.Identity()
        with pytest.raises(ValueError, match=r"model.blocks.1: .*got Mlp"):
            as_convolution(model)
        del model.blocks[1].norm1
        with pytest.raises(ValueError, match=r"model.blocks.1: .*got Block"):
            as_convolution(model)
        model = model_of()
        model.pos_embed = nn.Parameter(torch.zeros(1, 70, 64))
        with pytest.raises(ValueError, match=r"model: .*got SmallViT"):
            as_convolution(model)


@pytest.mark.parametrize("size", [1, 2, 5, 14])
def test_cosines_are_orthonormal_and_but_for_the_first_of_mean_nought(size: int) -> None:
    table = cosines(size)
    torch.testing.assert_close(table.T @ table, torch.eye(size), **tolerance(torch.float32))
    torch.testing.assert_close(table[:, 1:].sum(0), torch.zeros(size - 1), **tolerance(torch.float32))


@pytest.mark.parametrize(("size", "room"), [(8, 8), (8, 7), (14, 5), (5, 9)])
def test_features_are_unit_vectors_and_differ(size: int, room: int) -> None:
    axis = AxisFeatures(size, room, 1)
    products = axis.at(torch.arange(size)) @ axis.at(torch.arange(size)).T
    torch.testing.assert_close(products.diagonal(), torch.ones(size), **tolerance(torch.float32))
    assert float((products - torch.eye(size)).max()) < 0.999
    assert axis.exact == (room >= size)
    assert axis.at(torch.arange(size)).shape[1] <= room


@pytest.mark.parametrize("room", [8, 5])
@pytest.mark.parametrize("step", [-2, 0, 1])
def test_a_shift_is_a_linear_map(room: int, step: int) -> None:
    axis, places = AxisFeatures(8, room, 2), torch.arange(8)
    moved = axis.at(places) @ axis.moved(step).T
    torch.testing.assert_close(moved, axis.at(places + step), **tolerance(torch.float32))
    # The best key for a query is the one at the shift, or at the border the nearest one to it. (With 8 positions and
    # two frequencies, a key at half the period is as good for a shift of 2 beyond the border.)
    products = moved @ axis.at(places).T
    nearest = products.gather(1, (places + step).clamp(0, 7)[:, None])[:, 0]
    torch.testing.assert_close(nearest, products.amax(1), **tolerance(torch.float32))
