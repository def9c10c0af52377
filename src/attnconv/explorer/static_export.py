"""A folder that shows a payload without Python: it opens from disk, and any web server can host it.

OUT/index.html             the page, with the payload in it
OUT/payload.safetensors    the payload alone, to open in another page
"""

from pathlib import Path

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.explorer.html_page import find_page, with_payload
from attnconv.explorer.payload_read import read_payload


def export(payload: bytes, folder: str | Path) -> Path:
    """Write the page with a payload in it.

    Args:
        payload: The bytes that `attnconv.explorer.payload` gives.
        folder: Made where it is missing. The two files of an older export are replaced, each in one step.

    Returns:
        The page, `index.html`.

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
