"""The page in a notebook.

An object with `_repr_html_`, which any front end shows (Jupyter, JupyterLab, VS Code, Colab, and a notebook saved as
HTML), in an iframe that holds the whole page. It needs no kernel extension, no further package and no server, and what
is shown stays in the saved notebook.

Where anywidget is installed, showing it also opens a channel from the page back to Python (`attnconv.explorer.widget`):
what is looked at, its numbers, and a way to move the page. The page stays HTML all the same: a front end that is given
a widget's view beside the HTML takes the view, and of a view JupyterLab shows an error once the kernel is gone.
"""

import contextlib
import html
import uuid
from typing import Any, SupportsIndex, final

from jaxtyping import Float64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.explorer.html_page import find_page, with_payload
from attnconv.explorer.payload_read import read_payload
from attnconv.explorer.payload_write import Pictures, payload
from attnconv.explorer.selection import Place, Selection, attention_of, question, selection_in
from attnconv.explorer.widget import channel_class

HEIGHT = 900  # pixels of the frame
SANDBOX = (
    "allow-scripts allow-downloads"  # no access to the notebook around the frame: the page's own scripts alone run
)


@final
class Explorer:
    """The page with a payload, shown where it is the last value of a cell.

    Where anywidget is installed (the extra `notebook`) and a kernel runs, `selection` and `attention` say what is
    looked at on the page, and `select` moves it. What the page says arrives between cells, not while one runs.

    Args:
        content: The payload's bytes.
        height: Of the frame, in pixels, at least 200.

    Attributes:
        content: The same bytes: `export(explorer.content, "folder")` writes them as a page.

    Raises:
        ValueError: The payload is broken, or the frame too low.
        FileNotFoundError: The package holds no page.
    """

    def __init__(self, content: bytes, *, height: int = HEIGHT) -> None:
        self.content = content
        self._height = whole("height", height, 200)
        self._payload = read_payload(content)
        self._title = f"attnconv explorer: {self._payload.title}"
        self._page = with_payload(find_page(), content)
        self._mark = uuid.uuid4().hex
        self._channel: Any = None
        self._pending: dict[str, Any] = {}  # what was asked and is not answered: answers arrive between cells
        self._heard = False

    @property
    def selection(self) -> Selection | None:
        """What is looked at on the page; None until the page has told, and while it shows another payload.

        Raises:
            ImportError: The extra `notebook` is not installed.
        """
        return selection_in(self._payload, self._opened("selection").told)

    def attention(self) -> Float64[Tensor, "height width"]:
        """The probabilities that the selected head gives the tokens for the selected query: the page's own numbers.

        They are `attention_row` of the selection, in float64, or its mean where the page shows the mean over all
        images. Where the page shows scores before the softmax, these are the probabilities after it.

        Raises:
            ImportError: The extra `notebook` is not installed.
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

        Calls that follow each other add up, within a cell and before the page is shown. Whole numbers may be Python's,
        numpy's or torch's.

        Args:
            layer: Number of the layer, or its name in the model; with it a head is enlarged.
            head: Number of the head to enlarge, of the selected layer if none is given.
            query: Row and column in tokens of the layer; the query stays there until it is released.
            image: Number of the image.

        Raises:
            ImportError: The extra `notebook` is not installed.
            ValueError: The payload has no such layer, head, query or image.
        """
        channel = self._opened("select")
        places: dict[str, Any] = {"layer": layer, "head": head, "query": query, "image": image}
        self._pending = question(self._payload, self.selection, pending=self._pending, **places)
        channel.asked = [channel.asked[0] + 1, self._pending]

    @property
    def widget(self) -> Any:
        """The page as a widget, of anywidget: for layouts of ipywidgets, and front ends that start widgets when shown.

        Raises:
            ImportError: The extra `notebook` is not installed.
        """
        channel = self._opened("widget")
        channel.page = self._page  # sent when it is wanted: the HTML output holds the page already
        return channel

    def _opened(self, name: str) -> Any:
        """The channel, opened when first asked for: anywidget is imported then."""
        if self._channel is None:
            try:
                made = channel_class()
            except ImportError as error:
                fix = "Install it with: pip install 'attnconv[notebook]'."
                raise ImportError(bad(name, "needs the package anywidget", str(error), fix)) from error
            self._channel = made(mark=self._mark, title=self._title, height=self._height, sandbox=SANDBOX)
            self._channel.observe(self._told, names="told")
        return self._channel

    def _told(self, _change: object) -> None:
        """What the page tells after a question is its answer, or a later move of the visitor.

        Not so the first that it tells: that is where it starts, and only then is it asked.
        """
        if self._heard:
            self._pending = {}
        self._heard = True

    def _repr_html_(self) -> str:
        """A frame that holds the whole page."""
        source, title = html.escape(self._page), html.escape(self._title)
        style = f"width: 100%; height: {self._height}px; border: 0"
        known = f'data-attnconv="{self._mark}" title="{title}" style="{style}"'
        return f'<iframe srcdoc="{source}" sandbox="{SANDBOX}" {known}></iframe>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The same frame, with the channel opened beside it where anywidget is installed."""
        with contextlib.suppress(ImportError):
            self._opened("widget")
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def __repr__(self) -> str:
        return f"Explorer({self._payload.title!r}, {len(self.content):,} bytes)"


def explore(
    model: nn.Module,
    images: Tensor | None = None,
    *,
    title: str = "",
    pictures: Pictures | None = None,
    height: int = HEIGHT,
    **options: Any,
) -> Explorer:
    """Show in a notebook what the heads of a model do.

    Args:
        model: Any module with attention that `visit_attention` reads.
        images: What its forward pass takes, (b, c, height, width); None for a model that looks at positions alone. A
            few are enough: each adds its queries and keys to the notebook.
        title: Heading; empty for the model's class.
        pictures: The images as shown; None makes them from `images`.
        height: Of the frame, in pixels.
        options: Further arguments of `payload`: `layers`, `grid`, `prefix`, `moments`, `budget`.

    Returns:
        An object that notebooks show as the page.

    Raises:
        ValueError, TypeError: As `payload`.
        FileNotFoundError: The package holds no page.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> explore(SelfAttention2d(3, 4, heads=9))  # doctest: +SKIP
        Explorer('SelfAttention2d', 16,384 bytes)
    """
    return Explorer(payload(model, images, title=title, pictures=pictures, **options), height=height)
