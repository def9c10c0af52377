"""The reader of payloads: everything in the file is checked before a number of it is used."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from attnconv._util.errors import bad

FORMAT = 1
LARGEST_HEADER = 16 << 20  # bytes
LARGEST_COUNT = 1_000_000  # of heads, tokens on a side and the like
_FIX = "`attnconv explore --export DIR` writes one."
_Forms: TypeAlias = dict[str, tuple[torch.dtype, tuple[int | None, ...]]]
_LAYER = {"name": str, "kind": str, "heads": int, "sizes": list, "prefix": int, "border": str, "encoding": str}


@final
@dataclass(frozen=True, eq=False)
class PayloadLayer:
    """One layer of a payload.

    Attributes:
        name: In the model.
        kind: `positions`, `content` or `rows`; see `attnconv.explorer.payload_layers`.
        heads: Number of heads.
        sizes: Height and width of the grid of tokens.
        prefix: Number of tokens before the image's.
        border: `none`, or the border rule of a layer whose rows are stored.
        encoding: Class of the encoding or of the module.
        statistics: Under `heads` a list per name, under `layer` a number per name.
        tensors: By their names without the layer's number.
        window: Height and width of the windows that attention stays inside, in tokens; None where there are none.
    """

    name: str
    kind: str
    heads: int
    sizes: tuple[int, int]
    prefix: int
    border: str
    encoding: str
    statistics: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor]
    window: tuple[int, int] | None = None


@final
@dataclass(frozen=True, eq=False)
class Payload:
    """What the page shows of a model.

    Attributes:
        title: Heading.
        library: Version that wrote it.
        patch: Height and width of a token in pixels, or None.
        names: One for each image.
        times: Moments of the training, the present one last.
        layers: In the order in which they run.
        images: (n, height, width, 3), bytes.
    """

    title: str
    library: str
    patch: tuple[int, int] | None
    names: tuple[str, ...]
    times: tuple[str, ...]
    layers: tuple[PayloadLayer, ...]
    images: Tensor


def read_payload(content: bytes) -> Payload:
    """Read a payload and check all of it.

    Args:
        content: The bytes of the file.

    Raises:
        ValueError: It is cut short, no safetensors file, of another format, or its tensors are not what its manifest
            says.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import payload
        >>> read_payload(payload(SelfAttention2d(3, 4, heads=2), title="two heads")).title
        'two heads'
    """
    metadata = _metadata(content)
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(bad("payload", "must be a whole safetensors file", str(error), _FIX)) from error
    manifest = _manifest(metadata)
    _check_manifest(manifest)
    patch, names = manifest["patch"], tuple(image["name"] for image in manifest["images"])
    images = tensors.get("images", torch.zeros(0, 1, 1, 3, dtype=torch.uint8))
    _fits("images", images, torch.uint8, (len(names), None, None, 3))
    _require(images.shape[1] >= 1 and images.shape[2] >= 1, "images", f"{images.shape[1]} x {images.shape[2]} pixels")
    times = tuple(manifest["times"])
    return Payload(
        title=manifest["title"],
        library=manifest["library"],
        patch=None if patch is None else (patch[0], patch[1]),
        names=names,
        times=times,
        layers=tuple(_layer(i, entry, tensors, (len(times), len(names))) for i, entry in enumerate(manifest["layers"])),
        images=images,
    )


def _metadata(content: bytes) -> Mapping[str, str]:
    """The metadata of a safetensors file's header."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= length <= min(LARGEST_HEADER, len(content) - 8):
        requirement = "must be a whole safetensors file"
        raise ValueError(bad("payload", requirement, f"{len(content)} bytes whose header does not fit", _FIX))
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(bad("payload", "must be a safetensors file", "no header in JSON", _FIX)) from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return metadata if isinstance(metadata, dict) else {}


