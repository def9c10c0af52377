"""The payload of a model: what its heads do, on which images, and at which moments of its training."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor, nn

import attnconv
from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.explorer.payload_format import Payload, PayloadLayer, Statistics, write_payload
from attnconv.explorer.payload_layers import gaussian_tensors, store_layer
from attnconv.inspect.auditing import KERNEL, LayerAudit, audit
from attnconv.inspect.capture import visit_attention
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.conv_taps import Convolution
from attnconv.training.run_folder import RunFolder, choose_epochs

BUDGET = 3_500_000  # bytes for each image: below 5 MB in base64, with the picture
GREY = 128  # of pictures in place of none
_SIDE = 32  # pixels of the noise for models that look at positions only


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
        """No picture, for models that look at positions only."""
        return Pictures(torch.zeros(0, 1, 1, 3, dtype=torch.uint8))


@final
@dataclass(frozen=True, eq=False)
class HeadShapes:
    """The heads of one layer: score = -1/2 (d - centre)^T precision (d - centre).

    Attributes:
        centres: (row, column) in tokens.
        precision: In 1 / token^2.
    """

    centres: Float64[Tensor, "h 2"]
    precision: Float64[Tensor, "h 2 2"]


@final
@dataclass(frozen=True, eq=False)
class Snapshot:
    """The heads of a model at one moment of its training.

    Attributes:
        name: On the page, such as `epoch 3`.
        layers: The heads of each layer by its name, where they have centres.
    """

    name: str
    layers: Mapping[str, HeadShapes]


def payload(
    model: nn.Module,
    images: Tensor | None = None,
    *,
    title: str = "",
    pictures: Pictures | None = None,
    snapshots: Sequence[Snapshot] = (),
    layers: Collection[str] | None = None,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    budget: int = BUDGET,
) -> bytes:
    """What the page shows of a model, as the bytes of a safetensors file.

    Layers of this library are stored by what makes their scores, if that fits in the budget or can be shortened to fit
    with scores right to 0.01. Of all other attention the rows themselves are stored, of all queries or of an even
    lattice of as many as fit; the layer's statistic `queries stored` is their number.

    Args:
        model: Any module with attention. It runs in evaluation mode and without gradients.
        images: Its input, (b, c, height, width), none of one colour; None for a model that looks at positions only.
        title: Heading of the page; empty for the model's class.
        pictures: The images as shown; None makes them from `images`, each from its least to its greatest value.
        snapshots: The training before the present one, as `snapshots_of` gives them.
        layers: Names of the modules to show; None for all.
        grid: Tokens of the image, (height, width), for models that do not say it.
        prefix: Class tokens and registers before the image's tokens, for models that do not say it.
        budget: Bytes per image, at least 1, for content and rows of all layers in equal parts; each layer has at least
            one row. Pictures and tables of positions come on top.

    Returns:
        The file.

    Raises:
        ValueError: An attention cannot be read or shown; images are missing, blank or do not fit the model; or pictures
            do not fit the images.
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
    no_images = images is None
    if images is None:
        images, pictures = _noise(model), Pictures.none()
    audited = audit(model, images, **reading).layers
    if no_images and (content := [layer.name for layer in audited if not layer.position_only]):
        requirement = "must be given, since attention depends on what they show"
        raise ValueError(bad("images", requirement, f"none for {', '.join(content[:3])}"))
    stored = _store_layers(model, images, audited, budget=budget, **reading)
    pictures = _pictures(pictures, images, stored)
    found = Payload(
        title=title or type(model).__name__,
        library=attnconv.__version__,
        patch=_patch(images, stored),
        names=pictures.names,
        times=(*(snapshot.name for snapshot in snapshots), "now"),
        layers=tuple(_over_time_or_images(layer, snapshots, len(pictures.pixels)) for layer in stored),
        images=pictures.pixels,
    )
    return write_payload(found)


def snapshots_of(run: RunFolder, count: int = 24) -> tuple[Snapshot, ...]:
    """At most `count` snapshots of a run: the first, the last, and others at increasing intervals.

    Raises:
        ValueError: `count` is below 1.
    """
    count = whole("count", count, 1)
    recorded = {line["epoch"]: line["layers"] for line in run.heads() if line["layers"]}
    snapshots = []
    for epoch in choose_epochs(sorted(recorded), count) if recorded else ():
        heads = {
            layer["name"]: HeadShapes(
                torch.tensor(layer["centres"], dtype=torch.float64),
                torch.linalg.inv(torch.tensor(layer["covariance"], dtype=torch.float64)),
            )
            for layer in recorded[epoch]
            if len(layer["centres"][0]) == 2
        }
        snapshots.append(Snapshot(f"epoch {epoch}", heads))
    return tuple(snapshots)


