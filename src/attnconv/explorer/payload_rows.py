"""Compute attention rows from a payload, in float64; they are the reference for the page's own computation.

    p[k] = softmax over tokens k of ( content(q, k) + position(q, k) )        or of only one of them

For the shift d = k - q, the position score of a Gaussian head with centre c and precision matrix P is
-1/2 (d - c)^T P (d - c); otherwise, it is an entry of a table, or the sum of a row score and a column score. Between
two snapshots, the scores of shifts are interpolated linearly, and therefore so are P and P c.
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
    time: int | float = -1,
    part: str = "both",
) -> Float64[Tensor, "height width"]:
    """Compute the attention probabilities of one query of one head over the tokens of the image.

    Args:
        payload: A payload from `read_payload`.
        layer: Index of the layer, from 0.
        head: Index of the head, from 0.
        query: Flat row-major index of the query's token, from 0.
        image: Index of the image, from 0; ignored for layers of kind `positions`.
        time: Index of the snapshot, from 0 (-1 for the last one), or a number between two of them; applies to tables of
            shifts and to Gaussian heads, since other scores are stored only for the last snapshot.
        part: Scores in the softmax: `both`, `content` or `position`. Layers of kind `rows` have only `both`.

    Returns:
        The probabilities, normalised over the tokens of the image: their sum is 1 (up to float16 rounding for stored
        rows), or 0 if the query attends to none of these tokens.

    Raises:
        ValueError: If an index is out of range, the layer does not have this part, or the query is not stored.

    Example:
        >>> from attnconv.explorer import example, read_payload
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
        return _of_image(chosen.tensors[name], image)[head].double()

    if chosen.kind == "rows" and part == "both":
        return of_head("probabilities")[_stored(chosen, query)].unflatten(0, chosen.sizes)
    scores = []
    if part != "position" and "query" in chosen.tensors:
        scores.append((of_head("key") @ of_head("query")[query]).unflatten(0, chosen.sizes))
    if part != "content" and ("centres" in chosen.tensors or "shift_scores" in chosen.tensors):
        scores += [share * _shift_scores(chosen, at, head, query) for at, share in _snapshots(time, len(payload.times))]
    if part != "content" and "row_scores" in chosen.tensors:
        scores.append(of_head("row_scores")[query][:, None] + of_head("column_scores")[query])
    if not scores:
        raise ValueError(bad("part", f"must be a part of the scores of layer {chosen.name!r}", repr(part)))
    return torch.softmax(torch.stack(scores).sum(0).flatten(), 0).unflatten(0, chosen.sizes)


def class_row(
    payload: Payload, layer: int, head: int, token: int = 0, *, image: int = 0
) -> Float64[Tensor, "height width"]:
    """Return the attention of a class token (or register) over the tokens of the image, normalised over these tokens.

    Args:
        payload: A payload from `read_payload`.
        layer: Index of the layer, from 0.
        head: Index of the head, from 0.
        token: Index of the token among those before the image's tokens, from 0; usually, 0 is the class token.
        image: Index of the image, from 0.

    Raises:
        ValueError: If an index is out of range, or the layer has no attention of class tokens.
    """
    chosen = payload.layers[_index("layer", layer, len(payload.layers))]
    rows = chosen.tensors.get("class_rows")
    if rows is None:
        raise ValueError(bad("layer", "must have the attention of class tokens", repr(chosen.name)))
    head, token = _index("head", head, chosen.heads), _index("token", token, chosen.prefix)
    return _of_image(rows, image)[head, token].double().unflatten(0, chosen.sizes)


def _shift_scores(layer: PayloadLayer, time: int, head: int, query: int) -> Float64[Tensor, "height width"]:
    """Return the scores of one query at a snapshot, from Gaussian heads or, in older payloads, from their table."""
    (height, width), (row, column) = layer.sizes, divmod(query, layer.sizes[1])
    if "shift_scores" in layer.tensors:
        top, left = height - 1 - row, width - 1 - column
        return layer.tensors["shift_scores"][time, head, top : top + height, left : left + width].double()
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in layer.sizes)
    keys = torch.stack(torch.meshgrid(rows - row, columns - column, indexing="ij"), -1)
    off = keys - layer.tensors["centres"][time, head].double()
    return -0.5 * ((off @ layer.tensors["precision"][time, head].double()) * off).sum(-1)


def _of_image(tensor: Tensor, image: int) -> Tensor:
    return tensor[0 if len(tensor) == 1 else _index("image", image, len(tensor))]


def _snapshots(time: int | float, count: int) -> list[tuple[int, float]]:
    """Return the snapshots around a time with their weights, which sum to 1."""
    if not -count <= time <= count - 1 or (time < 0 and time != int(time)):
        raise ValueError(bad("time", f"must be from 0 to {count - 1}, or an integer from {-count} to -1", time))
    first = int(time) % count
    share = max(0.0, time - first)
    return [(first, 1 - share), *([(first + 1, share)] if share > 0 else [])]


def _stored(layer: PayloadLayer, query: int) -> int:
    """Return the index of a query's row among the stored rows."""
    known = layer.tensors["queries"].tolist()
    if query not in known:
        some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ValueError(bad("query", f"must be a stored query of layer {layer.name!r} ({some})", query))
    return known.index(query)


def _index(name: str, value: int, count: int) -> int:
    if not 0 <= value < count:
        raise ValueError(bad(name, f"must be from 0 to {count - 1}", value))
    return value
