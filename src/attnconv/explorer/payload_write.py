"""The payload of the page: one safetensors file with what a model's heads do, and on which images.

`docs/explorer.md` describes the file. It is written twice in two languages, here and in `web/`, and fixtures hold the
two readers to the same numbers.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, UInt8
from safetensors.torch import save
from torch import Tensor, nn

import attnconv
from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.explorer.payload_layers import LayerTensors, gaussian_tensors, layer_tensors
from attnconv.explorer.payload_read import FORMAT
from attnconv.explorer.training_history import Moment
from attnconv.inspect.auditing import LayerAudit, audit
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.kernel_expressibility import KERNEL
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.conv_taps import is_convolution

BUDGET = 3_500_000  # bytes for each image: below 5 MB in base64, with the picture
NOW = "now"
GREY = 128  # of pictures that stand for none
_SIDE = 32  # pixels of the noise on which positions are looked at


@final
@dataclass(frozen=True, eq=False)
class Pictures:
    """Images as they are shown.

    Attributes:
        pixels: Bytes, channels last.
        names: One for each image, or none.
    """

    pixels: UInt8[Tensor, "n height width 3"]
    names: tuple[str, ...] = ()

    @staticmethod
    def none() -> "Pictures":
        """No picture, for models that look at positions alone."""
        return Pictures(torch.zeros(0, 1, 1, 3, dtype=torch.uint8))


def payload(
    model: nn.Module,
    images: Tensor | None = None,
    *,
    title: str = "",
    pictures: Pictures | None = None,
    moments: Sequence[Moment] = (),
    layers: Collection[str] | None = None,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    budget: int = BUDGET,
) -> bytes:
    """What the page shows of a model, as the bytes of a safetensors file.

    Layers of this library are stored by what makes their scores, if that fits in the budget or can be shortened to fit
    with scores right to 0.01. Of other layers, and of all other attention that `visit_attention` reads, the rows
    themselves are stored, of as many queries as fit in the budget: of all, or of an even lattice of them. The layer's
    statistic `queries stored` says how many.

    Args:
        model: Any module with attention. It runs in evaluation mode and without gradients.
        images: What its forward pass takes, (b, c, height, width), all different pixels; None for a model that looks at
            positions alone.
        title: Heading of the page; empty for the model's class.
        pictures: The images as shown; None makes them from `images`, each from its least to its greatest value.
        moments: Moments of the training before the present one, as `moments_of` gives them.
        layers: Names of the modules to show; None for all.
        grid: Tokens of the image, (height, width), for models that do not say it.
        prefix: Class tokens and registers before the image's tokens, for models that do not say it.
        budget: Bytes per image, at least 1, that all layers together may take for content and for rows; each layer has
            an equal part, and at least one row. Pictures and tables of positions come on top.

    Returns:
        The file.

    Raises:
        ValueError: An attention cannot be read or shown; images are missing, blank or not what the model takes; or
            pictures do not fit the images.
        TypeError: `images` is no tensor of a floating dtype, or `budget` no whole number.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import read_payload
        >>> found = read_payload(payload(SelfAttention2d(3, 4, heads=9), torch.rand(1, 3, 6, 8)))
        >>> [(layer.kind, layer.heads, layer.sizes) for layer in found.layers]
        [('positions', 9, (6, 8))]
    """
    budget = whole("budget", budget, 1)
    reading: dict[str, Any] = {"layers": layers, "grid": grid, "prefix": prefix}
    shown = images
    if images is None:
        images, pictures = _noise(model), Pictures.none()
    found = {layer.name: layer for layer in audit(model, images, **reading).layers}
    each = max(1, budget // len(found))
    parts: dict[str, LayerTensors] = {}

    def look(name: str, operator: AttentionOperator) -> None:
        calls = 1 + sum(key == name or key.startswith(f"{name} (call ") for key in parts)
        key = name if calls == 1 else f"{name} (call {calls})"
        module = model.get_submodule(name)
        parts[key] = layer_tensors(key or type(module).__name__, module, operator, budget=each)

    visit_attention(model, images, look, **reading)
    if shown is None and (content := [name for name, layer in found.items() if not layer.position_only]):
        requirement = "must be given, since attention depends on what they show"
        raise ValueError(bad("images", requirement, f"none for {', '.join(content[:3])}"))
    pictures = _with_place(_checked(pictures, images), parts.values(), images)
    named = {name or next(iter(found)): part for name, part in parts.items()}
    manifest = {
        "format": FORMAT,
        "title": title or type(model).__name__,
        "library": attnconv.__version__,
        "patch": _patch(images, list(named.values())),
        "images": [{"name": name} for name in pictures.names],
        "times": [*(moment.name for moment in moments), NOW],
        "layers": [_entry(name, part, found[name]) for name, part in named.items()],
    }
    tensors = {"images": pictures.pixels.contiguous()}
    for index, (name, part) in enumerate(named.items()):
        if part.kind == "positions":
            stacked = _over_time(name, part, moments)
        else:
            stacked = _over_images(part, len(pictures.pixels))
        tensors |= {f"{index}.{key}": tensor for key, tensor in stacked.items()}
    return save(tensors, {"attnconv": json.dumps(manifest, allow_nan=False)})


def _over_time(name: str, part: LayerTensors, moments: Sequence[Moment]) -> dict[str, Tensor]:
    """Tensors of positions with an axis of time; a layer without a past is the same at all moments."""
    past = []
    for moment in moments:
        shapes = moment.layers.get(name)
        same = shapes is not None and len(shapes.centres) == part.heads and "centres" in part.tensors
        past.append(gaussian_tensors(shapes.centres, shapes.precision, part.sizes) if shapes and same else part.tensors)
    return {key: torch.stack([*(then[key] for then in past), tensor]) for key, tensor in part.tensors.items()}


def _over_images(part: LayerTensors, count: int) -> dict[str, Tensor]:
    """Tensors of one image each; where all images share their attention, it is repeated."""
    shared = {name: tensor for name, tensor in part.tensors.items() if name != "queries" and len(tensor) == 1}
    repeated = {name: tensor.expand(count, *tensor.shape[1:]).contiguous() for name, tensor in shared.items()}
    return {**part.tensors, **repeated}


def _entry(name: str, part: LayerTensors, found: LayerAudit) -> dict[str, Any]:
    heads, layer = statistics_of(found)
    if part.rounding is not None:
        layer["rounding of scores"] = part.rounding
    if part.kind == "rows":
        layer["queries stored"] = len(part.tensors["queries"])
    return {
        "name": name,
        "kind": part.kind,
        "heads": part.heads,
        "sizes": list(part.sizes),
        "prefix": part.prefix,
        "border": part.border,
        "encoding": part.encoding,
        "dilated": False,
        **({} if part.window is None else {"window": list(part.window)}),
        "statistics": {"heads": heads, "layer": layer},
    }


def statistics_of(found: LayerAudit) -> tuple[dict[str, list[float | None]], dict[str, float | None]]:
    """The numbers of an audit under the names of its columns, per head and for the layer; null where there is none."""
    numbers = found.numbers()
    count = len(numbers["entropy"])

    def heads(key: str, axis: int | None = None) -> list[float | None]:
        values = numbers[key]
        if values is None:
            return [None] * count
        chosen = values if axis is None else [value[axis] for value in values]
        return [None if value is None else float(value) for value in chosen]

    def mean(key: str) -> float | None:
        known = [value for value in heads(key) if value is not None]
        return sum(known) / len(known) if known else None

    by_head: dict[str, list[float | None]] = {
        "best row": heads("best_shift", 0),
        "best column": heads("best_shift", -1),
        "mass": heads("shift_mass"),
        "constancy": heads("constancy"),
        "entropy": heads("entropy"),
        "distance": heads("distance"),
        "mass elsewhere": heads("padding_mass"),
        "content share": [0.0] * count if found.position_only else heads("content_share"),
        "gaussian overlap": heads("gaussian_overlap"),
    }
    if len(found.sizes) == 1:
        by_head["best row"] = [0.0] * count
    of_layer = {
        "score": numbers["convolution_score"],
        "constancy": mean("constancy"),
        "coverage": numbers["coverage"],
        "tap residual": numbers["tap_residual"],
        "redundancy": numbers["redundancy"],
        "receptive field": numbers["receptive_field"],
        "content share": 0.0 if found.position_only else mean("content_share"),
        f"{KERNEL} x {KERNEL} missed": numbers["span_residual"],
    }
    return by_head, of_layer


def _noise(model: nn.Module) -> Tensor:
    """Two images for a model that does not look at them, with as many axes as its first layer takes."""
    known = (module for module in model.modules() if is_convolution(module) or isinstance(module, SelfAttention))
    first = next(known, None)
    if first is None:
        requirement = "must be given for a model without a convolution or an attention layer of this library"
        raise ValueError(bad("images", requirement, f"none for {type(model).__name__}"))
    dims = first.dims if isinstance(first, SelfAttention) else len(first.kernel_size)
    if dims > 2:  # which the page does not show, and whose noise would have very many tokens
        requirement = "must be given for a model whose first layer takes more than two axes"
        raise ValueError(bad("images", requirement, f"none for {dims} axes"))
    channels = getattr(model, "image_channels", first.in_channels)
    some = next(model.parameters())
    side = math.lcm(_SIDE, getattr(model, "downsampling", 1))
    noise = torch.randn(2, int(channels), *[side] * dims, generator=torch.Generator().manual_seed(0))
    return noise.to(some.device, some.dtype)


def _checked(pictures: Pictures | None, images: Tensor) -> Pictures:
    """Pictures with a name each, one for each image or none at all."""
    if pictures is None:
        pictures = Pictures(pictures_of(images))
    count = len(pictures.pixels)
    if count not in (0, len(images)):
        raise ValueError(bad("pictures", f"must be one for each of {len(images)} images, or none", count))
    if pictures.names and len(pictures.names) != count:
        raise ValueError(bad("pictures", f"must have {count} names, or none", repr(pictures.names)))
    return Pictures(pictures.pixels, pictures.names or tuple(f"image {index + 1}" for index in range(count)))


def _with_place(pictures: Pictures, parts: Iterable[LayerTensors], images: Tensor) -> Pictures:
    """Grey pictures where there are none and some layer is stored image by image: its numbers belong to a picture."""
    stored = [
        len(tensor) for part in parts for name, tensor in part.tensors.items() if name in ("query", "prefix_mass")
    ]
    if len(pictures.pixels) > 0 or not stored:
        return pictures
    count = max(stored)
    height, width = (1, *images.shape[2:])[-2:]
    names = ("no image",) if count == 1 else tuple(f"image {index + 1}" for index in range(count))
    return Pictures(torch.full((count, height, width, 3), GREY, dtype=torch.uint8), names)


def pictures_of(images: Float[Tensor, "*images"]) -> UInt8[Tensor, "n height width 3"]:
    """Images as bytes to look at: each from its least to its greatest value, its first three channels, or one as grey.

    Raises:
        ValueError: These are no images.
    """
    if images.dim() != 4:
        got = f"shape {tuple(images.shape)}"
        raise ValueError(bad("pictures", "must be given for inputs that are not (b, c, height, width)", got))
    chosen = images.detach().float().cpu()[:, : 3 if images.shape[1] >= 3 else 1]
    least, greatest = chosen.amin((1, 2, 3), keepdim=True), chosen.amax((1, 2, 3), keepdim=True)
    span = (greatest - least).clamp_min(torch.finfo(torch.float32).tiny)
    return ((chosen - least) / span * 255).round().byte().expand(-1, 3, -1, -1).movedim(1, -1).contiguous()


def _patch(images: Tensor, parts: Sequence[LayerTensors]) -> list[int] | None:
    """Pixels of a token, where all layers agree on a whole number of them."""
    sides = {part.sizes for part in parts}
    if images.dim() != 4 or len(sides) != 1:
        return None
    (sizes,) = sides
    if any(pixels % tokens for pixels, tokens in zip(images.shape[2:], sizes, strict=True)):
        return None
    return [pixels // tokens for pixels, tokens in zip(images.shape[2:], sizes, strict=True)]
