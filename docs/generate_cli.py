"""Write docs/cli.md from what ``attnconv --help`` and each subcommand's ``--help`` print.

    python docs/generate_cli.py          # writes docs/cli.md beside this script

A test renders the page again and fails when the file differs, so the page cannot go stale.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnconv.cli import COMMANDS

PAGE = Path(__file__).with_name("cli.md")
SOURCES = str(PAGE.parent.parent / "src")
HEAD = """\
# Command line

<!-- Written by docs/generate_cli.py (tyro {version}) from `attnconv --help`. Do not edit: run `make cli-reference`. -->

Every wrong setting is reported at once, in words, before any work starts. `attnconv COMMAND --help` prints what stands
below.
"""
SECTION = """
## `{title}`

```text
{text}
```
"""


def tyro_version() -> str:
    """The installed version of tyro, which lays the help out."""
    return importlib.metadata.version("tyro")


def made_with(page: str) -> str | None:
    """The version of tyro that a rendered page was made with."""
    found = re.search(r"\(tyro ([^)]+)\)", page)
    return found.group(1) if found else None


def help_text(*arguments: str) -> str:
    """The help of one subcommand, 90 columns wide and without colours, whatever terminal this runs in."""
    settled = {"COLUMNS": "90", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": SOURCES}
    environment = {**os.environ, **settled}
    environment.pop("FORCE_COLOR", None)
    program = "import sys; sys.argv[0] = 'attnconv'; from attnconv.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def render() -> str:
    """The whole page."""
    calls = [(), *((name,) for name in COMMANDS)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(lambda call: help_text(*call), calls))
    sections = (
        SECTION.format(title=" ".join(("attnconv", *call)), text=text) for call, text in zip(calls, texts, strict=True)
    )
    return HEAD.format(version=tyro_version()) + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
