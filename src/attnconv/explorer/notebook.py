"""The page in a notebook.

An object with `_repr_html_`, which any front end shows (Jupyter, JupyterLab, VS Code, Colab, and a notebook saved as
HTML), in an iframe that holds the whole page. It needs no kernel extension, no further package and no server, and what
is shown stays in the saved notebook. A widget with a channel back to Python (anywidget) could say which query is looked
at, which no function here asks for; its price is a dependency, and figures that are empty without a running kernel.
"""

import html
from typing import Any, final

from torch import Tensor, nn

from attnconv._values import whole
from attnconv.explorer.building import Pictures, payload
from attnconv.explorer.page import find_page, with_payload
from attnconv.explorer.reading import read_payload

HEIGHT = 900  # pixels of the frame


@final
class Explorer:
    """The page with a payload, shown where it is the last value of a cell.

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
        self._title = read_payload(content).title
        self._page = with_payload(find_page(), content)

    def _repr_html_(self) -> str:
        """A frame without access to the notebook around it: only the page's own scripts run in it."""
        source, title = html.escape(self._page), html.escape(f"attnconv explorer: {self._title}")
        style = f"width: 100%; height: {self._height}px; border: 0"
        sandbox = "allow-scripts allow-downloads"
        return f'<iframe srcdoc="{source}" sandbox="{sandbox}" title="{title}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"Explorer({self._title!r}, {len(self.content):,} bytes)"


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
