"""Tests of the layers: all encodings against the formula, the interface of nn.Conv*d, symmetries, invalid arguments."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attnconv import Dense, Relative, SelfAttention1d, SelfAttention2d, SelfAttention3d, from_conv
from attnconv.encodings import ENCODING_NAMES, SeparableEncoding
from attnconv.grid import BORDERS, Border
from attnconv.layers.planning import Backend
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators import AttentionOperator, Content, Kronecker, Shift, Toeplitz
from tests.tolerances import tolerance

LAYERS: dict[int, type[SelfAttention]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}
DOUBLE = torch.float64

every_encoding = pytest.mark.parametrize("name", ENCODING_NAMES)
every_border = pytest.mark.parametrize("border", BORDERS)


def layer2d(name: str = "quadratic", heads: int = 3, **options: Any) -> SelfAttention2d:
    return SelfAttention2d(12, 5, heads, encoding=name, dtype=DOUBLE, **options)


def images(*sizes: int) -> Tensor:
    return torch.randn(2, 12, *sizes, dtype=DOUBLE)


@pytest.mark.parametrize("planned", [False, True])
def test_replicas_of_data_parallel(planned: bool) -> None:
    layer, x = from_conv(nn.Conv2d(12, 5, 3, padding=1).double()), images(4, 5)
    if planned:
        layer.plan((4, 5))
    modules: Any = {"": layer, "encoding": layer.encoding}
    replicas = {name: module._replicate_for_data_parallel() for name, module in modules.items()}
    for name, module in modules.items():  # as `torch.nn.parallel.replicate` does
        for key, parameter in module.named_parameters(recurse=False):
            setattr(replicas[name], key, parameter * 1)
    replicas[""]._modules["encoding"] = replicas["encoding"]
    out = replicas[""](x)
    torch.testing.assert_close(out, layer(x), **tolerance(DOUBLE))
    out.sum().backward()
    assert layer.weight is not None
    assert layer.weight.grad is not None


@every_encoding
@every_border
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_backend_is_the_softmax_of_the_terms(name: str, border: Border, dims: int) -> None:
    layer = LAYERS[dims](12, 5, 3, encoding=name, stride=2, padding=1, border=border, dtype=DOUBLE)
    x = images(*(5, 4, 3)[:dims])
    grid = layer.grid(x.shape[2:])
    scores = torch.stack(torch.broadcast_tensors(*layer.score_terms(x).values())).sum(0)
    assert layer.weight is not None
    assert layer.bias is not None
    expected = Dense.from_scores(grid, scores).contract(x.movedim(1, -1), layer.weight) + layer.bias
    for backend in ("auto", "reference", "dense", "structured"):
        layer.backend = backend
        torch.testing.assert_close(layer(x), expected.movedim(-1, 1), **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("quadratic", Kronecker),
        ("quadratic-generalized", Toeplitz),
        ("learned", Kronecker),
        ("learned-content", Content),
        ("sinusoidal", Content),
        ("absolute-sinusoidal", Content),
        ("absolute-learned", Content),
    ],
)
def test_encodings_give_the_operator_that_fits_them(name: str, kind: type) -> None:
    assert isinstance(layer2d(name, backend="structured").operator(images(4, 3)), kind)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": (2, 3)}, {"head_channels": 3}, {"bias": False}])
def test_any_image_size_passes(options: dict[str, Any]) -> None:
    layer = layer2d(**options)
    for sizes in ((1, 1), (1, 7), (8, 8), (5, 12)):
        out = layer(images(*sizes))
        assert out.shape == (2, 5, *(-(-size // step) for size, step in zip(sizes, layer.stride, strict=True)))


def test_channels_last_passes_without_a_copy() -> None:
    x = images(4, 6).to(memory_format=torch.channels_last)
    assert x.movedim(1, -1).is_contiguous()
    assert layer2d()(x).movedim(1, -1).is_contiguous()


def test_factored_weights_are_the_product_of_merged_ones() -> None:
    factored, merged, x = layer2d(head_channels=4), layer2d(), images(4, 3)
    assert factored.value_weight is not None
    assert factored.output_weight is not None
    assert merged.weight is not None
    assert factored.bias is not None
    merged.load_state_dict(
        {
            "weight": factored.value_weight @ factored.output_weight,
            "bias": factored.bias,
            "encoding.centres": factored.encoding.get_parameter("centres"),
            "encoding.spread": factored.encoding.get_parameter("spread"),
        }
    )
    torch.testing.assert_close(factored(x), merged(x), **tolerance(DOUBLE, scale=10))


def test_dilation_spaces_the_centres_that_heads_start_from() -> None:
    for name in ("quadratic", "quadratic-generalized"):
        torch.manual_seed(0)
        plain = SelfAttention2d(2, 2, 5, encoding=name).encoding.get_parameter("centres")
        torch.manual_seed(0)
        dilated = SelfAttention2d(2, 2, 5, encoding=name, dilation=(2, 3)).encoding.get_parameter("centres")
        torch.testing.assert_close(dilated, plain * torch.tensor([2.0, 3.0]))


def test_groups_see_their_own_channels_only() -> None:
    layer = SelfAttention2d(12, 6, 3, groups=3, dtype=DOUBLE)
    x = images(4, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 2:4].sum(), x)  # the second group's outputs
    assert gradient[:, 4:8].abs().sum() > 0
    assert gradient[:, :4].abs().sum() == gradient[:, 8:].abs().sum() == 0


def test_attention_dropout_acts_in_training_only() -> None:
    layer, x = layer2d(attention_dropout=0.5), images(4, 4)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x))
    assert SelfAttention2d(12, 5, 3).attention_dropout == 0.0


# Symmetries.


def test_without_positions_the_layer_is_permutation_equivariant() -> None:
    encoding = Relative(12, 3, 1, terms=("content-content", "position-content"))
    layer = SelfAttention1d(12, 5, 3, encoding=encoding, dtype=DOUBLE)
    x, order = images(9), torch.randperm(9)
    torch.testing.assert_close(layer(x)[..., order], layer(x[..., order]), **tolerance(DOUBLE, scale=10))


@every_encoding
def test_relative_encodings_are_translation_equivariant_and_absolute_ones_are_not(name: str) -> None:
    """In a patch away from the border, attention moves with the image."""
    layer, x = layer2d(name), images(6, 6)
    here = _patch_attention(layer, x, 0, 0)
    there = _patch_attention(layer, x.roll((2, 1), (2, 3)), 2, 1)
    if name.startswith("absolute"):
        assert not torch.allclose(here, there, atol=1e-6)
    else:
        torch.testing.assert_close(here, there, **tolerance(DOUBLE, scale=10))


def _patch_attention(layer: SelfAttention2d, x: Tensor, down: int, right: int) -> Tensor:
    """Return the softmax of the scores within a 3 x 4 patch that starts at (down, right)."""
    scores = torch.stack(torch.broadcast_tensors(*layer.score_terms(x).values())).sum(0)
    places = ((torch.arange(3) + down)[:, None] * x.shape[3] + torch.arange(4) + right).flatten()
    return scores[:, :, places][..., places].softmax(-1)


# PyTorch tools.


@every_encoding
def test_double_backward(name: str) -> None:
    layer, x = layer2d(name, heads=2), images(2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@every_encoding
def test_vmap_over_images_and_over_parameters(name: str) -> None:
    layer, many = layer2d(name), torch.randn(3, 2, 12, 4, 3, dtype=DOUBLE)
    torch.testing.assert_close(torch.func.vmap(layer)(many), torch.stack([layer(x) for x in many]))
    ensemble = {name: torch.stack([value, 1.1 * value]) for name, value in layer.named_parameters()}
    out = torch.func.vmap(lambda values: torch.func.functional_call(layer, values, (many[0],)))(ensemble)
    torch.testing.assert_close(out[0], layer(many[0]))


@every_encoding
def test_deepcopy_and_state_dicts(name: str) -> None:
    layer, other, x = layer2d(name), layer2d(name), images(4, 3)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x))


@every_encoding
def test_bf16_autocast_keeps_scores_in_float32(name: str) -> None:
    # So few positions that W_qry and W_key are not multiplied first.
    layer, x = SelfAttention2d(12, 5, 3, encoding=name), torch.randn(1, 12, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, rows = layer(x), layer.operator(x).to_dense()
    assert out.dtype == torch.bfloat16
    assert rows.dtype == torch.float32
    torch.testing.assert_close(out.float(), layer(x), rtol=5e-2, atol=5e-2)
    with torch.autocast("cpu", torch.bfloat16):
        terms = layer.score_terms(x)
        layer.backend = "reference"
        reference = layer.operator(x).to_dense()
    assert {term.dtype for term in terms.values()} == {torch.float32}
    # The terms of absolute encodings project content and position separately, each rounded to bf16.
    accuracy = {"rtol": 5e-2, "atol": 1e-2} if name.startswith("absolute") else tolerance(torch.float32)
    torch.testing.assert_close(reference, rows, **accuracy)


def test_one_image_passes_without_a_batch() -> None:
    layer, x = layer2d("learned-content"), images(4, 3)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    torch.testing.assert_close(layer.operator(x[0]).to_dense(), layer.operator(x[:1]).to_dense())
    torch.testing.assert_close(layer.score_terms(x[0])["content-content"], layer.score_terms(x[:1])["content-content"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_layer_in_one_dtype(dtype: torch.dtype) -> None:
    for name in ENCODING_NAMES:
        layer = SelfAttention2d(12, 5, 3, encoding=name, dtype=dtype)
        out = layer(torch.randn(2, 12, 4, 3, dtype=dtype))
        assert out.dtype == dtype
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("alpha", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("centre", [0.0, 0.5, 1e3, -1e8])
@every_border
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_heads_stay_finite(alpha: float, centre: float, border: Border, dtype: torch.dtype) -> None:
    for name in ("quadratic", "quadratic-generalized"):
        layer = SelfAttention2d(2, 2, 2, encoding=name, border=border, padding=1, dtype=dtype)
        with torch.no_grad():
            layer.encoding.get_parameter("centres").fill_(centre)
            if name == "quadratic":
                layer.encoding.get_parameter("spread").fill_((2 * alpha) ** 0.5)
            else:
                layer.encoding.get_parameter("root_precision").copy_((2 * alpha) ** 0.5 * torch.eye(2))
        x = torch.randn(1, 2, 4, 3, dtype=dtype, requires_grad=True)
        out = layer(x)
        out.square().sum().backward()
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(p.grad).all() for p in [x, *layer.parameters()] if p.grad is not None)


# Plans.


def test_plan_freezes_hard_heads_as_shifts_with_zero_gradients() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    layer, x = from_conv(conv), torch.randn(2, 3, 5, 6)
    assert layer.plan((5, 6)) == "shift"
    assert isinstance(layer.operator(x), Shift)
    layer(x).square().sum().backward()
    assert layer.encoding.get_parameter("centres").grad is None  # frozen: no gradient or weight decay
    layer.encoding.requires_grad_(True)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.abs().sum() == 0) == name.startswith("encoding")
    torch.testing.assert_close(layer(x), conv(x), **tolerance(torch.float32))


def test_plan_looks_at_the_size_and_loading_discards_it() -> None:
    layer = SelfAttention2d(2, 2, 3)
    assert layer.plan((8, 8)) == "dense"
    assert isinstance(layer.operator(torch.zeros(1, 2, 64, 64)), Dense)
    assert layer.plan((64, 64)) == "structured"
    assert isinstance(layer.operator(torch.zeros(1, 2, 4, 4)), Kronecker)
    layer.load_state_dict(layer.state_dict())
    assert isinstance(layer.operator(torch.zeros(1, 2, 4, 4)), Dense)


@pytest.mark.parametrize("backend", ["auto", "reference", "dense", "structured"])
def test_a_plan_overrides_the_backend(backend: Backend) -> None:
    layer, x = SelfAttention2d(2, 2, 3, backend=backend), torch.zeros(1, 2, 4, 4)
    layer.plan((4, 4), choose="structured")
    assert isinstance(layer.operator(x), Kronecker)
    layer.plan((4, 4), choose="dense")
    assert isinstance(layer.operator(x), Dense)


def test_planned_shifts_follow_the_parameters() -> None:
    layer, x = from_conv(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(1, 2, 6, 7)

    def check(layer: SelfAttention, kind: type) -> None:
        assert isinstance(layer.operator(x), kind)
        reference = copy.deepcopy(layer)
        reference.unplan()
        torch.testing.assert_close(layer(x), reference(x), **tolerance(torch.float32))

    layer.plan((6, 7))
    before = copy.deepcopy(layer)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        layer.encoding.get_parameter("centres").add_(1.0)
    check(copy.deepcopy(layer), Shift)
    check(layer, Shift)
    layer.load_state_dict(state)
    check(layer, Shift)
    assert torch.equal(layer(x), before(x))
    with torch.no_grad():
        layer.encoding.get_parameter("spread").fill_(1.0)
    check(layer, AttentionOperator)
    assert not isinstance(layer.operator(x), Shift)
    renewed = copy.deepcopy(before)
    renewed.encoding.get_parameter("centres").data.add_(1.0)  # leaves the version of the tensor unchanged
    check(renewed, Shift)
    soft = layer.state_dict()
    before.load_state_dict(soft)
    assert not isinstance(before.operator(x), Shift)


class Fixed(SeparableEncoding):
    """Heads that attend to fixed shifts."""

    centres: Tensor

    def __init__(self, *shifts: tuple[int, int]) -> None:
        super().__init__(len(shifts), 2)
        self.register_buffer("centres", torch.tensor(shifts))

    def axis_scores(self, axis: int, shifts: Tensor) -> Tensor:
        return -100.0 * (shifts - self.centres[:, axis, None, None]).square()

    def hard_shifts(self) -> tuple[tuple[int, ...], ...]:
        return tuple((int(row), int(column)) for row, column in self.centres)


def test_planned_shifts_follow_buffers() -> None:
    planned, other = (SelfAttention2d(2, 3, 1, encoding=Fixed(shift)) for shift in ((0, 1), (-1, 0)))
    assert planned.plan((6, 7)) == "shift"
    planned.load_state_dict(other.state_dict())
    x = torch.randn(1, 2, 6, 7)
    assert isinstance(planned.operator(x), Shift)
    torch.testing.assert_close(planned(x), other(x), **tolerance(torch.float32))


def test_heads_that_are_soft_in_float32_are_no_shifts_then() -> None:
    layer, x = from_conv(nn.Conv2d(2, 3, 3, padding=1).half(), alpha=9.0), torch.randn(1, 2, 6, 7)
    assert layer.plan((6, 7)) == "shift"
    out = layer.float()(x)
    assert layer.hard_shifts() is None
    torch.testing.assert_close(out, copy.deepcopy(layer)(x), **tolerance(torch.float32))


@pytest.mark.parametrize("border", ["zero", "renormalise", "replicate"])
@pytest.mark.parametrize(
    ("sizes", "padding", "centres"),
    [
        ((4, 4), 1, [(0.0, 6.0)]),
        ((4, 4), 2, [(0.0, -6.0)]),
        ((1, 1), 1, [(0.0, 3.0)]),
        ((8, 8), 1, [(0.0, 0.0), (0.0, 3000.0)]),
        ((4, 4), 0, [(0.0, 0.0), (1e10, 0.0)]),
        ((4, 4), 1, [(1e20, -1e20)]),
    ],
)
def test_planned_shifts_look_as_far_as_the_softmax(
    border: Border, sizes: tuple[int, int], padding: int, centres: list[tuple[float, float]]
) -> None:
    layer = SelfAttention2d(2, 3, len(centres), border=border, padding=padding, dtype=torch.float64)
    with torch.no_grad():
        layer.encoding.get_parameter("centres").copy_(torch.tensor(centres))
        layer.encoding.get_parameter("spread").fill_(12.1)
    x = torch.randn(1, 2, *sizes, dtype=torch.float64)
    attended = layer(x)
    assert layer.plan(sizes) == "shift"
    torch.testing.assert_close(layer(x), attended, **tolerance(torch.float64))


@pytest.mark.usefixtures("unhooked")
def test_plan_refuses_choices_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"choose: .*got 'fast'"):
        layer2d().plan((4, 4), choose="fast")  # type: ignore[arg-type]


def test_plan_refuses_shifts_for_soft_heads() -> None:
    with pytest.raises(ValueError, match=r"choose: .*got soft heads"):
        SelfAttention2d(2, 2, 3).plan((4, 4), choose="shift")


@pytest.mark.parametrize("dims", [1, 2, 3])
@every_encoding
def test_names_serve_photographs_wherever_the_image_does_not_forbid_it(name: str, dims: int) -> None:
    if name == "absolute-sinusoidal":
        with pytest.raises(ValueError, match=r"in_channels: .*got 3"):
            LAYERS[dims](3, 3, 2, encoding=name)
        return
    x = torch.randn(1, 3, *(4, 3, 2)[:dims])
    assert LAYERS[dims](3, 3, 2, encoding=name)(x).shape == x.shape


def test_representation_names_what_matters() -> None:
    text = repr(layer2d(stride=2, padding=1, border="zero", head_channels=3))
    assert "heads=3, stride=(2, 2), border=zero, padding=((1, 1), (1, 1)), head_channels=3" in text


@every_encoding
def test_shapes_without_memory(name: str) -> None:
    """On meta and fake tensors, a layer returns shapes, so models of any size can be analysed."""
    layer = SelfAttention2d(12, 5, 3, encoding=name, device="meta")
    assert layer(torch.empty(2, 12, 6, 7, device="meta")).shape == (2, 5, 6, 7)
    with FakeTensorMode():
        assert SelfAttention2d(12, 5, 3, encoding=name)(torch.empty(2, 12, 6, 7)).shape == (2, 5, 6, 7)
    with torch.device("meta"):
        layer = SelfAttention2d(12, 5, 3, encoding=name, device="cpu")
    assert layer(torch.zeros(2, 12, 6, 7, device="cpu")).shape == (2, 5, 6, 7)
