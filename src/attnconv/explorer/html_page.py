"""The explorer's page, an HTML file that is built from `web/` and shipped in the wheel, and sources of its payload.

embedded     the payload in base64 at the end of the page: static exports and notebooks
served       a meta tag in the page's head: the page requests the payload from the server
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
    """Return the HTML of the explorer page, from the package or, in a clone, from the output of `make page`.

    Raises:
        FileNotFoundError: If the page has not been built.
    """
    for path in (PACKAGED, BUILT):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    fix = "In a checkout, build it with `make page`, which needs Node 20.19 or newer. Released wheels include it."
    raise FileNotFoundError(bad("page", "must be included in the package", f"nothing at {PACKAGED} or {BUILT}", fix))


def with_payload(page: str, content: bytes) -> str:
    """Embed a payload in the page, which is then self-contained."""
    head, body, rest = page.rpartition("</body>")  # the last one: a script in the page may contain the tag
    return head + _SCRIPT.format(base64.b64encode(content).decode("ascii")) + body + rest


def with_server(page: str, *, images: bool) -> str:
    """Mark the page as served; if `images` is false, it shows no upload field."""
    mark = SERVER_MARK.format("images" if images else "payload")
    return re.sub(r"<head(\s[^>]*)?>", lambda head: head[0] + mark, page, count=1)


def export(payload: bytes, folder: str | Path) -> Path:
    """Write the page and a payload to a folder; the page can be opened from disk or hosted, without Python.

    Args:
        payload: The bytes returned by `attnconv.explorer.payload`; written to `payload.safetensors`.
        folder: Output folder, created if it does not exist. Files of an older export are replaced atomically.

    Returns:
        The path of the page, `index.html`, which also embeds the payload.

    Raises:
        ValueError: If the payload is invalid, or `folder` is a file.
        FileNotFoundError: If the package contains no page.
        OSError: If the files cannot be written.
    """
    read_payload(payload)
    page = with_payload(find_page(), payload)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(bad("folder", "must be a folder or must not exist yet", f"the file {folder}"))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "payload.safetensors", payload)
    write_atomically(folder / "index.html", page.encode())
    return folder / "index.html"
