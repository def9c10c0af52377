"""The classifiers, compared with plain tensor implementations of their description."""

from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnconv.encodings import Encoding
from attnconv.encodings.registry import EncodingName
from attnconv.layers import SelfAttention2d
from attnconv.models.classifiers import (
    AttentionBlock,
    AttentionClassifier,
    BasicBlock,
    ResNet,
    StagedBlock,
    StagedClassifier,
    build,
    make_encoding,
    space_to_depth,
)
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, CentresName, ResNetSettings, StagedSettings
from tests.tolerances import tolerance

TINY = AttentionSettings(
    layers=2, heads=3, width=12, mlp_width=20, downsampling=2, max_shift=3, image_size=8, image_channels=3, classes=5
)
ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)


def tiny(settings: AttentionSettings = TINY) -> AttentionClassifier:
    return AttentionClassifier(settings).double()


def quadratic_attention(layer: SelfAttention2d, hidden: Tensor) -> Tensor:
    """Compute equations (9) and (11) for every pair of positions; input and output are (b, height, width, c)."""
    batch, height, width, _ = hidden.shape
    points = torch.cartesian_prod(torch.arange(height), torch.arange(width)).to(hidden.dtype)  # (n, 2)
    shifts = points[None, :] - points[:, None]  # key minus query, (n, n, 2)
    out = torch.zeros(batch, height * width, layer.out_channels, dtype=hidden.dtype)
    assert isinstance(layer.weight, Tensor)
    assert isinstance(layer.encoding.centres, Tensor)
    assert isinstance(layer.encoding.spread, Tensor)
    for head in range(layer.heads):
        centre, spread = layer.encoding.centres[head], layer.encoding.spread[head]
        scores = -0.5 * spread**2 * (shifts - centre).square().sum(-1)
        out += torch.softmax(scores, -1) @ hidden.flatten(1, 2) @ layer.weight[head]
    bias = 0 if layer.bias is None else layer.bias
    return (out + bias).unflatten(1, (height, width))


def written_out(model: AttentionClassifier, images: Tensor, settings: AttentionSettings) -> Tensor:
    """Compute the reference classifier in evaluation mode."""
    hidden = model.embedding(F.pixel_unshuffle(images, settings.downsampling).movedim(1, -1))
    for block in model.blocks:
        assert isinstance(block, AttentionBlock)
        shape = (settings.width,)
        first = (shape, block.attention_norm.weight, block.attention_norm.bias, settings.norm_epsilon)
        second = (shape, block.mlp_norm.weight, block.mlp_norm.bias, settings.norm_epsilon)
        if settings.norm == "post":
            hidden = F.layer_norm(hidden + block.output(quadratic_attention(block.attention, hidden)), *first)
            mlp = block.mlp_out(F.gelu(block.mlp_in(hidden), approximate="none"))
            hidden = F.layer_norm(hidden + mlp, *second)
        else:
            hidden = hidden + block.output(quadratic_attention(block.attention, F.layer_norm(hidden, *first)))
            hidden = hidden + block.mlp_out(F.gelu(block.mlp_in(F.layer_norm(hidden, *second)), approximate="none"))
    if settings.norm == "pre":
        assert isinstance(model.norm, torch.nn.LayerNorm)
        hidden = model.norm(hidden)
    logits: Tensor = model.head(hidden.mean((1, 2)))
    return logits


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("size", [(8, 8), (2, 2), (6, 10)])
def test_it_equals_its_description(norm: Literal["post", "pre"], size: tuple[int, int]) -> None:
    settings = replace(TINY, norm=norm)
    model = tiny(settings).eval()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(model(images), written_out(model, images, settings), **tolerance(torch.float64))


