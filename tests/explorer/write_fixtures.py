"""Compute the numbers that the page is tested with: `python -m tests.explorer.write_fixtures`.

The files are in `web/tests/fixtures`; `test_fixtures.py` checks that they agree with this module. All inputs are sines
in float64, so that they do not depend on a random number generator.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from attnconv import SelfAttention2d
from attnconv.encodings.base import mass_off_nearest
from attnconv.encodings.quadratic import Quadratic
from attnconv.explorer import Payload, attention_row, class_row, read_payload
from attnconv.explorer.payload_rows import PARTS
from attnconv.grid import Border
from attnconv.theory import error_bound

FOLDER = Path(__file__).resolve().parents[2] / "web" / "tests" / "fixtures"
PADDING_MODES = {"zero": "constant", "renormalise": "replicate"}


def waves(*shape: int, step: float = 0.7, phase: float = 0.0) -> Tensor:
    """Return numbers between -1 and 1 without a pattern that could hide a wrong index."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(step * index + 0.013 * index.square() + phase).reshape(shape)


def bench_case(border: Border, stride: int, dilation: int, width: int, alpha: float, jitter: float) -> dict[str, Any]:
    """Return one setting of the theorem bench: the layer's output, one row of it, the convolution and the bound."""
    image, kernel = waves(9, 8), waves(width, width, step=1.9, phase=0.4)
    reach = dilation * (width - 1) // 2
    along = [dilation * index - reach for index in range(width)]
    taps = torch.tensor(list(product(along, along)), dtype=torch.float64)
    layer = SelfAttention2d(
        1,
        1,
        heads=width**2,
        encoding=Quadratic(width**2, dims=2),
        stride=stride,
        padding=reach,
        border=border,
        bias=False,
        backend="reference",
    ).double()
    assert isinstance(layer.encoding, Quadratic)
    assert layer.weight is not None
    with torch.no_grad():
        layer.encoding.centres.copy_(taps + jitter * waves(*taps.shape, step=0.9))
        layer.encoding.spread.fill_(math.sqrt(2 * alpha))
        layer.weight.copy_(kernel.reshape(-1, 1, 1))
        batch = image[None, None]
        attention = layer(batch)[0, 0]
        padded = F.pad(batch, (reach,) * 4, mode=PADDING_MODES.get(border, border))
        convolution = F.conv2d(padded, kernel[None, None], stride=stride, dilation=dilation)[0, 0]
        query, head = attention.numel() // 3, width**2 // 3
        row = layer.operator(batch).rows(torch.tensor([query]))[0, head, 0]
        bound = float(error_bound(layer, float(image.min()), float(image.max())))
    return {
        "geometry": {"border": border, "stride": stride, "dilation": dilation, "width": width},
        "alpha": alpha,
        "image": {"height": 9, "width": 8, "data": image.flatten().tolist()},
        "kernel": kernel.flatten().tolist(),
        "centres": layer.encoding.centres.tolist(),
        "attention": attention.flatten().tolist(),
        "convolution": convolution.flatten().tolist(),
        "row": {"query": [query // attention.shape[1], query % attention.shape[1]], "head": head, "data": row.tolist()},
        "error": float((attention - convolution).abs().max()),
        "bound": bound,
    }


def theorem() -> dict[str, Any]:
    """Return all settings of the bench that are compared, and attention masses off the nearest key."""
    settings = [(border, *rest) for border in get_args(Border) for rest in ((1, 1, 3, 1.5, 0.0), (2, 1, 3, 0.4, 0.3))]
    settings += [("renormalise", 3, 2, 3, 40.0, 0.0), ("zero", 1, 1, 5, 6.0, 0.0), ("reflect", 2, 3, 3, 0.1, 0.45)]
    offsets = torch.tensor([[0.0, 0.0], [0.3, -0.2], [0.5, 0.1]], dtype=torch.float64)
    masses = [
        {"alpha": alpha, "offsets": pair.tolist(), "mass": float(mass_off_nearest(torch.full_like(pair, alpha), pair))}
        for alpha in (0.1, 0.9, 1.0, 1.1, 5.0, 46.0)
        for pair in offsets
    ]
    return {"cases": [bench_case(*setting) for setting in settings], "masses": masses}


def payload() -> tuple[bytes, dict[str, Any]]:
    """Return a payload with a layer of each kind, and rows computed from its numbers."""
    height, width, heads, images, times = 3, 4, 2, 2, 2
    tokens = height * width
    table = torch.stack([_quadratic_table(time, heads, (height, width)) for time in range(times)])
    tensors = {
        "images": (127 + 120 * waves(images, 6, 8, 3)).to(torch.uint8),
        "0.shift_scores": table.float(),
        "0.centres": torch.stack([waves(heads, 2, phase=time) for time in range(times)]).float(),
        "0.precision": torch.stack(
            [_spread(time, heads).square()[..., None] * torch.eye(2) for time in range(times)]
        ).float(),
        "1.query": waves(images, heads, tokens, 5).half(),
        "1.key": waves(images, heads, tokens, 5, step=1.3).half(),
        "1.row_scores": waves(images, heads, tokens, height, step=0.3).half(),
        "1.column_scores": waves(images, heads, tokens, width, step=2.1).half(),
        "2.query": (3 * waves(images, heads, tokens, 1, step=0.2)).half(),
        "2.key": (3 * waves(images, heads, tokens, 1)).half(),
        "2.shift_scores": waves(1, heads, 2 * height - 1, 2 * width - 1, step=0.45).expand(times, -1, -1, -1).float(),
        "3.queries": torch.tensor([1, 7, 10], dtype=torch.int32),
        "3.probabilities": torch.softmax(4 * waves(images, heads, 3, tokens), -1).half(),
        "3.prefix_mass": (0.5 + waves(images, heads, 3) / 4).half(),
        "3.class_rows": torch.softmax(3 * waves(images, heads, 1, tokens, step=0.8), -1).half(),
        "3.class_mass": (0.5 + waves(images, heads, 1, step=1.1) / 4).half(),
    }
    # The last layer has the heads of the first one without their table, and with correlated axes.
    tensors["4.centres"] = tensors["0.centres"].clone()
    tensors["4.precision"] = tensors["0.precision"] + torch.tensor([[0.0, 0.3], [0.3, 0.5]])
    tensors["logits"] = torch.tensor([[0.25, 0.125, 0.0625, 0.5], [0.5, 0.25, 0.125, 0.125]]).log()
    for place, name in enumerate(("zero_logits", "convolution_logits")):
        tensors[f"1.{name}"] = (tensors["logits"][:, None] + waves(images, heads, 4, phase=place)).half()
    kinds = ("positions", "content", "content", "rows", "positions")
    manifest: dict[str, Any] = {
        "format": 1,
        "title": "Waves",
        "library": "0",
        "patch": [2, 2],
        "images": [
            {"name": "image 0", "label": "crest"},
            {"name": "image 1"},
        ],
        "times": ["start", "end"],
        "layers": [_layer(f"layer {index}", kind, heads, (height, width)) for index, kind in enumerate(kinds)],
        "random": True,
        "classes": ["crest", "trough", "flat", "steep"],
    }
    manifest["layers"][4]["scores"] = [0.25, None]
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    rows = [
        {
            "place": place,
            "part": part,
            "row": _row(tensors, kinds[place["layer"]], place, part, (height, width)).tolist(),
        }
        for place, part in _places(kinds)
    ]
    content = save(tensors, metadata={"attnconv": json.dumps(manifest)})
    found = read_payload(content)
    class_rows = [
        {"image": image, "head": head, "row": class_row(found, 3, head, image=image).flatten().tolist()}
        for image, head in product(range(images), range(heads))
    ]
    return content, {"rows": rows, "maps": _maps(found), "class_rows": class_rows}


def _maps(found: Payload) -> list[dict[str, Any]]:
    """Return what the model explorer shows, computed by the library: rows of other heads, and means over images."""
    images = len(found.names)
    maps = []
    for (index, layer), query in product(enumerate(found.layers), (1, 10)):
        for part in PARTS if layer.kind == "content" else ("both",):
            rows = [attention_row(found, index, 0, query, image=image, time=0, part=part) for image in range(images)]
            place = {"layer": index, "head": 0, "query": query}
            known = {
                "rows": [row.flatten().tolist() for row in rows],
                "mean": torch.stack(rows).mean(0).flatten().tolist(),
            }
            maps.append({"place": place, "part": part, **known})
    return maps


def _layer(name: str, kind: str, heads: int, sizes: tuple[int, int]) -> dict[str, Any]:
    statistics = {
        "heads": {"entropy": [0.25 * head if head else None for head in range(heads)]},
        "layer": {"span": None},
    }
    return {
        "name": name,
        "kind": kind,
        "heads": heads,
        "sizes": list(sizes),
        "prefix": int(kind == "rows"),
        "border": "none",
        "encoding": "quadratic" if kind == "positions" else "learned",
        "dilated": False,
        "statistics": statistics,
    }


def _places(kinds: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    parts = {"positions": ("both",), "content": ("both", "content", "position"), "rows": ("both",)}
    return [
        ({"layer": layer, "head": 1, "query": 7, "image": 1, "time": time}, part)
        for layer, kind in enumerate(kinds)
        for part in parts[kind]
        for time in ((0, 0.25, 1) if kind == "positions" else (1,))
    ]


def _spread(time: int, heads: int) -> Tensor:
    return 1.2 + waves(heads, 1, phase=time) / 4


def _quadratic_table(time: int, heads: int, sizes: tuple[int, int]) -> Tensor:
    """Return the scores of the library's `Quadratic` encoding for every shift."""
    encoding = Quadratic(heads, dims=2).double()
    with torch.no_grad():
        encoding.centres.copy_(waves(heads, 2, phase=time))
        encoding.spread.copy_(_spread(time, heads))
        down, across = (
            encoding.axis_scores(axis, torch.arange(1.0 - size, size, dtype=torch.float64)[None])[:, 0]
            for axis, size in enumerate(sizes)
        )
    return down[:, :, None] + across[:, None, :]


def _row(tensors: dict[str, Tensor], kind: str, place: dict[str, Any], part: str, sizes: tuple[int, int]) -> Tensor:
    """Return one row of probabilities, computed in float64 by the formulas from the payload's numbers."""
    layer, head, query, image = (place[name] for name in ("layer", "head", "query", "image"))
    wide = {name.partition(".")[2]: value.double() for name, value in tensors.items() if name.startswith(f"{layer}.")}
    if kind == "rows":
        return wide["probabilities"][image, head, wide["queries"].long().tolist().index(query)]
    scores = torch.zeros(sizes, dtype=torch.float64)
    if kind == "positions":
        before, after = (_shift_scores(wide, time, head, query, sizes) for time in (0, 1))
        return ((1 - place["time"]) * before + place["time"] * after).flatten().softmax(0)
    if "query" in wide and part != "position":
        scores += (wide["key"][image, head] @ wide["query"][image, head, query]).reshape(sizes)
    if "shift_scores" in wide and part != "content":
        scores += _shift_scores(wide, place["time"], head, query, sizes)
    if "row_scores" in wide and part != "content":
        scores += wide["row_scores"][image, head, query][:, None] + wide["column_scores"][image, head, query][None, :]
    return scores.flatten().softmax(0)


def _shift_scores(wide: dict[str, Tensor], time: int, head: int, query: int, sizes: tuple[int, int]) -> Tensor:
    """Return the scores of a query from a table or, key by key, of a Gaussian head."""
    (height, width), (row, column) = sizes, divmod(query, sizes[1])
    if "shift_scores" in wide:
        top, left = height - 1 - row, width - 1 - column
        return wide["shift_scores"][time, head, top : top + height, left : left + width]
    scores = torch.zeros(sizes, dtype=torch.float64)
    for y, x in product(range(height), range(width)):
        off = torch.tensor([y - row, x - column], dtype=torch.float64) - wide["centres"][time, head]
        scores[y, x] = -0.5 * off @ wide["precision"][time, head] @ off
    return scores


def main() -> None:
    """Write all fixtures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "theorem.json").write_text(json.dumps(theorem()) + "\n", encoding="utf-8")
    content, rows = payload()
    (FOLDER / "payload.safetensors").write_bytes(content)
    (FOLDER / "payload.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
