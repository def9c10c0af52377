"""The selection of the page in Python: a head of a layer, a query, an image and a part of the scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, SupportsIndex, TypeAlias, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.explorer.payload_format import Payload, PayloadLayer
from attnconv.explorer.payload_rows import attention_row

Place: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Tensor  # row and column
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


@final
@dataclass(frozen=True)
class Selection:
    """One head and one query of a payload, as the page shows them.

    Attributes:
        layer: Number of the layer, from 0.
        name: Of the layer, in the model.
        head: Number of the head, from 0: the enlarged one, or the last enlarged one.
        query: Row and column of the query, in tokens of the layer. Where not every row is stored, the nearest that is.
        image: Number of the image; None for the mean over all.
        time: Number of the moment of the training.
        part: Scores in the softmax.
    """

    layer: Index
    name: str
    head: Index
    query: tuple[Index, Index]
    image: Index | None
    time: Index
    part: Literal["both", "content", "position"]


def selection_in(payload: Payload, told: object) -> Selection | None:
    """The selection in a page's message, which is not trusted; None where it is not one of the payload."""
    try:
        found = msgspec.convert({**told, "name": ""} if isinstance(told, Mapping) else told, Selection)
    except msgspec.ValidationError:
        return None
    if found.layer >= len(payload.layers):
        return None
    layer = payload.layers[found.layer]
    fits = (
        found.head < layer.heads
        and all(at < size for at, size in zip(found.query, layer.sizes, strict=True))
        and (found.image is None or found.image < max(1, len(payload.names)))
        and found.time < len(payload.times)
    )
    return replace(found, name=layer.name) if fits else None


def attention_of(payload: Payload, selection: Selection) -> Float64[Tensor, "height width"]:
    """Probabilities of a selection over the tokens: one row, or the mean of the rows of all images."""
    row, column = selection.query
    query = row * payload.layers[selection.layer].sizes[1] + column
    images = range(max(1, len(payload.names))) if selection.image is None else (selection.image,)
    place: dict[str, Any] = {"time": selection.time, "part": selection.part}
    rows = [attention_row(payload, selection.layer, selection.head, query, image=image, **place) for image in images]
    return torch.stack(rows).mean(0)


def question(
    payload: Payload,
    shown: Selection | None,
    *,
    pending: Mapping[str, Any] = MappingProxyType({}),
    layer: SupportsIndex | str | None,
    head: SupportsIndex | None,
    query: Place | None,
    image: SupportsIndex | None,
) -> dict[str, Any]:
    """The message that asks a page for the places of `Explorer.select`.

    It repeats the pending message, the one before if the page has not answered it: the page needs the last one only.
    """
    before = pending.get("layer", 0 if shown is None else shown.layer)
    index = before if layer is None else _layer_number(payload, layer)
    chosen = payload.layers[index]
    message = dict(pending)
    if layer is not None or head is not None or query is not None:
        message["layer"] = index
    if head is not None:
        message["head"] = whole("head", head, 0, chosen.heads - 1)
    elif layer is not None:
        last = pending.get("head", 0 if shown is None else shown.head)
        message["head"] = last if last < chosen.heads else 0
    if query is not None:
        message["query"] = _place(query, chosen)
    elif "query" in pending:  # the token at the middle of the pending one, as the page does it
        sizes = zip(pending["query"], payload.layers[before].sizes, chosen.sizes, strict=True)
        message["query"] = [(2 * at + 1) * new // (2 * old) for at, old, new in sizes]
    if image is not None:
        message["image"] = whole("image", image, 0, len(payload.names) - 1)
    return message


def _layer_number(payload: Payload, layer: SupportsIndex | str) -> int:
    names = [known.name for known in payload.layers]
    if not isinstance(layer, str):
        return whole("layer", layer, 0, len(names) - 1)
    if layer not in names:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(bad("layer", f"must be one of the payload's ({some})", repr(layer)))
    return names.index(layer)


def _place(query: object, layer: PayloadLayer) -> list[int]:
    listed = query.tolist() if isinstance(query, np.ndarray | Tensor) else query
    height, width = layer.sizes
    try:
        row, column = listed if isinstance(listed, list | tuple) else ()
        return [whole("query", row, 0, height - 1), whole("query", column, 0, width - 1)]
    except (TypeError, ValueError) as error:
        requirement = f"must be (row, column) on the {height} x {width} tokens of layer {layer.name!r}"
        raise ValueError(bad("query", requirement, repr(query))) from error
