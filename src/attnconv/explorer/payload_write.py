"""Compute the payload of a model: its heads' attention on some images, and its snapshots during training."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor, nn

import attnconv
from attnconv._util.errors import bad
from attnconv._util.module_state import evaluating
from attnconv._util.value_checks import check_module, whole
from attnconv.explorer.payload_format import (
    Payload,
    PayloadLayer,
    Statistics,
    write_payload,
)
from attnconv.explorer.payload_layers import gaussian_tensors, store_layer
from attnconv.grid import Grid
from attnconv.inspect.auditing import KERNEL, QUERIES, LayerAudit, audit
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.chosen_queries import sample_queries
from attnconv.inspect.head_statistics import convolution_score
from attnconv.inspect.shift_profiles import shift_profile
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.operators.toeplitz import Toeplitz
from attnconv.surgery.head_ablation import GATED, HeadChange, ablated
from attnconv.theory.conv_taps import Convolution
from attnconv.training.run_folder import RunFolder, choose_epochs

BUDGET = 3_500_000  # bytes per image: below 5 MB in base64, including the image
GREY = 128  # value of all pixels of placeholder images
_NO_PIXELS = torch.zeros(0, 1, 1, 3, dtype=torch.uint8)
_SIDE = 32  # side in pixels of the noise images for models whose attention depends on positions only


@final
@dataclass(frozen=True, eq=False)
class Pictures:
    """Images as shown on the page.

    Attributes:
        pixels: Images, (n, height, width, channels) uint8. By default, there are none.
        names: One name per image; if empty, the images are numbered.
        labels: The class of each image; empty if unknown.
    """

    pixels: UInt8[Tensor, "n height width 3"] = _NO_PIXELS
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@final
@dataclass(frozen=True, eq=False)
class Snapshot:
    """Gaussian heads of a model after an epoch of its training.

    Attributes:
        name: Name on the page, such as `epoch 3`.
        layers: For each layer with Gaussian heads, by name: the heads' centres, which are shifts (row, column) in
            tokens, and precision matrices (inverse covariances).
    """

    name: str
    layers: Mapping[str, tuple[Float64[Tensor, "h 2"], Float64[Tensor, "h 2 2"]]]


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
    classes: Sequence[str] = (),
    random: bool = False,
    ablations: bool = False,
) -> bytes:
    """Compute the data about a model that the explorer page shows, as the bytes of a safetensors file.

    Two-dimensional layers of this library with stride 1 and border rule `renormalise` are stored as centres and
    precision matrices (Gaussian heads), tables of scores (other heads that depend only on positions), or queries and
    keys if these fit in the budget. Queries and keys may be stored with fewer channels, which changes each score by at
    most 0.01. For all other layers, probabilities are stored for all queries, or for as many evenly spaced
    ones as fit. Attention that cannot be read is left out, with a warning; the page lists it.

    Args:
        model: Any module with attention. It runs in evaluation mode and without gradients.
        images: Input of the model, (b, c, height, width), not constant; None if attention depends on positions only.
        title: Heading of the page; if empty, the name of the model's class.
        pictures: The images to show; None shows `images`, each scaled from its minimum (black) to its maximum (white).
        snapshots: Earlier states of the model, from `snapshots_of`.
        layers: Names of the attention modules to show; None for all.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.
        budget: Bytes per image, split equally between layers, for everything except images and position-only attention.
        classes: Names of the classes, in the order of the logits, to show the model's predictions; they are omitted
            unless the model returns that many logits per image.
        random: Whether the page should say that the parameters are random.
        ablations: Whether to store the logits with each head switched off or replaced with the nearest convolution (see
            `attnconv.surgery.ablated`), which needs `classes` and runs the model twice per head.

    Raises:
        ValueError: If no attention can be shown; if images are missing, constant or rejected by the model; if
            `pictures` do not match `images`; or if `ablations` is True without logits.
        TypeError: If `model` is not a module, `images` not a floating-point tensor, or `budget` not an integer.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import read_payload
        >>> found = read_payload(payload(SelfAttention2d(3, 4, heads=9), torch.rand(1, 3, 6, 8)))
        >>> [(layer.kind, layer.heads, layer.sizes) for layer in found.layers]
        [('positions', 9, (6, 8))]
    """
    check_module(model)
    budget = whole("budget", budget, 1)
    reading: dict[str, Any] = {"layers": layers, "grid": grid, "prefix": prefix}
    no_images = images is None
    if images is None:
        images, pictures = _noise(model), Pictures()
    audited = audit(model, images, **reading)  # warns about attention that cannot be read
    if no_images and (content := [layer.name for layer in audited.layers if not layer.position_only]):
        requirement = f"must be given, since attention depends on the image in {', '.join(content[:3])}"
        raise ValueError(bad("images", requirement, "none"))
    stored, output = _store_layers(model, images, audited.layers, budget=budget, **reading)
    pictures = _pictures(pictures, images, stored)
    logits = None
    if not no_images and len(pictures.pixels) == len(images):
        logits = logits_of(output, len(images), len(classes))
    if ablations and logits is None:
        requirement = "must be False unless images and the names of the classes of the model's logits are given"
        raise ValueError(bad("ablations", requirement, "True"))
    shown = [_over_time_or_images(layer, snapshots, len(pictures.pixels)) for layer in stored]
    if ablations:
        shown = [
            _with_ablations(model, images, layer, grid=grid, prefix=prefix)
            if _can_be_changed(model, layer, shown)
            else layer
            for layer in shown
        ]
    found = Payload(
        title=title or type(model).__name__,
        library=attnconv.__version__,
        patch=_patch(images, stored),
        names=pictures.names,
        times=(*(snapshot.name for snapshot in snapshots), "now"),
        layers=tuple(shown),
        images=pictures.pixels,
        labels=pictures.labels,
        random=random,
        classes=() if logits is None else tuple(classes),
        logits=logits,
        left_out=audited.left_out,
    )
    return write_payload(found)


def snapshots_of(run: RunFolder, count: int = 24, *, until: int | None = None) -> tuple[Snapshot, ...]:
    """Return at most `count` snapshots of a run: the first and last epochs, and others at increasing intervals.

    Epochs after `until`, such as the epoch of the best weights, are left out; None for no limit.

    Raises:
        ValueError: If `count` is below 1.
    """
    count = whole("count", count, 1)
    lines = [line for line in run.heads() if line["layers"] and (until is None or line["epoch"] <= until)]
    recorded = {line["epoch"]: line["layers"] for line in lines}
    snapshots = []
    for epoch in choose_epochs(sorted(recorded), count) if recorded else ():
        heads = {
            layer["name"]: (
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
) -> tuple[list[PayloadLayer], object]:
    """Store the layers in the order of the audit, with its statistics and equal shares of the budget.

    Return them and the output of the model.
    """
    stored: list[PayloadLayer] = []
    outputs: list[object] = []

    def store(name: str, operator: AttentionOperator) -> None:
        found = audited[len(stored)]
        layer = store_layer(found.name, model.get_submodule(name), operator, budget=max(1, budget // len(audited)))
        statistics = statistics_of(found)
        statistics["layer"] |= layer.statistics["layer"]
        stored.append(replace(layer, statistics=statistics))

    with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
        visit_attention(model, images, store, unreadable=lambda *_: None, **reading)
    return stored, outputs[-1] if outputs else None


def _over_time_or_images(layer: PayloadLayer, snapshots: Sequence[Snapshot], images: int) -> PayloadLayer:
    """Add all snapshots to a layer of kind `positions`, one entry per image to any other layer, and past scores."""
    tensors, scores = dict(layer.tensors), [layer.statistics["layer"]["score"]]
    if layer.kind == "positions":
        times: list[dict[str, Tensor]] = []
        past: list[float | None] = []
        for snapshot in snapshots:
            heads = snapshot.layers.get(layer.name)
            if heads is not None and "centres" in tensors and len(heads[0]) == layer.heads:
                times.append(gaussian_tensors(*heads))
                past.append(gaussian_score(*heads, sizes=layer.sizes))
            else:  # without a record, the current state is shown
                times.append(tensors)
                past.append(None)
        tensors = {name: torch.stack([then[name] for then in (*times, tensors)]) for name in tensors}
        scores = [*past, *scores]
    else:
        for name, tensor in tensors.items():
            if name != "queries" and len(tensor) == 1:  # attention shared by all images
                tensors[name] = tensor.expand(images, *tensor.shape[1:]).contiguous()
        scores = [*(None for _ in snapshots), *scores]
    return replace(layer, tensors=tensors, scores=tuple(scores))


def gaussian_score(
    centres: Float64[Tensor, "h 2"], precision: Float64[Tensor, "h 2 2"], *, sizes: tuple[int, int]
) -> float:
    """Compute the convolution score of Gaussian heads on a grid, for the queries that an audit samples."""
    grid = Grid.make(sizes)
    shifts = torch.meshgrid(*(axis.all_shifts(centres.device) for axis in grid.axes), indexing="ij")
    off = torch.stack(shifts, -1).double() - centres[:, None, None]
    scores = -0.5 * ((off @ precision[:, None]) * off).sum(-1)
    operator = Toeplitz(grid, scores, dtype=torch.float64)
    return convolution_score(shift_profile(operator, queries=sample_queries(grid, QUERIES)))


def logits_of(output: object, images: int, classes: int) -> Tensor | None:
    """Return a model's output as float32 logits, (images, classes), on the CPU; None if it is anything else."""
    if not isinstance(output, Tensor) or not classes or output.shape != (images, classes):
        return None
    return output.detach().float().cpu().contiguous() if bool(output.isfinite().all()) else None


