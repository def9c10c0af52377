"""Format of the library's error messages.

*argument: requirement, got value (origin). Fix.*
"""

import difflib
import os
from collections.abc import Iterable

_LONGEST = 4000  # maximum number of characters of a value in a message


def bad(argument: str, requirement: str, got: object, fix: str = "", *, origin: str = "") -> str:
    """Format the message of a `ValueError` or `TypeError`.

    Strings and paths in `got` are inserted as text, other values as their `repr`. `fix` is a complete sentence.

    Example:
        >>> bad("optim.learning_rate", "must be positive", -0.1, "Pass 0.1.", origin="from settings.json")
        'optim.learning_rate: must be positive, got -0.1 (from settings.json). Pass 0.1.'
    """
    value = str(got) if isinstance(got, str | os.PathLike) else repr(got)
    if len(value) > _LONGEST:
        value = f"{value[:_LONGEST]}... ({len(value):,} characters)"
    where = f" ({origin})" if origin else ""
    return printable(f"{argument}: {requirement}, got {value}{where}." + (f" {fix}" if fix else ""), lines=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest known names that are similar to a misspelt one; return an empty string if there are none."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def printable(text: str, *, lines: bool = False) -> str:
    """Escape non-printable characters, with which file names could control a terminal; `lines` keeps line breaks."""
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii") for c in text
    )
