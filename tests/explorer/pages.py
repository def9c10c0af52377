"""Placeholder for the page that is built from `web/`."""

from pathlib import Path

import pytest

from attnconv.explorer import html_page

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>stand-in</title><script>const word = "</body></head>";</script></head>
<body><p>stand-in</p></body>
</html>
"""


def place_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the placeholder the page that a checkout has built."""
    path = folder / "web.html"
    path.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(html_page, "PACKAGED", folder / "none.html")
    monkeypatch.setattr(html_page, "BUILT", path)
    return path
