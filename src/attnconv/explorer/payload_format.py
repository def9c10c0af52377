"""Read and write the payload format (`docs/explorer.md`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnconv._util.errors import bad

FORMAT = 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_FIX = "`attnconv explore --export DIR` writes one."

# Tensors of a layer by its kind, with dtype and shape; `?` marks optional ones. There are t snapshots, n images, h
# heads, c classes, and T tokens in H rows and W columns, after `prefix` class tokens; e and m are arbitrary, but the
# same in all tensors of a layer. `ABLATIONS` may belong to layers of all kinds.
TENSORS: Mapping[str, dict[str, str]] = {
    "positions": {
        "shift_scores?": "float32 t h 2H-1 2W-1",
        "centres?": "float32 t h 2",
        "precision?": "float32 t h 2 2",
    },
    "content": {
        "query": "float16 n h T e",
        "key": "float16 n h T e",
        "row_scores?": "float16 n h T H",
        "column_scores?": "float16 n h T W",
        "shift_scores?": "float32 t h 2H-1 2W-1",
    },
    "rows": {
        "queries": "int32 m",
        "probabilities": "float16 n h m T",
        "prefix_mass": "float16 n h m",
        "class_rows?": "float16 n h prefix T",
        "class_mass?": "float16 n h prefix",
    },
}
ABLATIONS = {"zero_logits?": "float16 n h c", "convolution_logits?": "float16 n h c"}
PAIRS = (  # both or neither
    ("zero_logits", "convolution_logits"),
    ("row_scores", "column_scores"),
    ("centres", "precision"),
    ("class_rows", "class_mass"),
)


class Statistics(TypedDict):
    """Statistics of the audit by name: lists with one entry per head, and single values for the layer."""

    heads: dict[str, list[float | None]]
    layer: dict[str, float | None]


@final
@dataclass(frozen=True, eq=False)
class PayloadLayer:
    """One layer of a payload.

    Attributes:
        name: Name of the layer in the model.
        kind: `positions`, `content` or `rows`, which determines the tensors; see `attnconv.explorer.payload_layers`.
        heads: Number of heads.
        sizes: Height and width of the grid of tokens.
        prefix: Number of class tokens and registers before the image's tokens.
        border: Border rule of a layer of kind `rows`, `zeros` for `zero`; otherwise, and for `renormalise`, `none`.
        encoding: Class name of the encoding, or of the module if it is from a different library.
        statistics: Statistics by name: one value per head (under `heads`), or one number (under `layer`).
        window: Height and width of the attention windows, in tokens; None without windows.
        scores: Convolution score at each snapshot, None where it is unknown; empty if the payload has none.
        tensors: Tensors by name, without the layer's index.
    """

    name: str
    kind: Literal["positions", "content", "rows"]
    heads: Count
    sizes: tuple[Count, Count]
    prefix: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    border: str
    encoding: str
    statistics: Statistics
    window: tuple[Count, Count] | None = None
    scores: tuple[float | None, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, eq=False)
class Payload:
    """Data about a model, as shown on the page of `attnconv explore`.

    Attributes:
        title: Heading.
        library: Version of attnconv that wrote the payload.
        patch: Height and width of a token's patch in pixels; None if they differ between layers or are not integers.
        names: One name per image.
        times: Names of the snapshots; the last one is the current state.
        layers: The layers, in the order in which they run.
        images: Images shown on the page, (n, height, width, 3) uint8.
        labels: The class of each image, None if unknown; may be empty if no class is known.
        random: Whether the model's parameters are initial random values.
        classes: Names of the model's classes, in the order of its logits; empty without logits.
        logits: The model's logits for each image, (n, classes) float32, or None.
        left_out: Reason why the attention of a module could not be read, by module name.
    """

    title: str
    library: str
    patch: tuple[int, int] | None
    names: tuple[str, ...]
    times: tuple[str, ...]
    layers: tuple[PayloadLayer, ...]
    images: Tensor
    labels: tuple[str | None, ...] = ()
    random: bool = False
    classes: tuple[str, ...] = ()
    logits: Tensor | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Image:
    name: str
    label: str | None = None


@dataclass(frozen=True)
class _Manifest:
    """The JSON manifest in the file's metadata. Its layers contain no tensors."""

    format: Literal[1]
    title: str
    library: str
    patch: tuple[Count, Count] | None
    images: tuple[_Image, ...]
    times: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    layers: Annotated[tuple[PayloadLayer, ...], msgspec.Meta(min_length=1)]
    random: bool = False
    classes: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


def example() -> bytes:
    """Return the payload shipped with the package: a quadratic model trained on CIFAR-10, with twelve test images.

    It contains the run `results/paper-small/runs/quadratic`, and was written by `docs/write_models.py`.

    Example:
        >>> found = read_payload(example())
        >>> found.title, found.labels[0], found.classes[found.logits[0].argmax()]
        ('Quadratic encoding', 'airplane', 'airplane')
    """
    return Path(__file__).with_name("example.safetensors").read_bytes()


