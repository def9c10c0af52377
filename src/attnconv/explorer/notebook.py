"""The explorer in a notebook: an iframe in the HTML output, which is saved with the notebook and needs no kernel.

    page -> widget.js -> told          the page's selection
    asked -> widget.js -> page         the selection to show

If anywidget is installed, a widget connects Python to that iframe, which it finds by its `data-attnconv` mark.
"""

import contextlib
import functools
import html
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsIndex, TypeAlias, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.exports import missing
from attnconv._util.value_checks import whole
from attnconv.explorer.html_page import find_page, with_payload
from attnconv.explorer.payload_format import Payload, PayloadLayer, read_payload
from attnconv.explorer.payload_rows import attention_row
from attnconv.explorer.payload_write import payload

HEIGHT = 900  # height of the frame in pixels
SANDBOX = "allow-scripts allow-downloads"  # no access to the notebook around the frame
Place: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Tensor  # row and column
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


@final
@dataclass(frozen=True)
class Selection:
    """The head and query that the page shows. All indices start at 0.

    Attributes:
        layer: Index of the layer.
        name: Name of the layer in the model.
        head: Index of the enlarged head or, if no head is enlarged, of the last one that was.
        query: Row and column of the query on the layer's grid, or of the nearest query that is stored.
        image: Index of the image; None for the mean over all images.
        time: Index of the snapshot, or a number between two indices while the training is played.
        part: Scores used in the softmax: `both`, or only those that depend on `content` or on `position`.
    """

    layer: Index
    name: str
    head: Index
    query: tuple[Index, Index]
    image: Index | None
    time: Index | Annotated[float, msgspec.Meta(ge=0)]
    part: Literal["both", "content", "position"]


@final
class Explorer:
    """The explorer page with a model's data (the payload), displayed if this object is the last value of a cell.

    While the kernel runs, `selection` and `attention` return what the page shows, and `select` changes it. The user's
    changes become visible to Python only between cells. These members and `widget` require the `notebook` extra.

    Args:
        content: The payload's bytes.
        height: Height of the frame in pixels, at least 200.

    Attributes:
        content: The payload's bytes; `export(explorer.content, "folder")` writes them as a page.

    Raises:
        ValueError: If the payload is invalid, or `height` is below 200.
        FileNotFoundError: If the package contains no page.
    """

    def __init__(self, content: bytes, *, height: int = HEIGHT) -> None:
        self.content = content
        height = whole("height", height, 200)
        self._payload = read_payload(content)
        self._page = with_payload(find_page(), content)
        title = f"attnconv explorer: {self._payload.title}"
        self._frame: dict[str, Any] = {"mark": uuid.uuid4().hex, "title": title, "height": height, "sandbox": SANDBOX}
        self._pending: dict[str, Any] = {}  # the last request, until the page answers it

    @property
    def selection(self) -> Selection | None:
        """The page's current selection; None until the page has sent it, and while it shows a different payload."""
        return selection_in(self._payload, self._channel.told)

    def attention(self) -> Float64[Tensor, "height width"]:
        """Return the attention probabilities of the selected head and query over the tokens.

        The result is `attention_row` for the selection, averaged over all images if the page shows their mean.

        Raises:
            ValueError: If nothing is selected, or the layer does not have the selected part.
        """
        selection = self.selection
        if selection is None:
            fix = "Make the explorer the last value of a cell, and read the selection in a later cell."
            raise ValueError(bad("selection", "must have been sent by the page", "none", fix))
        return attention_of(self._payload, selection)

    def select(
        self,
        *,
        layer: SupportsIndex | str | None = None,
        head: SupportsIndex | None = None,
        query: Place | None = None,
        image: SupportsIndex | None = None,
    ) -> None:
        """Change the page's selection. Indices start at 0; None leaves a value unchanged.

        If the page is not displayed yet, the change takes effect when it is displayed. Consecutive calls are combined.

        Args:
            layer: Index of the layer, or its name in the model. One of its heads is enlarged.
            head: Index of the head to enlarge, in `layer` or, if that is None, in the selected layer.
            query: Row and column on the layer's grid of tokens. The query is locked until the user unlocks it.
            image: Index of the image.

        Raises:
            TypeError, ValueError: If the payload has no such layer, head, query or image.
        """
        places: dict[str, Any] = {"layer": layer, "head": head, "query": query, "image": image}
        self._pending = question(self._payload, self.selection, pending=self._pending, **places)
        self._channel.asked = [self._channel.asked[0] + 1, self._pending]

    @property
    def widget(self) -> Any:
        """The page as an anywidget, for ipywidgets layouts and for front ends that start a widget only if displayed."""
        self._channel.page = self._page  # sent on demand: the HTML output already contains the page
        return self._channel

    @functools.cached_property
    def _channel(self) -> Any:
        channel = channel_class()(**self._frame)
        channel.observe(self._hear, names="told")
        return channel

    def _hear(self, change: Any) -> None:
        """Clear the pending request: messages after the first answer it or follow a later action of the user."""
        if change.old is not None:
            self._pending = {}

    def _repr_html_(self) -> str:
        source, title = html.escape(self._page), html.escape(self._frame["title"])
        style = f"width: 100%; height: {self._frame['height']}px; border: 0"
        known = f'data-attnconv="{self._frame["mark"]}" title="{title}" style="{style}"'
        return f'<iframe srcdoc="{source}" sandbox="{SANDBOX}" {known}></iframe>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return the iframe of `_repr_html_`, and open the channel if anywidget is installed."""
        with contextlib.suppress(ImportError):
            _ = self._channel
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def __repr__(self) -> str:
        return f"Explorer({self._payload.title!r}, {len(self.content):,} bytes)"


