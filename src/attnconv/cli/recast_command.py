"""`attnconv recast MODEL`: replace the convolutions of a network with attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attnconv._util.errors import bad
from attnconv._util.settings import Positive
from attnconv.cli.image_inputs import ImageOptions, Subject, example_images
from attnconv.cli.output import print_comparison
from attnconv.cli.parsing import Positional

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Arguments(ImageOptions):
    """Replace the convolutions of a network with equivalent multi-head self-attention layers.

    The command compares both networks layer by layer. With --out, --export or --onnx, it writes the new network.

    Examples:
        attnconv recast resnet18 --out resnet18.safetensors
        attnconv recast torchvision:resnet50 --pretrained --data PATH/TO/IMAGES
        attnconv recast runs/resnet-small --alpha 4 --only 'stages.0.*'
        attnconv recast my_package.models:network --image-size 64 --onnx network.onnx

    Attributes:
        model: Preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or
            package.module:function.
        image_size: Image height and width in pixels: HxW, or N for both. The default is the model's image size, or 224
            if it is unknown.
        out: New weights file (.safetensors), which the other commands and `attnconv.load` can read.
        export: Program (.pt2) to write with torch.export; it must not exist yet. PyTorch can run it without attnconv.
        onnx: ONNX file to write; it must not exist yet. Requires the packages onnx and onnxscript.
        alpha: Sharpness of the heads, in 1 / position^2. By default, heads are hard: each query attends to one key.
        weights: Weights of the heads if --alpha is given: the best approximation of the convolution (nearest), or
            slices of its kernel (slices).
        only: Glob patterns for the names of the layers to replace; patterns that start with "!" exclude layers. The
            default is all convolutions.
    """

    model: Positional[str]
    out: Path | None = None
    export: Path | None = None
    onnx: Path | None = None
    alpha: Positive | None = None
    weights: Literal["slices", "nearest"] = "slices"
    only: tuple[str, ...] = ()


def run(arguments: Arguments) -> None:
    """Recast the network, compare it with the original, and write it."""
    from attnconv.convert import compare, recast
    from attnconv.models.checkpoint import About, save_recast
    from attnconv.training.progress_bars import working

    files = (("--out", arguments.out, ".safetensors"), ("--export", arguments.export, ".pt2"))
    for flag, path, suffix in (*files, ("--onnx", arguments.onnx, ".onnx")):
        if path is not None and path.suffix != suffix:
            raise ValueError(bad(flag, f"must end in {suffix}", str(path)))
        if path is not None and (path.exists() or path.is_symlink()):
            fix = "Remove it, or pass a different file."
            raise ValueError(bad(flag, "must be a new file", f"{path}, which exists", fix))
    subject = Subject.load(arguments.model, arguments, resized=False)  # a weights file does not store an image size
    loaded, images = subject.loaded, example_images(subject, arguments)
    only = arguments.only or None
    with working(f"Recasting {arguments.model}"):
        twin = recast(loaded.model, alpha=arguments.alpha, weights=arguments.weights, only=only)
        found = compare(loaded.model, twin, images)
    print_comparison(found, f"{loaded.source}, recast, on images {tuple(images.shape)}")
    if arguments.out is not None:
        origin = arguments.model if loaded.settings is None else loaded.settings
        about = About(loaded.classes, loaded.mean, loaded.std)
        save_recast(arguments.out, twin, origin, about=about, alpha=arguments.alpha, only=only)
        if not loaded.source.startswith("function "):  # not called by `load`, whose error explains what to do
            _check_file(arguments.out, twin, images)
        print(f"Weights: {arguments.out}")
    _export(arguments, twin, images)


def _check_file(path: Path, twin: "nn.Module", images: "Tensor") -> None:
    """Delete a file from which `load` does not rebuild the network, and raise an error."""
    import torch
    from torch.utils._pytree import tree_leaves

    from attnconv.models import load

    model = None
    try:
        model = load(path).model
        with torch.inference_mode():
            for wanted, made in zip(*(tree_leaves(each(images)) for each in (twin, model)), strict=True):
                scale = float(wanted.abs().max())
                torch.testing.assert_close(made, wanted, rtol=0, atol=1e-3 * scale, equal_nan=True)
    except (AssertionError, ValueError) as error:
        path.unlink()
        requirement = "must be omitted for a network that cannot be rebuilt from its name and weights"
        got = "a recast network" if model is None else "different outputs of the rebuilt network"
        fix = "Recast the original network, or pass --export instead."
        raise ValueError(bad("--out", requirement, got, fix)) from error


def _export(arguments: Arguments, model: "nn.Module", images: "Tensor") -> None:
    import torch

    from attnconv.layers import SelfAttention

    for path in (arguments.export, arguments.onnx):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    for layer in model.modules():  # exported programs store contiguous weights
        if isinstance(layer, SelfAttention) and layer.weight is not None:
            layer.weight.data = layer.weight.data.contiguous()
    dynamic = ({0: torch.export.Dim("images", min=1, max=4096)},)
    twice = torch.cat((images[:1], images[:1]))  # an example with one image would fix the batch size at 1
    if arguments.export is not None:
        exported = torch.export.export(model, (twice,), dynamic_shapes=dynamic, strict=False)
        torch.export.save(exported, arguments.export)
        print(f"Program: {arguments.export}")
    if arguments.onnx is not None:
        program = torch.onnx.export(model, (twice,), dynamo=True, verbose=False, dynamic_shapes=dynamic)
        assert program is not None
        program.save(arguments.onnx)
        print(f"ONNX: {arguments.onnx}")
