"""The page in a notebook: an iframe in the cell's HTML output, which stays in a saved notebook and needs no kernel.

    page -> widget.js -> told          the page's selection
    asked -> widget.js -> page         the place to show

Where anywidget is installed, a widget is the channel between that frame, which it finds by its mark, and Python.
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
from attnconv.explorer.payload_format import Payload, PayloadLayer, attention_row, read_payload
from attnconv.explorer.payload_write import payload

HEIGHT = 900  # pixels of the frame
SANDBOX = "allow-scripts allow-downloads"  # no access to the notebook around the frame
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


@final
class Explorer:
    """The page with a payload, shown where it is the last value of a cell.

    While a kernel runs, `selection` and `attention` are what the page shows, and `select` moves it. The page's messages
    arrive between cells, not while one runs. These and `widget` need the extra `notebook`, and raise an `ImportError`
    without it.

    Args:
        content: The payload's bytes.
        height: Height of the frame in pixels, at least 200.

    Attributes:
        content: The same bytes: `export(explorer.content, "folder")` writes them as a page.

    Raises:
        ValueError: The payload is broken, or the frame too low.
        FileNotFoundError: The package holds no page.
    """

    def __init__(self, content: bytes, *, height: int = HEIGHT) -> None:
        self.content = content
        height = whole("height", height, 200)
        self._payload = read_payload(content)
        self._page = with_payload(find_page(), content)
        title = f"attnconv explorer: {self._payload.title}"
        self._frame: dict[str, Any] = {"mark": uuid.uuid4().hex, "title": title, "height": height, "sandbox": SANDBOX}
        self._pending: dict[str, Any] = {}  # the last question until it is answered

    @property
    def selection(self) -> Selection | None:
        """The page's selection; None until the page has sent it, and while it shows another payload."""
        return selection_in(self._payload, self._channel.told)

    def attention(self) -> Float64[Tensor, "height width"]:
        """The probabilities of the selected head and query over the tokens: the page's own numbers, after the softmax.

        They are `attention_row` of the selection, or its mean where the page shows the mean over all images.

        Raises:
            ValueError: Nothing is selected, or the layer has no such part.
        """
        selection = self.selection
        if selection is None:
            fix = "Make the explorer the last value of a cell; it tells once the page is there and that cell has ended."
            raise ValueError(bad("selection", "must have been told by the page", "none", fix))
        return attention_of(self._payload, selection)

    def select(
        self,
        *,
        layer: SupportsIndex | str | None = None,
        head: SupportsIndex | None = None,
        query: Place | None = None,
        image: SupportsIndex | None = None,
    ) -> None:
        """Move the page; what is not given stays as it is. A page that is not shown yet moves once it is.

        Calls that follow each other add up, within a cell and before the page is shown.

        Args:
            layer: Number of the layer, or its name in the model; with it a head is enlarged.
            head: Number of the head to enlarge, of the selected layer if none is given.
            query: Row and column in tokens of the layer; the query stays there until it is released.
            image: Number of the image.

        Raises:
            TypeError, ValueError: The payload has no such layer, head, query or image.
        """
        places: dict[str, Any] = {"layer": layer, "head": head, "query": query, "image": image}
        self._pending = question(self._payload, self.selection, pending=self._pending, **places)
        self._channel.asked = [self._channel.asked[0] + 1, self._pending]

    @property
    def widget(self) -> Any:
        """The page as an anywidget: for layouts of ipywidgets, and front ends that start widgets when shown."""
        self._channel.page = self._page  # sent on demand: the HTML output holds the page already
        return self._channel

    @functools.cached_property
    def _channel(self) -> Any:
        channel = channel_class()(**self._frame)
        channel.observe(self._hear, names="told")
        return channel

    def _hear(self, change: Any) -> None:
        """Every message but the first answers a question or is a later move of the visitor: nothing is pending then."""
        if change.old is not None:
            self._pending = {}

    def _repr_html_(self) -> str:
        """A frame that holds the whole page."""
        source, title = html.escape(self._page), html.escape(self._frame["title"])
        style = f"width: 100%; height: {self._frame['height']}px; border: 0"
        known = f'data-attnconv="{self._frame["mark"]}" title="{title}" style="{style}"'
        return f'<iframe srcdoc="{source}" sandbox="{SANDBOX}" {known}></iframe>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The same frame, with the channel opened where anywidget is installed."""
        with contextlib.suppress(ImportError):
            _ = self._channel
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def __repr__(self) -> str:
        return f"Explorer({self._payload.title!r}, {len(self.content):,} bytes)"


@functools.cache
def channel_class() -> Any:
    """The widget's class, whose traits anywidget keeps equal in Python and in the notebook."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise missing(error) or error from error

    @final
    class Channel(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("widget.js").read_text(encoding="utf-8")
        mark: Any = traitlets.Unicode().tag(sync=True)
        told: Any = traitlets.Any(default_value=None, allow_none=True).tag(sync=True)  # its last message, unchecked
        # The number of questions, since the same one again would be no change, and the last one.
        asked: Any = traitlets.List(default_value=[0, {}]).tag(sync=True)
        page: Any = traitlets.Unicode().tag(sync=True)
        title: Any = traitlets.Unicode().tag(sync=True)
        height: Any = traitlets.Int().tag(sync=True)
        sandbox: Any = traitlets.Unicode().tag(sync=True)

    return Channel


def explore(
    model: nn.Module, images: Tensor | None = None, *, title: str = "", height: int = HEIGHT, **options: Any
) -> Explorer:
    """Show in a notebook what the heads of a model do.

    Args:
        model: Any module with attention that `visit_attention` reads.
        images: Its input, (b, c, height, width); None for a model that looks at positions only. Each image adds its
            queries and keys to the notebook, so take few.
        title: Heading; empty for the model's class.
        height: Height of the frame in pixels.
        options: Further arguments of `payload`: `pictures`, `layers`, `grid`, `prefix`, `snapshots`, `budget`.

    Returns:
        An object that notebooks show as the page. Errors are those of `payload` and `Explorer`.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> explore(SelfAttention2d(3, 4, heads=9))  # doctest: +SKIP
        Explorer('SelfAttention2d', 16,384 bytes)
    """
    return Explorer(payload(model, images, title=title, **options), height=height)


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


def question(payload: Payload, shown: Selection | None, *, pending: Mapping[str, Any], **places: Any) -> dict[str, Any]:
    """The message that asks a page for some places, the arguments of `Explorer.select`.

    It repeats the pending message, the one before if the page has not answered it: the page needs the last one only.
    """
    layer, head, query, image = (places.get(name) for name in ("layer", "head", "query", "image"))
    before = pending.get("layer", 0 if shown is None else shown.layer)
    names = [known.name for known in payload.layers]
    if isinstance(layer, str) and layer not in names:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(bad("layer", f"must be one of the payload's ({some})", repr(layer)))
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
    elif "query" in pending:  # the token at the middle of the pending one, as the page does it
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
        requirement = f"must be (row, column) on the {height} x {width} tokens of layer {layer.name!r}"
        raise ValueError(bad("query", requirement, repr(query))) from error