def _manifest(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The manifest in a file's metadata.

    Raises:
        ValueError: There is none, or it is not JSON.
    """
    text = metadata.get("attnconv")
    if text is None:
        raise ValueError(bad("payload", "must hold a manifest under `attnconv`", "none", _FIX))
    try:
        manifest = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(bad("payload", "must hold a manifest that is JSON", str(error), _FIX)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = repr(manifest.get("format")) if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(bad("payload", f"must be of format {FORMAT}", got, _FIX))
    return manifest


def _no_number(word: str) -> float:
    """NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{word} is no number")


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Refuse what stands in the manifest beside the layers' own entries, unless it is as the format says."""
    for name in ("title", "library"):
        _require(isinstance(manifest.get(name), str), name, manifest.get(name))
    patch = manifest.get("patch", "none")  # null is one, and must be said
    _require(patch is None or _whole_pair(patch), "patch", patch)
    _require(_is_list_of(manifest.get("times"), str) and manifest["times"], "times", manifest.get("times"))
    _require(_is_list_of(manifest.get("images"), dict), "images", manifest.get("images"))
    for index, image in enumerate(manifest["images"]):
        _require(isinstance(image.get("name"), str), f"images[{index}].name", image.get("name"))
    _require(_is_list_of(manifest.get("layers"), dict) and manifest["layers"], "layers", manifest.get("layers"))


def _check_statistics(where: str, statistics: object, heads: int) -> None:
    """Refuse all but one finite number or null per head, and per layer."""
    parts: Mapping[str, Any] = statistics if isinstance(statistics, dict) else {}
    by_head, of_layer = parts.get("heads"), parts.get("layer")
    if not isinstance(by_head, dict) or not isinstance(of_layer, dict):
        raise _not_so(where, statistics)
    for name, values in by_head.items():
        fine = isinstance(values, list) and len(values) == heads and all(map(_number_or_null, values))
        _require(fine, f"{where}.heads.{name[:40]}", values)
    for name, value in of_layer.items():
        _require(_number_or_null(value), f"{where}.layer.{name[:40]}", value)


def _layer(
    index: int, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], counts: tuple[int, int]
) -> PayloadLayer:
    for key, kind in _LAYER.items():
        value = entry.get(key)
        _require(isinstance(value, kind) and not isinstance(value, bool), f"layers[{index}].{key}", value)
    _require(1 <= entry["heads"] <= LARGEST_COUNT, f"layers[{index}].heads", entry["heads"])
    _require(0 <= entry["prefix"] <= LARGEST_COUNT, f"layers[{index}].prefix", entry["prefix"])
    _require(_whole_pair(entry["sizes"]), f"layers[{index}].sizes", entry["sizes"])
    window = entry.get("window")
    _require(window is None or _whole_pair(window), f"layers[{index}].window", window)
    _check_statistics(f"layers[{index}].statistics", entry.get("statistics"), entry["heads"])
    start = f"{index}."
    own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    height, width = entry["sizes"]
    _check_tensors(index, entry, own, counts)
    return PayloadLayer(
        name=entry["name"],
        kind=entry["kind"],
        heads=entry["heads"],
        sizes=(height, width),
        prefix=entry["prefix"],
        border=entry["border"],
        encoding=entry["encoding"],
        statistics=entry["statistics"],
        tensors=own,
        window=None if window is None else (window[0], window[1]),
    )


def _check_tensors(index: int, entry: Mapping[str, Any], own: Mapping[str, Tensor], counts: tuple[int, int]) -> None:
    """Refuse tensors that are missing, or whose dtypes and shapes are not those of so many moments and images."""
    times, images = counts
    heads, (height, width) = entry["heads"], entry["sizes"]
    count, single, half = height * width, torch.float32, torch.float16
    table = (single, (times, heads, 2 * height - 1, 2 * width - 1))
    query = own.get("query", torch.empty(0, 0, 0, 0))
    channels = query.shape[-1]
    stored = own["queries"].shape[0] if "queries" in own and own["queries"].dim() == 1 else None
    forms: dict[str, tuple[_Forms, _Forms]] = {
        "positions": (
            {"shift_scores": table},
            {"centres": (single, (times, heads, 2)), "precision": (single, (times, heads, 2, 2))},
        ),
        "content": (
            {"query": (half, (images, heads, count, None)), "key": (half, (images, heads, count, channels))},
            {
                "row_scores": (half, (images, heads, count, height)),
                "column_scores": (half, (images, heads, count, width)),
                "shift_scores": table,
            },
        ),
        "rows": (
            {
                "queries": (torch.int32, (None,)),
                "probabilities": (half, (images, heads, stored, count)),
                "prefix_mass": (half, (images, heads, stored)),
            },
            {},
        ),
    }
    _require(entry["kind"] in forms, f"layers[{index}].kind", entry["kind"])
    shown = images > 0 or entry["kind"] == "positions"
    _require(shown, "images", f"none, and layer {index} is of kind {entry['kind']}")
    needed, possible = forms[entry["kind"]]
    for name in [*needed, *possible]:
        if name in own:
            _fits(f"{index}.{name}", own[name], *{**needed, **possible}[name])
        elif name in needed:
            raise ValueError(bad("payload", f"must hold the tensor {index}.{name}", "none", _FIX))
    _require(("row_scores" in own) == ("column_scores" in own), f"tensors of layer {index}", sorted(own))
    if "queries" in own:
        tokens = own["queries"]
        inside = bool(((tokens >= 0) & (tokens < count)).all()) and len(tokens) > 0
        _require(inside, f"{index}.queries", f"{len(tokens)} tokens, some outside of {height} x {width}")


def _fits(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor of another dtype or shape; None stands for any number."""
    same = len(shape) == tensor.dim() and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not same or tensor.dtype != dtype:
        wanted = " x ".join("any" if want is None else str(want) for want in shape)
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(bad("payload", f"tensor {name} must be {dtype} of {wanted}", got, _FIX))
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(bad("payload", f"tensor {name} must be finite", "NaN or infinity", _FIX))


def _require(fine: object, name: str, value: object) -> None:
    if not fine:
        raise _not_so(name, value)


def _not_so(name: str, value: object) -> ValueError:
    return ValueError(bad("payload", f"{name} must be as the format says", repr(value)[:80], _FIX))


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _whole_pair(value: object) -> bool:
    whole = isinstance(value, list) and len(value) == 2
    return whole and all(isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= LARGEST_COUNT for v in value)  # type: ignore[attr-defined]


def _number_or_null(value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float reaches
        return False
