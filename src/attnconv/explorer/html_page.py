"""The page itself: one HTML file, built from `web/` and part of the wheel, and the ways to give it a payload.

embedded     the payload in base64 at the page's end: a static export, a notebook
served       a mark in the page's head: the page asks the server for the payload
"""

import base64
import re
from pathlib import Path

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.explorer.payload_format import read_payload

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
    """Embed a payload in the page, which is then complete in itself."""
    head, body, rest = page.rpartition("</body>")  # the last one: a script in the page may hold the word
    return head + _SCRIPT.format(base64.b64encode(content).decode("ascii")) + body + rest


def with_server(page: str, *, images: bool) -> str:
    """Mark the page as served; without `images` it offers no field for pictures."""
    mark = SERVER_MARK.format("images" if images else "payload")
    return re.sub(r"<head(\s[^>]*)?>", lambda head: head[0] + mark, page, count=1)


def export(payload: bytes, folder: str | Path) -> Path:
    """Write a folder that shows a payload without Python: it opens from disk, and any web server can host it.

    Args:
        payload: The bytes that `attnconv.explorer.payload` gives; `payload.safetensors` in the folder.
        folder: Made where it is missing. The two files of an older export are replaced, each in one step.

    Returns:
        The page, `index.html`, with the payload in it.

    Raises:
        ValueError: The payload is broken, or `folder` is a file.
        FileNotFoundError: The package holds no page.
        OSError: The files cannot be written.
    """
    read_payload(payload)
    page = with_payload(find_page(), payload)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(bad("folder", "must be a folder or not exist yet", f"the file {folder}"))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "payload.safetensors", payload)
    write_atomically(folder / "index.html", page.encode())
    return folder / "index.html"
