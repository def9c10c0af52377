"""Environment of a run: versions, commit, device and command."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import attnconv


def environment(command: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Describe the environment for `settings.json`."""
    on_gpu = device.type == "cuda"
    return {
        "versions": {
            "attnconv": attnconv.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a subclass of str otherwise
        },
        # ATTNCONV_COMMIT names the commit of sources that were copied without the git history.
        "commit": source_commit(Path(attnconv.__file__).parent) or os.environ.get("ATTNCONV_COMMIT"),
        "device": f"{device}: {torch.cuda.get_device_name(device)}" if on_gpu else f"{device.type}: {_processor()}",
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "command": list(command),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def source_commit(folder: Path) -> str | None:
    """Return the commit of a folder of sources, with "+" if it has uncommitted changes; None outside a checkout."""
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # fails in the checkout of a different project
    commit = None if tracked is None else _git(folder, "rev-parse", "HEAD")
    return commit and commit + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _processor() -> str:
    table = Path("/proc/cpuinfo")  # on Linux
    text = table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
