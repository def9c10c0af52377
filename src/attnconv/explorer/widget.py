"""The channel between a page in a notebook and Python: a widget, for those who have anywidget.

    page -> widget.js -> told          what is looked at, as the page's numbers
    asked -> widget.js -> page         where it is to look

The page itself stays in the cell's HTML output, which a saved notebook keeps and shows without a kernel; a widget's
view it would lose. The widget finds the output's frame by its mark. It can also be shown, as a page in a frame of its
own.
"""

import functools
from pathlib import Path
from typing import Any, final

SCRIPT = Path(__file__).with_name("widget.js")


@functools.cache
def channel_class() -> Any:
    """The widget's class, made when first asked for: anywidget is optional, and this module can be read without it.

    Raises:
        ImportError: anywidget is not installed.
    """
    import anywidget
    import traitlets

    @final
    class Channel(anywidget.AnyWidget):
        """Both directions, as traits that anywidget keeps equal in Python and in the notebook.

        Attributes:
            mark: Of the frames that belong to it, in their attribute `data-attnconv`.
            told: What the page said last, unchecked; None for nothing.
            asked: How often the page was asked, without which asking twice for the same place would be no change; and
                the last message to it, without its type, empty for none.
            page: HTML of the page, empty until this widget itself is to be shown.
            title: Of its own frame.
            height: Of its own frame, in pixels.
            sandbox: What its own frame may do.
        """

        _esm = SCRIPT.read_text(encoding="utf-8")
        mark: Any = traitlets.Unicode().tag(sync=True)
        told: Any = traitlets.Any(default_value=None, allow_none=True).tag(sync=True)
        asked: Any = traitlets.List(default_value=[0, {}]).tag(sync=True)
        page: Any = traitlets.Unicode().tag(sync=True)
        title: Any = traitlets.Unicode().tag(sync=True)
        height: Any = traitlets.Int().tag(sync=True)
        sandbox: Any = traitlets.Unicode().tag(sync=True)

    return Channel