def test_the_down_sampling_is_that_of_torch_and_invertible() -> None:
    images = torch.randn(2, 3, 6, 4)
    positions = space_to_depth(images, 2)
    torch.testing.assert_close(positions.movedim(-1, 1), F.pixel_unshuffle(images, 2), rtol=0, atol=0)
    torch.testing.assert_close(F.pixel_shuffle(positions.movedim(-1, 1), 2), images, rtol=0, atol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_takes_images_of_any_size_and_shape(encoding: EncodingName) -> None:
    model = tiny(replace(TINY, encoding=encoding))
    for size in [(8, 8), (2, 2), (4, 6), (12, 2)]:
        assert model(torch.randn(2, 3, *size, dtype=torch.float64)).shape == (2, 5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_gradient_reaches_every_parameter(encoding: EncodingName) -> None:
    model = tiny(replace(TINY, encoding=encoding))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    model(images).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    # A bias of the keys adds the same constant to all scores of a query, so its gradient is zero.
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.abs().sum() > 0 and not name.endswith("key.bias")
    ]
    assert (without, still) == ([], [])
    assert images.grad is not None


@pytest.mark.parametrize("encoding", ["quadratic", "learned-content"])
def test_a_batch_is_its_images_one_by_one(encoding: EncodingName) -> None:
    model = tiny(replace(TINY, encoding=encoding)).eval()
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    one_by_one = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), one_by_one, **tolerance(torch.float64))
    torch.testing.assert_close(model(images.flip(0)), model(images).flip(0), **tolerance(torch.float64))


def test_without_positions_the_logits_do_not_see_the_order_of_the_positions() -> None:
    model = tiny().eval()
    for block in model.blocks:
        assert isinstance(block, AttentionBlock)
        torch.nn.init.zeros_(block.attention.get_parameter("encoding.spread"))  # all keys have the same score
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    order = torch.randperm(16)
    shuffled = space_to_depth(images, 2).flatten(1, 2)[:, order].unflatten(1, (4, 4)).movedim(-1, 1)
    torch.testing.assert_close(model(F.pixel_shuffle(shuffled, 2)), model(images), **tolerance(torch.float64))


def test_with_positions_they_do() -> None:
    model = tiny().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    difference = (model(images) - model(images.roll((2, 4), (2, 3)))).abs().max()
    assert difference > 1e-3


def test_an_empty_batch_gives_no_logits() -> None:
    assert tiny()(torch.zeros(0, 3, 8, 8, dtype=torch.float64)).shape == (0, 5)


def test_dropout_acts_in_training_only() -> None:
    model = tiny(replace(TINY, dropout=0.5, attention_dropout=0.5))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert not torch.equal(model(images), model(images))
    model.eval()
    torch.testing.assert_close(model(images), model(images), rtol=0, atol=0)


def test_heads_may_differ_from_layer_to_layer() -> None:
    model = tiny(replace(TINY, heads=(4, 1)))
    layers = [block.attention for block in model.blocks if isinstance(block, AttentionBlock)]
    assert [layer.heads for layer in layers] == [4, 1]
    assert model(torch.zeros(1, 3, 8, 8, dtype=torch.float64)).shape == (1, 5)


def test_factored_values_equal_merged_ones() -> None:
    factored = tiny(replace(TINY, head_channels=4)).eval()
    merged = tiny().eval()
    state = factored.state_dict()
    for index in range(TINY.layers):
        name = f"blocks.{index}.attention"
        value, output = state.pop(f"{name}.value_weight"), state.pop(f"{name}.output_weight")
        state[f"{name}.weight"] = value @ output  # W^(h) = W_val W_out
    merged.load_state_dict(state)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(factored(images), merged(images), **tolerance(torch.float64))


def test_the_hidden_state_stays_channels_last() -> None:
    """Inputs and outputs of attention layers are views of contiguous (b, height, width, c) tensors, without copies."""
    model, found = tiny(), []

    def watch(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append((inputs[0].movedim(1, -1).is_contiguous(), output.movedim(1, -1).is_contiguous()))

    for block in model.blocks:
        assert isinstance(block, AttentionBlock)
        block.attention.register_forward_hook(watch)
    model(torch.zeros(2, 3, 8, 6, dtype=torch.float64))
    assert found == [(True, True)] * TINY.layers


def test_the_state_dict_makes_a_second_model_equal() -> None:
    first, second = tiny().eval(), tiny().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert not torch.equal(first(images), second(images))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(images), second(images), rtol=0, atol=0)


