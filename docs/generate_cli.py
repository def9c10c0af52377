"""Write docs/cli.md from what ``attnconv --help`` and each subcommand's ``--help`` print.

    python docs/generate_cli.py          # writes docs/cli.md beside this script

A test renders the page again and fails when the file differs, so the page cannot go stale.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnconv.cli import COMMANDS

PAGE = Path(__file__).with_name("cli.md")
SOURCES = str(PAGE.parent.parent / "src")
HEAD = """\
# Command line

<!-- Written by docs/generate_cli.py from `attnconv --help`. Do not edit: run `make cli-reference`. -->

Every wrong argument is reported at once, before any work starts.
"""
SECTION = """
## `{title}`

```text
{text}
```
"""


def help_text(*arguments: str) -> str:
    """The help of one subcommand, 90 columns wide."""
    environment = {**os.environ, "COLUMNS": "90", "PYTHONPATH": SOURCES}
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
    return HEAD + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
