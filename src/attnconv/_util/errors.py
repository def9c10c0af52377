"""The form of the library's error messages.

*argument: requirement, got value (where it came from). Fix.*
"""

import difflib
from collections.abc import Iterable

_LONGEST = 4000  # characters of a value in a message


def bad(argument: str, requirement: str, got: object, fix: str = "", *, origin: str = "") -> str:
    """Format an error message; the caller raises `ValueError` or `TypeError` with it.

    Strings in `got` are used as they are, everything else as its `repr`. `fix` is a sentence with its full stop.

    Example:
        >>> bad("optim.learning_rate", "must be positive", -0.1, "Pass 0.1.", origin="from settings.json")
        'optim.learning_rate: must be positive, got -0.1 (from settings.json). Pass 0.1.'
    """
    value = got if isinstance(got, str) else repr(got)
    if len(value) > _LONGEST:
        value = f"{value[:_LONGEST]}... ({len(value):,} characters)"
    where = f" ({origin})" if origin else ""
    return printable(f"{argument}: {requirement}, got {value}{where}." + (f" {fix}" if fix else ""), lines=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The fix for a misspelt name: the known names that are most like it; empty if there are none."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def printable(text: str, *, lines: bool = False) -> str:
    """Escape what is not visible, except ends of lines if `lines`: names of files could control the terminal."""
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii") for c in text
    )
