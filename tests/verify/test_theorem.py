"""The theorem at full scale: random convolutions, a pretrained network on test images, networks of libraries."""

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.convert import no_convolutions, prove, recast, restore
from attnconv.convert.verify_conversions import ALLOWED, WAYS
from attnconv.data.load_splits import load_data
from attnconv.data.settings import DataSettings
from attnconv.layers import SelfAttention
from experiments.resnet20 import MEAN, STD, pretrained
from tests.networks import UNet, vgg11


def test_drawn_convolutions_equal_attention(verify_scale: float) -> None:
    """2,100 random convolutions in three dtypes with three operators satisfy the theoretical error bound."""
    cases = round(2100 * verify_scale)
    proofs = list(prove(cases))
    for dtype, allowed in ALLOWED.items():
        for way in WAYS:
            chosen = [proof for proof in proofs if proof.dtype == dtype and proof.way == way]
            worst, tightest = max(p.relative for p in chosen), max(p.tightness for p in chosen)
            print(f"{dtype}, {way}: {len(chosen)} convolutions, {worst:.1e} relative, {tightest:.2f} of the bound")
            assert all(proof.hard for proof in chosen)
            assert worst <= allowed
            assert tightest <= 1


def test_the_bound_holds_for_soft_heads(verify_scale: float) -> None:
    proofs = list(prove(round(600 * verify_scale), seed=1, soft=True))
    ratios = [proof.tightness for proof in proofs]
    print(f"{len(ratios)} soft layers reach {statistics.median(ratios):.2f} of their bound, {max(ratios):.2f} at most")
    assert max(ratios) <= 1


@pytest.fixture(scope="module")
def resnet20(request: pytest.FixtureRequest) -> nn.Module:
    shared: Path = request.getfixturevalue("shared_data")
    return pretrained(shared / "pretrained" / "resnet20-cifar10.th")


@pytest.fixture(scope="module")
def test_images(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Return the 10,000 test images of CIFAR-10 as the pretrained network expects them, and their classes."""
    root = str(request.getfixturevalue("shared_data") / "cifar10")
    data = load_data(DataSettings(name="cifar10", root=root, download=False))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (data.test.images.float() / 255 - mean) / std, data.test.labels


def logits(model: nn.Module, images: Tensor, batch_size: int) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(batch_size)])


@pytest.mark.parametrize(("way", "count"), [("structured", 10_000), ("shift", 10_000), ("reference", 100)])
def test_a_real_network_recast(
    way: str, count: int, resnet20: nn.Module, test_images: tuple[Tensor, Tensor], verify_scale: float
) -> None:
    count = max(round(count * verify_scale), 20)
    images, labels = test_images[0][:count], test_images[1][:count]
    attention = recast(resnet20, fast=way == "shift")
    for layer in attention.modules():
        if isinstance(layer, SelfAttention) and way != "shift":
            layer.backend = way  # type: ignore[assignment]
    expected = logits(resnet20, images, 250)
    if way == "shift":
        found = logits(attention, images, 250)
    else:
        with no_convolutions():
            found = logits(attention, images, 250 if way == "structured" else 10)
    apart, right = float((found - expected).abs().max()), int((found.argmax(1) == labels).sum())
    print(f"ResNet-20 as attention ({way}), {count} images: {right} correct, logits differ by {apart:.1e}")
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert apart <= 1e-4
    if count == 10_000:
        assert right == 9_173
    back = restore(attention).state_dict()
    assert all(torch.equal(value, back[name]) for name, value in resnet20.state_dict().items())


def transformers_model(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="the extra 'models' is not installed")
        config = transformers.AutoConfig.for_model(kind, **options)
        model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
        return model

    return make


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": transformers_model(
        "resnet", layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]
    ),
    "ResNet-50": transformers_model("resnet"),
    "MobileNet v2": transformers_model("mobilenet_v2"),
    "EfficientNet": transformers_model("efficientnet", width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640),
    "ConvNeXt": transformers_model("convnext"),
    "VGG-11": vgg11,
    "U-Net": UNet,
}


@pytest.mark.filterwarnings("default")  # warnings of the libraries
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("sizes", [(224, 224), (157, 203)])
def test_networks_of_every_origin(name: str, sizes: tuple[int, int], verify_scale: float) -> None:
    """Compare logits of the softmax and the fast path, for the usual image size and for odd sizes."""
    if verify_scale < 1:
        sizes = (sizes[0] // 4 + 9, sizes[1] // 4 + 6)
    model = with_lively_weights(NETWORKS[name]())
    x = torch.randn(1, 3, *sizes)
    expected = first_tensor(model, x)
    assert float(expected.std()) > 0
    for fast in (False, True):
        attention = recast(model, fast=fast)
        found = first_tensor(attention, x)
        relative = float((found - expected).abs().max() / expected.abs().max())
        layers = sum(isinstance(layer, SelfAttention) for layer in attention.modules())
        print(f"{name}, {sizes}, {layers} layers, {'shifts' if fast else 'softmax'}: {relative:.1e} relative")
        assert relative <= 1e-4
        del attention


def with_lively_weights(model: nn.Module) -> nn.Module:
    """Set weights that preserve the size of activations, which some libraries' initial weights reduce to almost 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1.5)
    return model.eval()


def first_tensor(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Any = model(x)
    return out if isinstance(out, Tensor) else out.logits


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the extra 'onnx' is not installed: {package}")
    return tmp_path / "network.onnx"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fast", [True, False])
def test_exported_programs_give_the_same_outputs(fast: bool, resnet20: nn.Module, onnx_file: Path) -> None:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    attention, x = recast(resnet20, fast=fast), torch.randn(3, 3, 32, 32)
    if not fast:
        for layer in attention.modules():
            if isinstance(layer, SelfAttention):
                layer.plan((32, 32), choose="structured")
    with torch.no_grad():
        expected = resnet20(x)
    dynamic = ({0: torch.export.Dim("b", min=1, max=64)},)
    program = torch.export.export(attention, (x,), dynamic_shapes=dynamic)
    torch.testing.assert_close(program.module()(x), expected, rtol=1e-4, atol=1e-4)
    exported = torch.onnx.export(attention, (x,), dynamo=True, verbose=False, dynamic_shapes=dynamic)
    assert exported is not None
    exported.save(str(onnx_file))
    session = onnxruntime.InferenceSession(str(onnx_file))
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})[0])
    print(
        f"ResNet-20 as attention ({'shifts' if fast else 'softmax'}) in ONNX: {(found - expected[:2]).abs().max():.1e}"
    )
    torch.testing.assert_close(found, expected[:2], rtol=1e-4, atol=1e-4)
