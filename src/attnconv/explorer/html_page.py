"""The explorer's page, an HTML file that is built from `web/` and shipped in the wheel, and sources of its payload.

embedded     the payload in base64 at the end of the page: static exports and notebooks
models       a list of scripts at the end of the page, each with one payload: the page loads one when it is selected
served       a meta tag in the page's head: the page requests the payload from the server
"""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.explorer.payload_format import read_payload

PACKAGED = Path(__file__).with_name("page.html")
BUILT = Path(__file__).resolve().parents[3] / "web" / "dist" / "index.html"  # in a checkout
SERVER_MARK = '<meta name="attnconv-server" content="{}">'
_PAYLOAD = '<script type="application/octet-stream" id="attnconv-payload">{}</script>\n'
_MODELS = '<script type="application/json" id="attnconv-models">{}</script>\n'
_NAME = re.compile("[a-z0-9][a-z0-9-]*")


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
    return _before_end(page, _PAYLOAD.format(base64.b64encode(content).decode("ascii")))


def with_models(page: str, titles: Mapping[str, str], about: Mapping[str, str] | None = None) -> str:
    """Add the list of models, of which each has a name, a title and perhaps a description, to the page."""
    models = [
        {"title": title, "file": f"models/{name}.js"} | ({"about": about[name]} if about and name in about else {})
        for name, title in titles.items()
    ]
    return _before_end(page, _MODELS.format(json.dumps(models).replace("<", "\\u003c")))  # a title may contain a tag


def model_script(name: str, content: bytes) -> str:
    """Return the script that passes a payload to the page. Unlike other files, scripts can be loaded from disk."""
    return f'attnconvModel("{name}", "{base64.b64encode(content).decode("ascii")}");\n'


def _before_end(page: str, element: str) -> str:
    head, body, rest = page.rpartition("</body>")  # the last one: a script in the page may contain the tag
    return head + element + body + rest


def with_server(page: str, *, images: bool) -> str:
    """Mark the page as served; if `images` is false, it shows no upload field."""
    mark = SERVER_MARK.format("images" if images else "payload")
    return re.sub(r"<head(\s[^>]*)?>", lambda head: head[0] + mark, page, count=1)


def export(
    payload: bytes | None,
    folder: str | Path,
    *,
    models: Mapping[str, bytes] | None = None,
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write the page and its payloads to a folder; the page can be opened from disk or hosted, without Python.

    Args:
        payload: The bytes returned by `attnconv.explorer.payload`, which the page shows when it is opened; also written
            to `payload.safetensors`. None if the page opens on its article.
        folder: Output folder, created if it does not exist. Files of an older export are replaced atomically.
        models: Payloads that are listed on the page and loaded when they are selected, by name; written to
            `models/NAME.js`. Their titles are those of the payloads. Names consist of lower-case letters, digits and
            hyphens.
        about: Descriptions of these models, by name, such as "trained on CIFAR-10, test accuracy 84.1%".

    Returns:
        The path of the page, `index.html`, which also embeds `payload`.

    Raises:
        ValueError: If a payload or a name is invalid, there is nothing to write, or `folder` is a file.
        FileNotFoundError: If the package contains no page.
        OSError: If the files cannot be written.
    """
    models = models or {}
    if payload is None and not models:
        raise ValueError(bad("payload", "must be given if there are no models", None))
    if wrong := [name for name in models if not _NAME.fullmatch(name)]:
        raise ValueError(bad("models", "must have names of lower-case letters, digits and hyphens", repr(wrong[0])))
    titles = {name: read_payload(content).title for name, content in models.items()}
    page = find_page()
    if payload is not None:
        read_payload(payload)
        page = with_payload(page, payload)
    if models:
        page = with_models(page, titles, about)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(bad("folder", "must be a folder or must not exist yet", f"the file {folder}"))
    folder.mkdir(parents=True, exist_ok=True)
    if payload is not None:
        write_atomically(folder / "payload.safetensors", payload)
    for name, content in models.items():
        (folder / "models").mkdir(exist_ok=True)
        write_atomically(folder / "models" / f"{name}.js", model_script(name, content).encode())
    write_atomically(folder / "index.html", page.encode())
    return folder / "index.html"
