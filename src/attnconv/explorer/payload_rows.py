"""Probabilities from a payload, in float64: the reference for the page.

p[k] = softmax over tokens k of ( content(q, k) + position(q, k) )        or of either part only
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.explorer.payload_format import Payload, PayloadLayer

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
        image: Number of the image; ignored for tables of positions.
        time: Moment of the training, the last one by default; ignored except for tables of positions.
        part: Scores in the softmax: `both`, `content` or `position`. Stored rows have `both` only.

    Returns:
        The row. It sums to 1, up to half precision where rows are stored (to 0 without mass on the image).

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
        raise ValueError(bad("part", f"must be one that layer {chosen.name!r} has", repr(part)))
    return torch.softmax(torch.stack(scores).sum(0).flatten(), 0).unflatten(0, chosen.sizes)


def _stored(layer: PayloadLayer, query: int) -> int:
    """The place of a query's row."""
    known = layer.tensors["queries"].tolist()
    if query not in known:
        some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ValueError(bad("query", f"must be one that layer {layer.name!r} has stored ({some})", query))
    return known.index(query)


def _index(name: str, value: int, count: int, *, negative: bool = False) -> int:
    if not (-count if negative else 0) <= value < count:
        raise ValueError(bad(name, f"must lie below {count}", value))
    return value