def _can_be_changed(model: nn.Module, layer: PayloadLayer, layers: Sequence[PayloadLayer]) -> bool:
    """Return whether `ablated` can change only this layer: one call of a module without gates."""
    modules = dict(model.named_modules())
    repeated = any(other.name.startswith(f"{layer.name} (call ") for other in layers)
    return layer.name in modules and type(modules[layer.name]).__name__ not in GATED and not repeated


def _with_ablations(model: nn.Module, images: Tensor, layer: PayloadLayer, **reading: Any) -> PayloadLayer:
    """Add the logits with each head of a layer changed."""
    changes: tuple[HeadChange, ...] = ("zero", "convolution")
    tensors = {}
    for kind in changes:
        heads = []
        for head in range(layer.heads):
            with torch.no_grad(), evaluating(model), ablated(model, {layer.name: [head]}, to=kind, **reading):
                heads.append(model(images).half().cpu())
        tensors[f"{kind}_logits"] = torch.stack(heads, 1)
    return replace(layer, tensors={**layer.tensors, **tensors})


def statistics_of(found: LayerAudit) -> Statistics:
    """Return the statistics of an audit under the names that the page uses; None for missing values."""
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
    """Return two noise images, with as many axes as the model's first layer, for position-only attention."""
    known = (module for module in model.modules() if isinstance(module, Convolution | SelfAttention))
    first = next(known, None)
    if first is None:
        requirement = "must be given for a model that has neither a convolution nor an attention layer of this library"
        raise ValueError(bad("images", requirement, f"none for {type(model).__name__}"))
    dims = first.dims if isinstance(first, SelfAttention) else len(first.kernel_size)
    if dims > 2:  # not shown on the page, and the noise would have too many tokens
        requirement = "must be given for a model whose first layer has more than two axes"
        raise ValueError(bad("images", requirement, f"none for {dims} axes"))
    channels = getattr(model, "image_channels", first.in_channels)
    some = next(model.parameters())
    side = math.lcm(_SIDE, getattr(model, "downsampling", 1))
    noise = torch.randn(2, int(channels), *[side] * dims, generator=torch.Generator().manual_seed(0))
    return noise.to(some.device, some.dtype)


