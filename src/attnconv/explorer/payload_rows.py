"""Probabilities from a payload: the reference for what the page shows, in float64.

p[k] = softmax over tokens k of ( content(q, k) + position(q, k) )        or of either part alone
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.explorer.payload_read import Payload, PayloadLayer

PARTS = ("both", "content", "position")


def attention_row(
    payload: Payload,
    layer: int,
    head: int,
    query: int,
    *,
    image: int = 0,
    time: int = -1,
    part: str = "both",
) -> Float64[Tensor, "height width"]:
    """Probabilities of one query of one head over the tokens of the image.

    Args:
        payload: As `read_payload` gives it.
        layer: Number of the layer, from 0.
        head: Number of the head, from 0.
        query: Flat index of the query's token, row-major.
        image: Number of the image; without effect where no image enters.
        time: Moment of the training, the last one by default; without effect but on tables of positions.
        part: Which scores the softmax sees: `both`, `content` or `position`. Stored rows have `both` only.

    Returns:
        The row. It sums to 1, as far as its half precision goes where rows are stored (to 0 without mass on the image).

    Raises:
        ValueError: A number is out of range, or the layer has no such part or has not stored the query.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import payload, read_payload
        >>> found = read_payload(payload(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5)))
        >>> tuple(attention_row(found, 0, 1, 7).shape)
        (4, 5)
    """
    chosen = payload.layers[_index("layer", layer, len(payload.layers))]
    head = _index("head", head, chosen.heads)
    height, width = chosen.sizes
    query = _index("query", query, height * width)
    if part not in PARTS:
        raise ValueError(bad("part", f"must be one of {', '.join(PARTS)}", repr(part)))
    if chosen.kind == "rows":
        return _stored(chosen, head, query, image, part).unflatten(0, (height, width))
    scores = []
    if part != "position" and "query" in chosen.tensors:
        queries, keys = (_of_image(chosen, name, image)[head].double() for name in ("query", "key"))
        scores.append((keys @ queries[query]).unflatten(0, (height, width)))
    if part != "content":
        scores += _positions(chosen, head, query, image, time)
    if not scores:
        raise ValueError(bad("part", f"must be one that layer {chosen.name!r} has", repr(part)))
    total: Tensor = sum(scores[1:], scores[0])
    return torch.softmax(total.flatten(), 0).unflatten(0, (height, width))


def _positions(layer: PayloadLayer, head: int, query: int, image: int, time: int) -> list[Tensor]:
    """Position scores over the grid; empty where the layer has none."""
    height, width = layer.sizes
    row, column = divmod(query, width)
    if "shift_scores" in layer.tensors:
        table = layer.tensors["shift_scores"]
        moment = table[_index("time", time, len(table), negative=True), head].double()
        return [moment[height - 1 - row : 2 * height - 1 - row, width - 1 - column : 2 * width - 1 - column]]
    if "row_scores" in layer.tensors:
        rows, columns = (
            _of_image(layer, name, image)[head, query].double() for name in ("row_scores", "column_scores")
        )
        return [rows[:, None] + columns]
    return []


def _stored(layer: PayloadLayer, head: int, query: int, image: int, part: str) -> Tensor:
    if part != "both":
        raise ValueError(bad("part", f"must be both for the stored rows of layer {layer.name!r}", repr(part)))
    places = (layer.tensors["queries"] == query).nonzero().flatten()
    if len(places) == 0:
        known = layer.tensors["queries"].tolist()
        some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ValueError(bad("query", f"must be one that layer {layer.name!r} has stored ({some})", query))
    return _of_image(layer, "probabilities", image)[head, places[0]].double()


def _of_image(layer: PayloadLayer, name: str, image: int) -> Tensor:
    tensor = layer.tensors[name]
    return tensor[0 if len(tensor) == 1 else _index("image", image, len(tensor))]


def _index(name: str, value: int, count: int, *, negative: bool = False) -> int:
    if not (-count if negative else 0) <= value < count:
        raise ValueError(bad(name, f"must lie below {count}", value))
    return value