def write_payload(payload: Payload) -> bytes:
    """Return the bytes of a payload's safetensors file."""
    layers = []
    for layer in payload.layers:
        absent = {"tensors", *(name for name in ("window", "scores") if not getattr(layer, name))}
        entry = {name: value for name, value in vars(layer).items() if name not in absent}
        layers.append({**entry, "dilated": False})
    images: list[dict[str, Any]] = [{"name": name} for name in payload.names]
    for image, label in zip(images, payload.labels, strict=False):
        if label:
            image["label"] = label
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "title": payload.title,
        "library": payload.library,
        "patch": payload.patch,
        "images": images,
        "times": payload.times,
        "layers": layers,
    }
    if payload.random:
        manifest["random"] = True
    if payload.left_out:
        manifest["left_out"] = dict(payload.left_out)
    tensors = {"images": payload.images.contiguous()}
    if payload.logits is not None:
        manifest["classes"], tensors["logits"] = payload.classes, payload.logits
    for index, layer in enumerate(payload.layers):
        tensors |= {f"{index}.{name}": tensor for name, tensor in layer.tensors.items()}
    return save(tensors, {"attnconv": json.dumps(manifest, allow_nan=False)})


def read_payload(content: bytes) -> Payload:
    """Read and validate a payload.

    Args:
        content: The bytes of the file.

    Raises:
        ValueError: If the bytes are not a complete safetensors file, or the manifest or a tensor violates the format.

    Example:
        >>> {layer.kind for layer in read_payload(example()).layers}
        {'positions'}
    """
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(bad("payload", "must be a complete safetensors file", str(error), _FIX)) from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    text = header.get("__metadata__", {}).get("attnconv")
    if text is None:
        raise ValueError(bad("payload", "must have a manifest under the metadata key `attnconv`", "none", _FIX))
    try:
        manifest = msgspec.json.decode(text, type=_Manifest)
    except (ValueError, RecursionError) as error:
        raise ValueError(bad("payload", f"must have a manifest of format {FORMAT}", str(error), _FIX)) from error
    names = tuple(image.name for image in manifest.images)
    images = tensors.get("images", torch.zeros(0, 1, 1, 3, dtype=torch.uint8))
    _check_tensor("images", images, "uint8 n rows columns 3", {"n": len(names), "3": 3})
    _require(0 not in images.shape[1:], "images must be at least 1 x 1 pixel", f"shape {tuple(images.shape)}")
    layers = []
    for index, entry in enumerate(manifest.layers):
        start = f"{index}."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        layers.append(replace(entry, tensors=own))
        sizes = {"t": len(manifest.times), "n": len(names), "c": len(manifest.classes)}
        _check_layer(index, layers[-1], sizes)
    if "logits" in tensors:
        _check_tensor("logits", tensors["logits"], "float32 n c", {"n": len(names), "c": len(manifest.classes)})
    return Payload(
        title=manifest.title,
        library=manifest.library,
        patch=manifest.patch,
        names=names,
        times=manifest.times,
        layers=tuple(layers),
        images=images,
        labels=tuple(image.label for image in manifest.images),
        random=manifest.random,
        classes=manifest.classes,
        logits=tensors.get("logits"),
        left_out=manifest.left_out,
    )


def _check_layer(index: int, layer: PayloadLayer, sizes: dict[str, int]) -> None:
    times, images = sizes["t"], sizes["n"]
    for name, values in layer.statistics["heads"].items():
        requirement = f"layers[{index}].statistics.heads.{name[:40]} must be a list of {layer.heads} values"
        _require(len(values) == layer.heads, requirement, values)
    shown = images > 0 or layer.kind == "positions"
    _require(shown, "images must be included", f"none, and layer {index} is of kind {layer.kind}")
    height, width = layer.sizes
    sizes |= {"h": layer.heads, "H": height, "W": width, "T": height * width}
    sizes |= {"prefix": layer.prefix, "2H-1": 2 * height - 1, "2W-1": 2 * width - 1, "2": 2}
    for entry, form in (TENSORS[layer.kind] | ABLATIONS).items():
        name = entry.removesuffix("?")
        if name in layer.tensors:
            _check_tensor(f"{index}.{name}", layer.tensors[name], form, sizes)
        elif name == entry:
            raise ValueError(bad("payload", f"must have the tensor {index}.{name}", "none", _FIX))
    if layer.kind == "positions":
        known = "shift_scores" in layer.tensors or "centres" in layer.tensors
        _require(known, f"must have the tensor {index}.shift_scores or {index}.centres", "neither")
    shown = len(layer.scores) in (0, times)
    _require(shown, f"layers[{index}].scores must have one entry per snapshot ({times})", len(layer.scores))
    for one, other in PAIRS:
        both = (one in layer.tensors) == (other in layer.tensors)
        _require(both, f"tensors of layer {index} must be both {one} and {other}, or neither", "one of them")
    if "queries" in layer.tensors:
        tokens = layer.tensors["queries"]
        inside = len(tokens) > 0 and bool(((tokens >= 0) & (tokens < height * width)).all())
        _require(inside, f"{index}.queries must be token indices below {height * width}", f"{tokens.tolist()}")


def _check_tensor(name: str, tensor: Tensor, form: str, sizes: dict[str, int]) -> None:
    """Check dtype, shape and finiteness; sizes of new letters are taken from the tensor."""
    dtype, *letters = form.split()
    if tensor.dim() == len(letters):
        for letter, extent in zip(letters, tensor.shape, strict=True):
            sizes.setdefault(letter, extent)
    if str(tensor.dtype) != f"torch.{dtype}" or list(tensor.shape) != [sizes.get(letter) for letter in letters]:
        wanted = " x ".join(str(sizes.get(letter, letter)) for letter in letters)
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(bad("payload", f"tensor {name} must be {dtype} of shape {wanted}", got, _FIX))
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(bad("payload", f"tensor {name} must be finite", "NaN or infinity", _FIX))


def _require(fine: bool, requirement: str, value: object) -> None:
    if not fine:
        raise ValueError(bad("payload", requirement, str(value)[:80], _FIX))