def test_bfloat16_autocast_follows_float32() -> None:
    model = AttentionClassifier(TINY).eval()
    images = torch.randn(2, 3, 8, 8)
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images)
    # Rounding errors pass through two blocks and their norms before the logits.
    torch.testing.assert_close(rounded.float(), exact, **tolerance(torch.bfloat16, scale=2))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_settings_reach_the_encoding(encoding: EncodingName) -> None:
    made = make_encoding(replace(TINY, encoding=encoding, key_channels=6), 3)
    assert isinstance(made, Encoding)
    shapes = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    expected: dict[str, Any] = {
        "quadratic": {"centres": (3, 2), "spread": (3, 1)},
        "quadratic-generalized": {"centres": (3, 2), "root_precision": (3, 2, 2)},
        "learned": {"tables.0": (7, 12), "projections.1.weight": (3, 12)},
        "learned-content": {"tables.0": (7, 3), "query.weight": (18, 12), "key.bias": (18,)},
        "sinusoidal": {"query.weight": (18, 12), "position_key.weight": (18, 12)},
        "absolute-sinusoidal": {"query.weight": (18, 12), "key.weight": (18, 12)},
        "absolute-learned": {"query.weight": (18, 12), "positions.table": (1, 12, 4, 4)},
    }
    wanted = expected[encoding]
    assert {name: shapes[name] for name in wanted} == wanted


def test_centres_and_spreads_follow_the_settings() -> None:
    settings = replace(TINY, heads=500, centre_std=3.0, spread_std=0.5)
    for encoding in ("quadratic", "quadratic-generalized"):
        made = make_encoding(replace(settings, encoding=encoding), 500)
        centres = made.get_parameter("centres")
        torch.testing.assert_close(centres.std(), torch.tensor(3.0), rtol=0.1, atol=0)
    spread = make_encoding(settings, 500).get_parameter("spread")
    torch.testing.assert_close(spread.std(), torch.tensor(0.5), rtol=0.1, atol=0)


@pytest.mark.parametrize("encoding", ["quadratic", "quadratic-generalized"])
def test_heads_may_begin_at_the_nearest_shifts_and_the_rest_is_drawn_as_before(encoding: EncodingName) -> None:
    models = []
    for centres in get_args(CentresName):
        torch.manual_seed(0)
        models.append(build(replace(TINY, heads=5, encoding=encoding, centres=centres)))
    drawn, placed = (dict(model.named_parameters()) for model in models)
    for name, parameter in placed.items():
        if name.endswith("centres"):
            torch.testing.assert_close(parameter.square().sum(1), torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))
        elif ".encoding." not in name:
            torch.testing.assert_close(parameter, drawn[name], rtol=0.0, atol=0.0)