@functools.cache
def channel_class() -> Any:
    """Return the widget's class; anywidget synchronises its traits between Python and the notebook."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise missing(error) or error from error

    @final
    class Channel(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("widget.js").read_text(encoding="utf-8")
        mark: Any = traitlets.Unicode().tag(sync=True)
        told: Any = traitlets.Any(default_value=None, allow_none=True).tag(sync=True)  # last message, not validated
        # The number of requests and the last one; without the number, repeating a request would not be a change.
        asked: Any = traitlets.List(default_value=[0, {}]).tag(sync=True)
        page: Any = traitlets.Unicode().tag(sync=True)
        title: Any = traitlets.Unicode().tag(sync=True)
        height: Any = traitlets.Int().tag(sync=True)
        sandbox: Any = traitlets.Unicode().tag(sync=True)

    return Channel


def explore(
    model: nn.Module, images: Tensor | None = None, *, title: str = "", height: int = HEIGHT, **options: Any
) -> Explorer:
    """Show the attention heads of a model in a notebook.

    Args:
        model: Any module that `visit_attention` can read.
        images: Input of the model, (b, c, height, width); None if all attention depends on positions only. The
            notebook stores the queries and keys of every image, so pass only a few images.
        title: Heading; if empty, the name of the model's class.
        height: Height of the frame in pixels.
        options: Further arguments of `payload`, such as `pictures`, `classes`, `snapshots` and `layers`.

    Returns:
        An object that notebooks display as the page. For errors, see `payload` and `Explorer`.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> explore(SelfAttention2d(3, 4, heads=9))  # doctest: +SKIP
        Explorer('SelfAttention2d', 16,384 bytes)
    """
    return Explorer(payload(model, images, title=title, **options), height=height)


def selection_in(payload: Payload, told: object) -> Selection | None:
    """Validate the selection in a page's message; return None if the payload has no such selection."""
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
        and found.time <= len(payload.times) - 1
    )
    return replace(found, name=layer.name) if fits else None


def attention_of(payload: Payload, selection: Selection) -> Float64[Tensor, "height width"]:
    """Return the probabilities of a selection over the tokens: one row, or the mean of the rows of all images."""
    row, column = selection.query
    query = row * payload.layers[selection.layer].sizes[1] + column
    images = range(max(1, len(payload.names))) if selection.image is None else (selection.image,)
    place: dict[str, Any] = {"time": selection.time, "part": selection.part}
    rows = [attention_row(payload, selection.layer, selection.head, query, image=image, **place) for image in images]
    return torch.stack(rows).mean(0)


def question(payload: Payload, shown: Selection | None, *, pending: Mapping[str, Any], **places: Any) -> dict[str, Any]:
    """Return the message that asks the page to change its selection, given the arguments of `Explorer.select`.

    It includes the changes of `pending`, an earlier message, so that the page only needs the last message.
    """
    layer, head, query, image = (places.get(name) for name in ("layer", "head", "query", "image"))
    before = pending.get("layer", 0 if shown is None else shown.layer)
    names = [known.name for known in payload.layers]
    if isinstance(layer, str) and layer not in names:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(bad("layer", f"must be a layer of the payload ({some})", repr(layer)))
    place = names.index(layer) if isinstance(layer, str) else layer
    index = before if place is None else whole("layer", place, 0, len(names) - 1)
    chosen, message = payload.layers[index], dict(pending)
    if layer is not None or head is not None or query is not None:
        message["layer"] = index
    if head is not None:
        message["head"] = whole("head", head, 0, chosen.heads - 1)
    elif layer is not None:
        last = pending.get("head", 0 if shown is None else shown.head)
        message["head"] = last if last < chosen.heads else 0
    if query is not None:
        message["query"] = _place(query, chosen)
    elif "query" in pending:  # the token that contains the pending token's centre, as on the page
        sizes = zip(pending["query"], payload.layers[before].sizes, chosen.sizes, strict=True)
        message["query"] = [(2 * at + 1) * new // (2 * old) for at, old, new in sizes]
    if image is not None:
        message["image"] = whole("image", image, 0, len(payload.names) - 1)
    return message


def _place(query: object, layer: PayloadLayer) -> list[int]:
    listed = query.tolist() if isinstance(query, np.ndarray | Tensor) else query
    height, width = layer.sizes
    try:
        row, column = listed if isinstance(listed, list | tuple) else ()
        return [whole("query", row, 0, height - 1), whole("query", column, 0, width - 1)]
    except (TypeError, ValueError) as error:
        requirement = f"must be (row, column), from 0, on the {height} x {width} tokens of layer {layer.name!r}"
        raise ValueError(bad("query", requirement, repr(query))) from error
