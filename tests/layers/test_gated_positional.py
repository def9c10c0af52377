"""Tests of gated positional attention: equal to its formula and to timm's layer, with gradients; fused ConViTs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnconv.layers import GatedPositionalAttention, fuse_convit
from tests.tolerances import tolerance

DOUBLE = torch.float64
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])


class StandIn(nn.Module):
    """Stand-in for timm's GPSA with the attributes that conversions read, so that timm is not required."""

    def __init__(self, dim: int = 8, num_heads: int = 4) -> None:
        super().__init__()
        self.dim, self.num_heads, self.scale, self.locality_strength = dim, num_heads, 0.3, 1.0
        self.qk, self.v, self.proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.pos_proj, self.gating_param = nn.Linear(3, num_heads), nn.Parameter(torch.ones(num_heads))
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.5)


StandIn.__module__, StandIn.__name__ = "timm.models.convit", "GPSA"


def formula(layer: GatedPositionalAttention, x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Compute both softmaxes over all pairs of tokens, mix and normalise them."""
    places = torch.cartesian_prod(*(torch.arange(size, dtype=x.dtype) for size in sizes))  # (n, 2): row, column
    down, across = (places[None] - places[:, None]).unbind(-1)  # key minus query
    position = layer.pos_proj(torch.stack((across, down, across**2 + down**2), -1)).permute(2, 0, 1)
    q, k = layer.qk(x).unflatten(-1, (2, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    values = layer.v(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    gate = torch.sigmoid(layer.gating_param)[:, None, None]
    attention = (1 - gate) * (q @ k.mT * layer.scale).softmax(-1) + gate * position.softmax(-1)
    attention = attention / attention.sum(-1, keepdim=True)
    return layer.proj((attention @ values).transpose(1, 2).flatten(2))


def random_layer(heads: int = 4, dtype: torch.dtype = DOUBLE) -> GatedPositionalAttention:
    """Return a layer with weights and gates far from their initial values."""
    layer = GatedPositionalAttention(4 * heads, heads, qkv_bias=True, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
        layer.gating_param.copy_(torch.linspace(-9, 9, heads))
    return layer


def assert_same(out: Tensor, expected: Tensor, inputs: list[Tensor], others: list[Tensor], scale: float) -> None:
    """Compare outputs and the gradients of all inputs, for the same weights on both outputs."""
    near = tolerance(out.dtype, scale=scale)
    torch.testing.assert_close(out, expected, **near)
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, weights)
    wanted = torch.autograd.grad(expected, others, weights)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, **near)


@every_dtype
@pytest.mark.parametrize("sizes", [(1, 1), (1, 6), (5, 3), (4, 4), (3, 9)])
@pytest.mark.parametrize("heads", [1, 4, 5])
def test_it_is_its_formula_on_images_of_any_shape(sizes: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    layer = random_layer(heads, dtype)
    x = torch.randn(2, sizes[0] * sizes[1], 4 * heads, dtype=dtype, requires_grad=True)
    inputs = [x, *layer.parameters()]
    # sums over up to 54 tokens
    assert_same(layer(x, sizes=sizes), formula(layer, x, sizes), inputs, inputs, scale=10)


def test_sharp_heads_far_from_the_image_are_finite_and_exact() -> None:
    layer = random_layer()
    with torch.no_grad():
        layer.pos_proj.weight.copy_(
            torch.tensor([[900.0, 0.0, -3.0], [0.0, -700.0, 2.0], [0.0, 0.0, 50.0], [0.0, 0.0, 0.0]])
        )
    x = torch.randn(1, 35, 16, dtype=DOUBLE, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert_same(layer(x, sizes=(5, 7)), formula(layer, x, (5, 7)), inputs, inputs, scale=10)


def test_the_positional_part_is_an_operator_of_its_own() -> None:
    layer = random_layer()
    with torch.no_grad():
        layer.gating_param.fill_(torch.inf)
        layer.v.bias.zero_()
        layer.v.weight.copy_(torch.eye(16))
        layer.proj.bias.zero_()
        layer.proj.weight.copy_(torch.eye(16))
    x = torch.randn(1, 6, 16, dtype=DOUBLE)
    rows = layer.position_operator((2, 3)).to_dense()[0]
    expected = (rows @ x[0].unflatten(-1, (4, 4)).transpose(0, 1)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer(x, sizes=(2, 3))[0], expected, **tolerance(DOUBLE))


def test_bfloat16_by_autocast_and_by_itself() -> None:
    layer = random_layer(dtype=torch.float32)
    x = torch.randn(2, 16, 16)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    # several products and two softmaxes, each rounded
    torch.testing.assert_close(out.float(), expected, **tolerance(torch.bfloat16, scale=3))
    out.float().sum().backward()
    assert [name for name, parameter in layer.named_parameters() if parameter.grad is None] == []
    alone = layer.bfloat16()(x.bfloat16())
    assert alone.dtype == torch.bfloat16
    torch.testing.assert_close(alone.float(), expected, **tolerance(torch.bfloat16, scale=3))


def test_a_fresh_layer_starts_as_a_convolution() -> None:
    layer = GatedPositionalAttention(18, 9, locality_strength=50.0)
    rows = layer.position_operator((5, 5)).rows(torch.tensor([12]))[0, :, 0]  # of the central position, (h, 25)
    seen = [(int(key) // 5 - 2, int(key) % 5 - 2) for key in rows.argmax(-1)]
    assert sorted(seen) == [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    torch.testing.assert_close(rows.amax(-1), torch.ones(9))
    torch.testing.assert_close(layer.v.weight, torch.eye(18))
    spare = GatedPositionalAttention(10, 5, locality_strength=50.0).position_operator((3, 3)).to_dense()[0, 4]
    torch.testing.assert_close(spare, torch.eye(9))


def test_second_and_forward_derivatives_with_plain_products() -> None:
    layer = random_layer(heads=1)
    x = torch.randn(1, 4, 4, dtype=DOUBLE, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(layer, (x,), fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)


def test_a_dropped_output_is_dropped_in_training_only() -> None:
    layer = GatedPositionalAttention(8, 4, output_dropout=0.5)
    x = torch.randn(4, 9, 8)
    share = (layer(x) == 0).float().mean()
    assert 0.3 < float(share) < 0.7
    layer.eval()
    torch.testing.assert_close(layer(x), formula(layer, x, (3, 3)), **tolerance(torch.float32))


@every_dtype
@pytest.mark.parametrize("spread", [0.3, 6.0])
def test_it_equals_timms_layer(dtype: torch.dtype, spread: float) -> None:
    convit = pytest.importorskip("timm.models.convit", reason="the extra 'models' is not installed")
    theirs = convit.GPSA(32, 4, qkv_bias=True).to(dtype)
    with torch.no_grad():
        theirs.pos_proj.weight.normal_()
        theirs.gating_param.normal_(std=spread)
    ours = GatedPositionalAttention(32, 4, qkv_bias=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 196, 32, dtype=dtype, requires_grad=True)
    names = [name for name, _ in ours.named_parameters()]
    parameters = [[dict(layer.named_parameters())[name] for name in names] for layer in (ours, theirs)]
    # the gradient of w_3 sums 77 000 pairs times up to 338 position^2, which cancel
    scale = 10 if dtype == torch.float32 else 1
    assert_same(ours(x), theirs(x), [x, *parameters[0]], [x, *parameters[1]], scale=scale)


@every_dtype
def test_a_fused_convit_equals_timms(dtype: torch.dtype) -> None:
    timm = pytest.importorskip("timm", reason="the extra 'models' is not installed")
    theirs = timm.create_model("convit_tiny", num_classes=5).to(dtype)
    with torch.no_grad():
        for block in theirs.blocks[:10]:
            block.attn.gating_param.normal_(std=4)
    ours = copy.deepcopy(theirs)
    before = dict(ours.named_parameters())
    assert fuse_convit(ours) == 10
    after = dict(ours.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert sum(isinstance(module, GatedPositionalAttention) for module in ours.modules()) == 10
    x = torch.randn(1, 3, 224, 224, dtype=dtype)
    assert_same(ours(x), theirs(x), list(after.values()), list(dict(theirs.named_parameters()).values()), scale=1)
    ours.load_state_dict(theirs.state_dict())


def test_a_replaced_layer_keeps_its_parameters_its_scale_and_its_mode() -> None:
    old = StandIn().eval()
    model = nn.ModuleDict({"first": old, "again": old, "rest": nn.Sequential(StandIn(), nn.Linear(2, 2))})
    before = dict(model.named_parameters())
    assert fuse_convit(model) == 2
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert after.keys() == before.keys()
    made = model["first"]
    assert isinstance(made, GatedPositionalAttention)
    assert made is model["again"]
    assert (made.scale, made.training, made.proj_drop.p) == (0.3, False, 0.5)
    x = torch.randn(1, 4, 8)
    torch.testing.assert_close(made(x), formula(made, x, (2, 2)), **tolerance(torch.float32))


def test_attention_dropout_is_refused_before_anything_is_replaced() -> None:
    dropping = StandIn()
    dropping.attn_drop.p = 0.1
    model = nn.Sequential(StandIn(), dropping)
    with pytest.raises(ValueError, match=r"attn_drop: .*got 0\.1"):
        fuse_convit(model)
    assert [type(module) for module in model] == [StandIn, StandIn]


def test_other_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model: .*got Linear"):
        fuse_convit(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"module: .*got Linear"):
        GatedPositionalAttention.from_timm(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 0}, "channels: must be .* got 0"),
        ({"heads": 3}, r"heads: must divide the number of channels \(8\), got 3"),
        ({"output_dropout": 1.0}, r"output_dropout: must be .* got 1\.0"),
        ({"locality_strength": 0}, "locality_strength: .*got 0"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedPositionalAttention(**{"channels": 8, "heads": 4, **arguments})


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((1, 9, 7), None, r"x: must be of shape \(batch, tokens, 8\), got shape \(1, 9, 7\)"),
        ((9, 8), None, r"x: must be of shape \(batch, tokens, 8\), got shape \(9, 8\)"),
        ((1, 10, 8), None, r"x: .*got 10 tokens"),
        ((1, 0, 8), None, r"x: .*got 0 tokens"),
        ((1, 10, 8), (3, 3), r"sizes: .*got \(3, 3\)"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_tokens_that_do_not_fit_are_refused(
    shape: tuple[int, ...], sizes: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GatedPositionalAttention(8, 4)(torch.zeros(shape), sizes)
