"""What is looked at on the page, as Python knows it: a head of a layer, a query, an image and a part of the scores."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, SupportsIndex, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index, is_whole
from attnconv.explorer.payload_read import Payload, PayloadLayer
from attnconv.explorer.payload_rows import PARTS, attention_row

Place: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Tensor  # row and column


@final
@dataclass(frozen=True)
class Selection:
    """One head and one query of a payload, as the page shows them.

    Attributes:
        layer: Number of the layer, from 0.
        name: Of the layer, in the model.
        head: Number of the head, from 0: the enlarged one, or the one that was last.
        query: Row and column of the query, in tokens of the layer. Where not every row is stored, the nearest that is.
        image: Number of the image; None for the mean over all.
        time: Number of the moment of the training.
        part: Which scores the softmax sees: `both`, `content` or `position`.
    """

    layer: int
    name: str
    head: int
    query: tuple[int, int]
    image: int | None
    time: int
    part: str


def selection_in(payload: Payload, told: object) -> Selection | None:
    """The selection that a page told; None where there is none or where it does not fit the payload.

    A page runs in a browser, and what comes from there is data: nothing of it is taken that is not in range.

    Args:
        payload: What the page shows.
        told: Its message: layer, head, query, image, time, part.
    """
    if not isinstance(told, Mapping) or not _below(told.get("layer"), len(payload.layers)):
        return None
    layer = payload.layers[told["layer"]]
    head, query, image, time, part = (told.get(name) for name in ("head", "query", "image", "time", "part"))
    fits = (
        _below(head, layer.heads)
        and _is_place(query, layer.sizes)
        and (image is None or _below(image, max(1, len(payload.names))))
        and _below(time, len(payload.times))
        and part in PARTS
    )
    if not fits:
        return None
    row, column = told["query"]
    return Selection(told["layer"], layer.name, told["head"], (row, column), told["image"], told["time"], told["part"])


def attention_of(payload: Payload, selection: Selection) -> Float64[Tensor, "height width"]:
    """Probabilities of a selection over the tokens of the image, as the page shows them.

    Args:
        payload: What the page shows.
        selection: Of this payload.

    Returns:
        The row; the mean of the rows of all images where `selection.image` is None.

    Raises:
        ValueError: The layer has no such part.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import payload, read_payload
        >>> found = read_payload(payload(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5)))
        >>> place = Selection(0, found.layers[0].name, 1, (1, 2), None, 0, "both")
        >>> torch.equal(attention_of(found, place), attention_row(found, 0, 1, 1 * 5 + 2))
        True
    """
    row, column = selection.query
    query = row * payload.layers[selection.layer].sizes[1] + column
    images = range(max(1, len(payload.names))) if selection.image is None else (selection.image,)
    rows = [
        attention_row(
            payload, selection.layer, selection.head, query, image=image, time=selection.time, part=selection.part
        )
        for image in images
    ]
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
    """The message that asks the page for a place; what is None stays as it is.

    It repeats what was asked before and is not yet answered: a page that sees the last message alone goes to the same
    place as one that saw them all.

    Args:
        payload: What the page shows.
        shown: What is looked at now, or None where the page has not told.
        pending: The message before, of the same payload, where the page has not answered it; else empty.
        layer: Number of the layer, or its name in the model.
        head: Number of the head.
        query: Row and column, in tokens of the layer.
        image: Number of the image.

    Raises:
        ValueError: The payload has no such layer, head, query or image.
    """
    before = pending.get("layer", 0 if shown is None else shown.layer)
    index = before if layer is None else _numbered(payload, layer)
    chosen = payload.layers[index]
    message = dict(pending)
    if layer is not None or head is not None or query is not None:
        message["layer"] = index
    if head is not None:
        message["head"] = _checked("head", head, chosen.heads)
    elif layer is not None:
        last = pending.get("head", 0 if shown is None else shown.head)
        message["head"] = last if last < chosen.heads else 0
    if query is not None:
        message["query"] = _checked_place(query, chosen)
    elif "query" in pending:
        message["query"] = _carried(pending["query"], payload.layers[before].sizes, chosen.sizes)
    if image is not None:
        message["image"] = _checked("image", image, len(payload.names))
    return message


def _numbered(payload: Payload, layer: SupportsIndex | str) -> int:
    names = [one.name for one in payload.layers]
    if not isinstance(layer, str):
        return _checked("layer", layer, len(names))
    if layer not in names:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(bad("layer", f"must be one of the payload's ({some})", repr(layer)))
    return names.index(layer)


def _checked(name: str, value: object, count: int) -> int:
    number = _index(value)
    if not _below(number, count):
        raise ValueError(bad(name, f"must be a whole number from 0, below {count}", repr(value)))
    return cast("int", number)


def _checked_place(query: object, layer: PayloadLayer) -> list[int]:
    listed = query.tolist() if isinstance(query, np.ndarray | Tensor) else query
    place = [_index(at) for at in listed] if isinstance(listed, list | tuple) else None
    if not _is_place(place, layer.sizes):
        height, width = layer.sizes
        requirement = f"must be (row, column) on the {height} x {width} tokens of layer {layer.name!r}"
        raise ValueError(bad("query", requirement, repr(query)))
    return cast("list[int]", place)


def _index(value: object) -> int | None:
    """What Python, numpy or torch means by a whole number, as an int; None for all else, for truth values as well."""
    if not is_index(value) or (isinstance(value, Tensor) and value.dtype == torch.bool):  # torch counts True as 1
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays and tensors say only now whether they hold one whole number
        return None


def _carried(place: Sequence[int], sizes: tuple[int, int], to: tuple[int, int]) -> list[int]:
    """The place on a grid of other sizes that holds the middle of a place on a grid, as the page carries it."""
    return [(2 * at + 1) * new // (2 * size) for at, size, new in zip(place, sizes, to, strict=True)]


def _below(value: object, count: int) -> bool:
    return is_whole(value, 0) and value < count  # type: ignore[operator]


def _is_place(value: object, sizes: tuple[int, int]) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and all(_below(at, size) for at, size in zip(value, sizes, strict=True))  # type: ignore[call-overload]