def _pictures(pictures: Pictures | None, images: Tensor, layers: Sequence[PayloadLayer]) -> Pictures:
    """Return the images to show, with names; grey placeholders if there are none but layers are stored per image."""
    given = Pictures(pictures_of(images)) if pictures is None else pictures
    pixels, names, labels = given.pixels, given.names, given.labels
    if len(pixels) not in (0, len(images)):
        raise ValueError(bad("pictures", f"must be empty or contain one image per input ({len(images)})", len(pixels)))
    if names and len(names) != len(pixels):
        raise ValueError(bad("pictures", f"must have no names or one per image ({len(pixels)})", repr(names)))
    if len(labels) not in (0, len(pixels)):
        raise ValueError(bad("pictures", f"must have no labels or one per image ({len(pixels)})", repr(labels)))
    stored = [
        len(layer.tensors[name]) for layer in layers for name in ("query", "prefix_mass") if name in layer.tensors
    ]
    if len(pixels) == 0 and stored:
        height, width = (1, *images.shape[2:])[-2:]
        pixels = torch.full((max(stored), height, width, 3), GREY, dtype=torch.uint8)
        names = ("no image",) if len(pixels) == 1 else ()
    return Pictures(pixels, names or tuple(f"image {index}" for index in range(len(pixels))), labels)


def pictures_of(images: Float[Tensor, "*images"]) -> UInt8[Tensor, "n height width 3"]:
    """Convert images to uint8, each scaled from its minimum to its maximum; fewer than 3 channels become grey."""
    if images.dim() != 4:
        got = f"shape {tuple(images.shape)}"
        raise ValueError(bad("pictures", "must be given for inputs that are not (b, c, height, width)", got))
    chosen = images.detach().float().cpu()[:, : 3 if images.shape[1] >= 3 else 1]
    least, greatest = chosen.amin((1, 2, 3), keepdim=True), chosen.amax((1, 2, 3), keepdim=True)
    span = (greatest - least).clamp_min(torch.finfo(torch.float32).tiny)
    return ((chosen - least) / span * 255).round().byte().expand(-1, 3, -1, -1).movedim(1, -1).contiguous()


def _patch(images: Tensor, layers: Sequence[PayloadLayer]) -> tuple[int, int] | None:
    """Return the size of a token in pixels, if it is an integer and the same for all layers."""
    (height, width), *others = {layer.sizes for layer in layers}
    if images.dim() != 4 or others or images.shape[2] % height or images.shape[3] % width:
        return None
    return images.shape[2] // height, images.shape[3] // width