def test_wrong_settings_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)settings\.heads: .*got 0.*settings\.downsampling: .*got 3"):
        AttentionClassifier(replace(TINY, heads=0, downsampling=3))
    with pytest.raises(ValueError, match=r"settings\.width: .*got 0"):
        build(replace(TINY, width=0))


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, r"images: must be a floating.*, got torch\.uint8"),
        (torch.zeros(3, 8, 8), ValueError, r"images: must have shape .*, got shape \(3, 8, 8\)\. Add a batch axis"),
        (torch.zeros(2, 3, 8, 8, 1), ValueError, r"images: must have shape .*, got shape \(2, 3, 8, 8, 1\)"),
        (torch.zeros(2, 1, 8, 8), ValueError, r"images: must have shape .*, got shape \(2, 1, 8, 8\)"),
        (torch.zeros(2, 3, 0, 8), ValueError, r"images: must have shape .*, got shape \(2, 3, 0, 8\)"),
        (torch.zeros(2, 3, 8, 7), ValueError, r"images: .*divisible by 2, got shape \(2, 3, 8, 7\)"),
    ],
)
def test_wrong_images_are_refused(images: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionClassifier(TINY)(images)


TINY_STAGED = StagedSettings(widths=(4, 8), layers=(2, 2), image_size=8, classes=5)


@pytest.mark.parametrize("size", [(8, 8), (2, 2), (6, 10)])
def test_the_staged_classifier_equals_its_description(size: tuple[int, int]) -> None:
    model = StagedClassifier(TINY_STAGED).double()
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    x = model.norm(model.embedding(F.pixel_unshuffle(images, 2).movedim(1, -1)).movedim(-1, 1))
    for number, block in enumerate(model.blocks):
        assert isinstance(block, StagedBlock)
        branch = quadratic_attention(block.attention, x.movedim(1, -1)).movedim(-1, 1)
        if number == 2:  # the first block of the second stage
            branch = F.max_pool2d(branch, 2, ceil_mode=True)
        branch = F.gelu(block.norm(branch), approximate="none")
        x = branch if number == 2 else x + branch
    torch.testing.assert_close(model(images), model.head(x.mean((2, 3))), **tolerance(torch.float64))


def test_the_staged_classifier_starts_with_3_x_3_kernels_and_trains_every_parameter() -> None:
    model = StagedClassifier(TINY_STAGED)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    for block in model.blocks:
        centres = block.get_parameter("attention.encoding.centres")
        assert {tuple(centre) for centre in centres.tolist()} == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}


TINY_RESNET = ResNetSettings(widths=(4, 8), blocks=(2, 1), image_size=8, classes=5)


def test_resnet18_has_the_known_number_of_parameters() -> None:
    settings = PRESETS["resnet18"]
    assert isinstance(settings, ResNetSettings)
    with torch.device("meta"):
        model = ResNet(settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def test_stages_after_the_first_halve_the_image() -> None:
    model = ResNet(ResNetSettings(widths=(4, 8, 16), blocks=(1, 1, 1)))
    sizes = []
    for block in model.stages:
        block.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.zeros(2, 3, 32, 20))
    assert sizes == [(4, 32, 20), (8, 16, 10), (16, 8, 5)]


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (5, 9)])
def test_images_of_any_size(size: tuple[int, int]) -> None:
    assert ResNet(TINY_RESNET).eval()(torch.randn(2, 3, *size)).shape == (2, 5)


def test_a_block_without_branch_is_its_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6)
    same, other = BasicBlock(4, 4).eval(), BasicBlock(4, 8, stride=2).eval()
    for block in (same, other):
        torch.nn.init.zeros_(block.convolution2.weight)
    torch.testing.assert_close(same(x), x, rtol=0, atol=0)
    torch.testing.assert_close(other(x), torch.relu(other.shortcut(x)), **tolerance(torch.float32))
    assert other(x).shape == (2, 8, 3, 3)


def test_a_gradient_reaches_every_parameter_of_the_residual_network() -> None:
    model = ResNet(TINY_RESNET)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_wrong_settings_and_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"settings\.layers: .*got \(1,\)"):
        StagedClassifier(StagedSettings(widths=(4, 8), layers=(1,)))
    with pytest.raises(ValueError, match=r"images: .*divisible by 2, got shape \(2, 3, 8, 7\)"):
        StagedClassifier(TINY_STAGED)(torch.zeros(2, 3, 8, 7))
    with pytest.raises(ValueError, match=r"settings\.blocks: .*got \(1,\)"):
        ResNet(ResNetSettings(widths=(4, 8), blocks=(1,)))
    with pytest.raises(ValueError, match=r"images: .*got shape \(2, 1, 8, 8\)"):
        ResNet(TINY_RESNET)(torch.zeros(2, 1, 8, 8))
