"""What users of PyTorch libraries try first."""

import inspect

import pytest
import torch
from torch import nn

import attnconv
from attnconv import SelfAttention1d, SelfAttention2d, SelfAttention3d, from_conv
from attnconv.encodings import ENCODING_NAMES
from attnconv.layers import GatedPositionalAttention
from attnconv.layers.self_attention import SelfAttention
from attnconv.models import build, list_models, load
from attnconv.training import evaluate, fit
from tests.tolerances import tolerance

LAYERS: dict[int, type[SelfAttention]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}


def test_models_are_listed_and_loaded_with_settings_of_ones_own() -> None:
    assert attnconv.list_models is list_models
    assert "quadratic" in list_models()
    assert list_models("quadratic*digits") == ["quadratic-digits"]
    assert all(load(name).settings is not None for name in list_models("*-digits"))
    assert load("quadratic-small", classes=100).model(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
    assert build("quadratic-small", classes=7)(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(ValueError, match=r"colour: .*got 3"):
        load("quadratic-small", colour=3)
    with pytest.raises(ValueError, match=r"classes: .* got 3"):
        load("package.module:function", classes=3)
    with pytest.raises(ValueError, match=r"classes: .* got 0"):
        load("quadratic-small", classes=0)


def test_functions_are_not_shadowed_by_modules() -> None:
    for function in (fit, evaluate, load, build, attnconv.load):
        assert inspect.isfunction(function)


def test_a_layer_is_known_to_give_a_tensor() -> None:
    """With `Any` as the return type, type checkers would report the last `type: ignore` as unused."""
    for out in (
        SelfAttention2d(3, 4, 2)(torch.zeros(1, 3, 4, 4)),
        GatedPositionalAttention(4, 2)(torch.zeros(1, 4, 4)),
    ):
        with pytest.raises(RuntimeError):
            out.requires_grad = None  # type: ignore[assignment]


@pytest.mark.parametrize("dims", LAYERS)
def test_help_shows_the_arguments(dims: int) -> None:
    text = inspect.getdoc(LAYERS[dims])
    assert text is not None
    assert text.startswith("Multi-head self-attention over ")
    assert all(f"    {name}" in text for name in inspect.signature(LAYERS[dims]).parameters)
    assert "in_channels" in str(inspect.signature(LAYERS[dims]))


def test_operators_say_what_they_are_and_take_lists_of_queries() -> None:
    layer = SelfAttention2d(3, 4, 2, stride=2)
    operator = layer.operator(torch.zeros(5, 3, 4, 6))
    assert repr(operator) == f"{type(operator).__name__}(heads=2, sizes=(4, 6), queries=(2, 3))"
    content = SelfAttention2d(3, 4, 2, encoding="learned-content").operator(torch.zeros(5, 3, 4, 6))
    assert repr(content) == "Content(heads=2, sizes=(4, 6), queries=(4, 6), batch=5)"
    assert torch.equal(operator.rows([0, 5]), operator.rows(torch.tensor([0, 5])))
    assert torch.equal(operator.padding_mass(range(2)), operator.padding_mass(torch.arange(2)))
    with pytest.raises(ValueError, match=r"queries: .*got values from -1 to 0"):
        operator.rows([0, -1])


@pytest.mark.usefixtures("unhooked")  # in a trace, sizes are tensors
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # and become constants
@pytest.mark.parametrize("dims", LAYERS)
@pytest.mark.parametrize("backend", ["auto", "structured", "dense", "reference"])
@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_every_layer_can_be_traced(encoding: str, backend: str, dims: int) -> None:
    size = (16,) * dims if encoding == "absolute-learned" else (5, 6, 4)[:dims]  # the size of its table
    layer = LAYERS[dims](12, 4, 2, encoding=encoding, backend=backend)  # type: ignore[arg-type]
    traced = torch.jit.trace(layer, torch.randn(1, 12, *size))
    x = torch.randn(1, 12, *size)
    torch.testing.assert_close(traced(x), layer(x), **tolerance(torch.float32, scale=10))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_recast_convolution_can_be_traced() -> None:
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    traced = torch.jit.trace(from_conv(conv), torch.randn(2, 3, 7, 8))
    x = torch.randn(2, 3, 7, 8)
    torch.testing.assert_close(traced(x), conv(x), **tolerance(torch.float32, scale=10))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_gated_attention_can_be_traced() -> None:
    layer = GatedPositionalAttention(8, 4)
    x = torch.randn(2, 9, 8)
    traced = torch.jit.trace(layer, torch.randn(2, 9, 8))
    torch.testing.assert_close(traced(x), layer(x), **tolerance(torch.float32, scale=10))
    graph = torch.fx.symbolic_trace(nn.Sequential(layer, nn.Linear(8, 2)))
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1"]


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "layer", [SelfAttention2d(3, 4, 2), GatedPositionalAttention(8, 4)], ids=lambda of: type(of).__name__
)
def test_a_layer_alone_has_no_symbolic_trace(layer: nn.Module) -> None:
    with pytest.raises(TypeError, match=f"root: .*got {type(layer).__name__}"):
        torch.fx.symbolic_trace(layer)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("name", ["quadratic-digits", "resnet-digits"])
def test_features_can_be_taken_by_symbolic_tracing(name: str) -> None:
    model = build(name).eval()
    graph = torch.fx.symbolic_trace(model)
    names = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    assert "head" in names
    if name == "quadratic-digits":
        assert {f"blocks.{index}.attention" for index in range(3)} <= names
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)


def test_padding_without_effect_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="padding .*border='renormalise'"):
        SelfAttention2d(3, 4, 2, padding=1)
