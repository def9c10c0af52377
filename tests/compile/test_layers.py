"""`torch.compile` without graph breaks or recompilation for each size, and `torch.export` with dynamic sizes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

from attnconv import SelfAttention2d, from_conv, recast
from attnconv.encodings import ENCODING_NAMES
from attnconv.grid import Border
from attnconv.layers import GatedPositionalAttention
from tests.drawn_recasts import dirty_memory
from tests.tolerances import tolerance

every_encoding = pytest.mark.parametrize("name", ENCODING_NAMES)
every_border = pytest.mark.parametrize("border", ["renormalise", "zero", "reflect"])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@every_encoding
@every_border
def test_compiles_whole_and_once_for_all_sizes(name: str, border: Border) -> None:
    layer = SelfAttention2d(12, 5, 3, encoding=name, stride=2, padding=1, border=border)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for sizes in ((6, 5), (8, 7), (9, 11), (12, 4), (13, 17)):
        x = torch.randn(2, 12, *sizes)
        torch.testing.assert_close(compiled(x), layer(x), **tolerance(torch.float32))
    assert counter.frame_count <= 2  # the first size, then dynamic sizes


@every_encoding
@every_border
def test_exports_with_free_sizes(name: str, border: Border) -> None:
    layer = SelfAttention2d(12, 5, 3, encoding=name, stride=2, padding=1, border=border)
    sizes = {0: Dim("b", max=64), 2: Dim("height", min=3, max=512), 3: Dim("width", min=3, max=512)}
    exported = export(layer, (torch.randn(2, 12, 8, 7),), dynamic_shapes={"input": sizes}).module()
    for shape in ((2, 12, 8, 7), (3, 12, 10, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(exported(x), layer(x), **tolerance(torch.float32))


def test_inductor_gives_the_same_values_and_gradients() -> None:
    layer = SelfAttention2d(12, 5, 3)
    compiled, x = torch.compile(layer, fullgraph=True), torch.randn(2, 12, 6, 5)
    for run in (compiled, layer):
        layer.zero_grad()
        out = run(x)
        out.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        if run is compiled:
            expected = (out.detach(), gradients)
    torch.testing.assert_close(out, expected[0], **tolerance(torch.float32))
    torch.testing.assert_close(gradients, expected[1], **tolerance(torch.float32, scale=10))


def test_a_plan_of_shifts_exports_as_a_convolution() -> None:
    conv = torch.nn.Conv2d(3, 4, 3, padding=1)
    layer, x = from_conv(conv), torch.randn(1, 3, 6, 5)
    layer.plan((6, 5))
    program = export(layer, (x,))
    assert any("conv" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), conv(x), **tolerance(torch.float32))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("conv", "backend"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), "inductor"),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), "aot_eager"),
        (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), "aot_eager"),
    ],
)
def test_recast_networks_compile_whole(conv: nn.Module, backend: str, fast: bool) -> None:
    network = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(4, 2, 1))
    compiled = torch.compile(recast(network, fast=fast), fullgraph=True, backend=backend)
    for sizes in ((6, 5), (9, 8), (7, 7)):
        x = torch.randn(2, 3, *sizes)
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-5)


def test_exported_convolutions_of_one_channel_write_narrow_outputs() -> None:
    conv = nn.Conv2d(1, 2, 3, stride=(1, 2), padding=(1, 0), padding_mode="replicate")
    x = torch.randn(2, 8, 3, 1).movedim(-1, 1)
    expected = conv.double()(x.double()).float()
    program = export(recast(conv.float()), (x,))
    dirty_memory()
    torch.testing.assert_close(program.module()(x), expected, **tolerance(torch.float32))


def test_gated_positional_attention_compiles_whole_and_exports_with_free_batches() -> None:
    layer = GatedPositionalAttention(8, 4)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for side in (3, 4):
        x = torch.randn(2, side**2, 8)
        torch.testing.assert_close(compiled(x), layer(x), **tolerance(torch.float32))
    x = torch.randn(2, 9, 8)
    exported = export(layer, (x,), dynamic_shapes={"x": {0: Dim("b", max=64)}}).module()
    x = torch.randn(5, 9, 8)
    torch.testing.assert_close(exported(x), layer(x), **tolerance(torch.float32))


def test_compiles_whole_with_autocast() -> None:
    layer, x = SelfAttention2d(12, 5, 3), torch.randn(2, 12, 6, 5)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x), **tolerance(torch.bfloat16))
