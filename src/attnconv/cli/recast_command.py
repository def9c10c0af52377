"""`attnconv recast MODEL`: a network whose convolutions are attention, written to a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attnconv._util.errors import bad
from attnconv.cli.image_inputs import ImageOptions, Subject, example_images
from attnconv.cli.output import print_comparison, require_new
from attnconv.cli.parsing import Positional

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Arguments(ImageOptions):
    """Replace every convolution of a network by multi-head self-attention that computes the same.

    Compares the two networks layer by layer, and writes the result.

    Examples:
        attnconv recast resnet18 --out resnet18-attention.safetensors
        attnconv recast torchvision:resnet50 --pretrained --data PATH/TO/PICTURES
        attnconv recast runs/resnet-small --alpha 4 --weights nearest --only 'layer1.*' --out soft.safetensors
        attnconv recast my_package.models:network --size 64 --onnx network.onnx

    Attributes:
        model: The network, in any form that `attnconv.load` knows.
        size: Height and width of the images in pixels, N or HxW; None for the model's own, or 224.
        out: New weights file (.safetensors), which `attnconv.load` and every command that takes a model read.
        export: Also write a program of torch.export (.pt2, a new file), which PyTorch runs without this library.
        onnx: Also write an ONNX file, a new one; needs the packages onnx and onnxscript.
        alpha: How hard the heads are; None for hard ones, which equal the convolutions.
        weights: Of soft heads: the kernels' slices, or those with which they come nearest to the kernels (to train on).
        only: Patterns for the names of the layers to replace, or behind a ! to leave out; none for all.
    """

    model: Positional[str]
    out: Path | None = None
    export: Path | None = None
    onnx: Path | None = None
    alpha: float | None = None
    weights: Literal["slices", "nearest"] = "slices"
    only: tuple[str, ...] = ()


def run(arguments: Arguments) -> None:
    """Recast, compare, write."""
    from attnconv.convert import compare, recast
    from attnconv.models.checkpoint import About, save_recast

    if arguments.out is not None and arguments.out.suffix != ".safetensors":
        raise ValueError(bad("--out", "must end in .safetensors", str(arguments.out)))
    for flag, path in (("--out", arguments.out), ("--export", arguments.export), ("--onnx", arguments.onnx)):
        require_new(flag, path)
    subject = Subject.load(arguments.model, arguments, resized=False)  # the file names the model, not its size
    loaded, images = subject.loaded, example_images(subject, arguments)
    only = arguments.only or None
    twin = recast(loaded.model, alpha=arguments.alpha, weights=arguments.weights, only=only)
    found = compare(loaded.model, twin, images)
    print_comparison(found, f"{loaded.source}, recast, on images {tuple(images.shape)}")
    if arguments.out is not None:
        origin = arguments.model if loaded.settings is None else loaded.settings
        about = About(loaded.classes, loaded.mean, loaded.std)
        save_recast(arguments.out, twin, origin, about=about, alpha=arguments.alpha, only=only)
        print(f"Weights: {arguments.out}")
    _export(arguments, twin, images)


def _export(arguments: Arguments, model: "nn.Module", images: "Tensor") -> None:
    """Write the programs that run elsewhere, with any number of images."""
    import torch

    from attnconv.layers import SelfAttention

    for path in (arguments.export, arguments.onnx):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    for layer in model.modules():  # a program's file wants plain order in memory
        if isinstance(layer, SelfAttention) and layer.weight is not None:
            layer.weight.data = layer.weight.data.contiguous()
    dynamic = ({0: torch.export.Dim("images", min=1, max=4096)},)
    twice = torch.cat((images[:1], images[:1]))  # an example of one image would fix their number
    if arguments.export is not None:
        exported = torch.export.export(model, (twice,), dynamic_shapes=dynamic, strict=False)
        torch.export.save(exported, arguments.export)
        print(f"Program: {arguments.export}")
    if arguments.onnx is not None:
        program = torch.onnx.export(model, (twice,), dynamo=True, verbose=False, dynamic_shapes=dynamic)
        assert program is not None
        program.save(arguments.onnx)
        print(f"ONNX: {arguments.onnx}")
