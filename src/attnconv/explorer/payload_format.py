"""Read and write the payload format (`docs/explorer.md`), and compute attention rows from a payload.

    p[k] = softmax over tokens k of ( content(q, k) + position(q, k) )        or of only one of them

The rows are computed in float64 and serve as the reference for the page's own computation.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, final

import msgspec
import torch
from jaxtyping import Float64
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnconv._util.errors import bad

FORMAT = 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
PARTS = ("both", "content", "position")
_FIX = "`attnconv explore --export DIR` writes one."

# Tensors of a layer by its kind, with dtype and shape; `?` marks optional ones. There are t snapshots, n images, h
# heads, and T tokens in H rows and W columns; e and m are arbitrary, but the same in all tensors of a layer.
TENSORS: Mapping[str, Mapping[str, str]] = {
    "positions": {
        "shift_scores": "float32 t h 2H-1 2W-1",
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
    "rows": {"queries": "int32 m", "probabilities": "float16 n h m T", "prefix_mass": "float16 n h m"},
}


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
        border: Border rule (such as `zeros`) of a layer of kind `rows`; otherwise, or without padding, `none`.
        encoding: Class name of the encoding, or of the module if it is from a different library.
        statistics: Statistics by name: one value per head (under `heads`), or one number (under `layer`).
        window: Height and width of the attention windows, in tokens; None without windows.
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
    """

    title: str
    library: str
    patch: tuple[int, int] | None
    names: tuple[str, ...]
    times: tuple[str, ...]
    layers: tuple[PayloadLayer, ...]
    images: Tensor


@dataclass(frozen=True)
class _Image:
    name: str


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


def example() -> bytes:
    """Return the payload shipped with the package: the model of `attnconv demo` on four images of digits.

    It was written by `attnconv demo`, followed by `attnconv explore --snapshots 12 --export shown`.

    Example:
        >>> read_payload(example()).title
        'runs/demo'
    """
    return Path(__file__).with_name("example.safetensors").read_bytes()


def write_payload(payload: Payload) -> bytes:
    """Return the bytes of a payload's safetensors file."""
    layers = []
    for layer in payload.layers:
        absent = {"tensors"} if layer.window else {"tensors", "window"}
        entry = {name: value for name, value in vars(layer).items() if name not in absent}
        layers.append({**entry, "dilated": False})
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "title": payload.title,
        "library": payload.library,
        "patch": payload.patch,
        "images": [{"name": name} for name in payload.names],
        "times": payload.times,
        "layers": layers,
    }
    tensors = {"images": payload.images.contiguous()}
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
        >>> [layer.kind for layer in read_payload(example()).layers]
        ['positions', 'positions', 'positions']
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
        _check_layer(index, layers[-1], times=len(manifest.times), images=len(names))
    return Payload(manifest.title, manifest.library, manifest.patch, names, manifest.times, tuple(layers), images)


def attention_row(
    payload: Payload, layer: int, head: int, query: int, *, image: int = 0, time: int = -1, part: str = "both"
) -> Float64[Tensor, "height width"]:
    """Compute the attention probabilities of one query of one head over the tokens of the image.

    Args:
        payload: A payload from `read_payload`.
        layer: Index of the layer, from 0.
        head: Index of the head, from 0.
        query: Flat row-major index of the query's token, from 0.
        image: Index of the image, from 0; ignored for layers of kind `positions`.
        time: Index of the snapshot, from 0 (-1 for the last one); used only for layers of kind `positions`.
        part: Scores in the softmax: `both`, `content` or `position`. Layers of kind `rows` have only `both`.

    Returns:
        The probabilities, normalised over the tokens of the image: their sum is 1 (up to float16 rounding for stored
        rows), or 0 if the query attends to none of these tokens.

    Raises:
        ValueError: If an index is out of range, the layer does not have this part, or the query is not stored.

    Example:
        >>> attention_row(read_payload(example()), layer=0, head=1, query=7).shape
        torch.Size([8, 8])
    """
    chosen = payload.layers[_index("layer", layer, len(payload.layers))]
    head = _index("head", head, chosen.heads)
    height, width = chosen.sizes
    query = _index("query", query, height * width)
    if part not in PARTS:
        raise ValueError(bad("part", f"must be one of {', '.join(PARTS)}", repr(part)))

    def of_head(name: str) -> Tensor:
        tensor = chosen.tensors[name]
        if name == "shift_scores":
            return tensor[_index("time", time, len(tensor), negative=True), head].double()
        return tensor[0 if len(tensor) == 1 else _index("image", image, len(tensor)), head].double()

    if chosen.kind == "rows" and part == "both":
        return of_head("probabilities")[_stored(chosen, query)].unflatten(0, chosen.sizes)
    row, column = divmod(query, width)
    scores = []
    if part != "position" and "query" in chosen.tensors:
        scores.append((of_head("key") @ of_head("query")[query]).unflatten(0, chosen.sizes))
    if part != "content" and "shift_scores" in chosen.tensors:
        top, left = height - 1 - row, width - 1 - column
        scores.append(of_head("shift_scores")[top : top + height, left : left + width])
    if part != "content" and "row_scores" in chosen.tensors:
        scores.append(of_head("row_scores")[query][:, None] + of_head("column_scores")[query])
    if not scores:
        raise ValueError(bad("part", f"must be a part of the scores of layer {chosen.name!r}", repr(part)))
    return torch.softmax(torch.stack(scores).sum(0).flatten(), 0).unflatten(0, chosen.sizes)


def _check_layer(index: int, layer: PayloadLayer, *, times: int, images: int) -> None:
    for name, values in layer.statistics["heads"].items():
        requirement = f"layers[{index}].statistics.heads.{name[:40]} must be a list of {layer.heads} values"
        _require(len(values) == layer.heads, requirement, values)
    shown = images > 0 or layer.kind == "positions"
    _require(shown, "images must be included", f"none, and layer {index} is of kind {layer.kind}")
    height, width = layer.sizes
    sizes = {"t": times, "n": images, "h": layer.heads, "H": height, "W": width, "T": height * width}
    sizes |= {"2H-1": 2 * height - 1, "2W-1": 2 * width - 1, "2": 2}
    for entry, form in TENSORS[layer.kind].items():
        name = entry.removesuffix("?")
        if name in layer.tensors:
            _check_tensor(f"{index}.{name}", layer.tensors[name], form, sizes)
        elif name == entry:
            raise ValueError(bad("payload", f"must have the tensor {index}.{name}", "none", _FIX))
    for one, other in (("row_scores", "column_scores"), ("centres", "precision")):
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


def _stored(layer: PayloadLayer, query: int) -> int:
    """Return the index of a query's row among the stored rows."""
    known = layer.tensors["queries"].tolist()
    if query not in known:
        some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ValueError(bad("query", f"must be a stored query of layer {layer.name!r} ({some})", query))
    return known.index(query)


def _index(name: str, value: int, count: int, *, negative: bool = False) -> int:
    if not (-count if negative else 0) <= value < count:
        raise ValueError(bad(name, f"must be from {-count if negative else 0} to {count - 1}", value))
    return value