def _store_layers(
    model: nn.Module, images: Tensor, audited: Sequence[LayerAudit], *, budget: int, **reading: Any
) -> list[PayloadLayer]:
    """The layers in the order of the audit, with its statistics; each has an equal part of the budget."""
    stored: list[PayloadLayer] = []

    def store(name: str, operator: AttentionOperator) -> None:
        found = audited[len(stored)]
        layer = store_layer(found.name, model.get_submodule(name), operator, budget=max(1, budget // len(audited)))
        statistics = statistics_of(found)
        statistics["layer"] |= layer.statistics["layer"]
        stored.append(replace(layer, statistics=statistics))

    visit_attention(model, images, store, **reading)
    return stored


def _over_time_or_images(layer: PayloadLayer, snapshots: Sequence[Snapshot], images: int) -> PayloadLayer:
    """A layer of positions with all snapshots, any other with an entry for each image."""
    tensors = dict(layer.tensors)
    if layer.kind == "positions":
        times = []
        for snapshot in snapshots:
            heads, then = snapshot.layers.get(layer.name), tensors  # without a past it was always as it is now
            if heads is not None and "centres" in tensors and len(heads.centres) == layer.heads:
                then = gaussian_tensors(heads.centres, heads.precision, layer.sizes)
            times.append(then)
        tensors = {name: torch.stack([then[name] for then in (*times, tensors)]) for name in tensors}
    else:
        for name, tensor in tensors.items():
            if name != "queries" and len(tensor) == 1:  # all images share their attention
                tensors[name] = tensor.expand(images, *tensor.shape[1:]).contiguous()
    return replace(layer, tensors=tensors)


def statistics_of(found: LayerAudit) -> Statistics:
    """The statistics of an audit by the page's names, null where there is none."""
    numbers, shifts = found.numbers(), found.statistics.best_shift.double()
    unknown: list[float | None] = [None] * len(shifts)
    share = [0.0] * len(shifts) if found.position_only else numbers["content_share"] or unknown

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    heads = {
        "best row": shifts[:, 0].tolist() if len(found.sizes) == 2 else [0.0] * len(shifts),
        "best column": shifts[:, -1].tolist(),
        "mass": numbers["shift_mass"],
        "constancy": numbers["constancy"],
        "entropy": numbers["entropy"],
        "distance": numbers["distance"],
        "mass elsewhere": numbers["padding_mass"],
        "content share": share,
        "gaussian overlap": numbers["gaussian_overlap"],
    }
    layer = {
        "score": numbers["convolution_score"],
        "constancy": mean(numbers["constancy"]),
        "coverage": numbers["coverage"],
        "tap residual": numbers["tap_residual"],
        "redundancy": numbers["redundancy"],
        "receptive field": numbers["receptive_field"],
        "content share": mean(share),
        f"{KERNEL} x {KERNEL} missed": numbers["span_residual"],
    }
    return {"heads": heads, "layer": layer}


def _noise(model: nn.Module) -> Tensor:
    """Two images for a model that looks at positions only, with as many axes as its first layer takes."""
    known = (module for module in model.modules() if isinstance(module, Convolution | SelfAttention))
    first = next(known, None)
    if first is None:
        requirement = "must be given for a model without a convolution or an attention layer of this library"
        raise ValueError(bad("images", requirement, f"none for {type(model).__name__}"))
    dims = first.dims if isinstance(first, SelfAttention) else len(first.kernel_size)
    if dims > 2:  # the page does not show them, and the noise would have very many tokens
        requirement = "must be given for a model whose first layer takes more than two axes"
        raise ValueError(bad("images", requirement, f"none for {dims} axes"))
    channels = getattr(model, "image_channels", first.in_channels)
    some = next(model.parameters())
    side = math.lcm(_SIDE, getattr(model, "downsampling", 1))
    noise = torch.randn(2, int(channels), *[side] * dims, generator=torch.Generator().manual_seed(0))
    return noise.to(some.device, some.dtype)


def _pictures(pictures: Pictures | None, images: Tensor, layers: Sequence[PayloadLayer]) -> Pictures:
    """The pictures with a name each, one for each image or none; grey ones where layers are stored image by image."""
    pixels, names = (pictures_of(images), ()) if pictures is None else (pictures.pixels, pictures.names)
    if len(pixels) not in (0, len(images)):
        raise ValueError(bad("pictures", f"must be one for each of {len(images)} images, or none", len(pixels)))
    if names and len(names) != len(pixels):
        raise ValueError(bad("pictures", f"must have {len(pixels)} names, or none", repr(names)))
    stored = [
        len(layer.tensors[name]) for layer in layers for name in ("query", "prefix_mass") if name in layer.tensors
    ]
    if len(pixels) == 0 and stored:
        height, width = (1, *images.shape[2:])[-2:]
        pixels = torch.full((max(stored), height, width, 3), GREY, dtype=torch.uint8)
        names = ("no image",) if len(pixels) == 1 else ()
    return Pictures(pixels, names or tuple(f"image {index + 1}" for index in range(len(pixels))))


def pictures_of(images: Float[Tensor, "*images"]) -> UInt8[Tensor, "n height width 3"]:
    """Images as bytes to show: each from its least to its greatest value, its first three channels, or one as grey."""
    if images.dim() != 4:
        got = f"shape {tuple(images.shape)}"
        raise ValueError(bad("pictures", "must be given for inputs that are not (b, c, height, width)", got))
    chosen = images.detach().float().cpu()[:, : 3 if images.shape[1] >= 3 else 1]
    least, greatest = chosen.amin((1, 2, 3), keepdim=True), chosen.amax((1, 2, 3), keepdim=True)
    span = (greatest - least).clamp_min(torch.finfo(torch.float32).tiny)
    return ((chosen - least) / span * 255).round().byte().expand(-1, 3, -1, -1).movedim(1, -1).contiguous()


def _patch(images: Tensor, layers: Sequence[PayloadLayer]) -> tuple[int, int] | None:
    """Pixels of a token, where all layers agree on a whole number of them."""
    (height, width), *others = {layer.sizes for layer in layers}
    if images.dim() != 4 or others or images.shape[2] % height or images.shape[3] % width:
        return None
    return images.shape[2] // height, images.shape[3] // width
