"""Where the library keeps what it can make again: the user's cache folder."""

import os
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/attnconv``, or ``~/.cache/attnconv``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "attnconv"
