"""The page itself: one HTML file, built from `web/` and part of the wheel, and the two ways to give it a payload.

embedded     the payload in base64 at the page's end: a static export, a notebook
served       a mark in the page's head that says: ask the server for it, and whether the server takes images as well
"""

import base64
import re
from pathlib import Path

from attnconv._util.errors import bad

PACKAGED = Path(__file__).with_name("page.html")
BUILT = Path(__file__).resolve().parents[3] / "web" / "dist" / "index.html"  # in a checkout
SERVER_MARK = '<meta name="attnconv-server" content="{}">'
_SCRIPT = '<script type="application/octet-stream" id="attnconv-payload">{}</script>\n'


def find_page() -> str:
    """The page's HTML: that of the wheel, or in a checkout the one that `make page` built.

    Raises:
        FileNotFoundError: There is none.
    """
    for path in (PACKAGED, BUILT):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    fix = "In a checkout, build it with `make page`, which needs Node 20 or newer; a wheel of a release holds it."
    raise FileNotFoundError(bad("page", "must be part of the package", f"nothing at {PACKAGED} or {BUILT}", fix))


def with_payload(page: str, content: bytes) -> str:
    """The page with a payload in it, complete in itself.

    Args:
        page: HTML, as `find_page` gives it.
        content: The payload's bytes.

    Raises:
        ValueError: The page has no end of its body.

    Example:
        >>> with_payload("<body>page</body>", b"bytes").splitlines()[0]
        '<body>page<script type="application/octet-stream" id="attnconv-payload">Ynl0ZXM=</script>'
    """
    place = page.rfind("</body>")  # the last one: a script in the page may hold the word
    if place < 0:
        raise ValueError(bad("page", "must hold </body>", f"{len(page)} characters without it"))
    script = _SCRIPT.format(base64.b64encode(content).decode("ascii"))
    return page[:place] + script + page[place:]


def with_server(page: str, *, images: bool) -> str:
    """The page with the mark that a server gave it, which makes it ask for `payload`.

    Args:
        page: HTML, as `find_page` gives it.
        images: Whether the server takes pictures: without, the page offers no field for them.

    Raises:
        ValueError: The page has no head.

    Example:
        >>> with_server("<head></head>", images=True)
        '<head><meta name="attnconv-server" content="images"></head>'
        >>> with_server("<head></head>", images=False)
        '<head><meta name="attnconv-server" content="payload"></head>'
    """
    head = re.search(r"<head(\s[^>]*)?>", page)
    if head is None:
        raise ValueError(bad("page", "must hold <head>", f"{len(page)} characters without it"))
    return page[: head.end()] + SERVER_MARK.format("images" if images else "payload") + page[head.end() :]
