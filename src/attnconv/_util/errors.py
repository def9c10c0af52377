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
        >>> bad("heads", "must be at least 1", 0, "Pass the number of attention heads.")
        'heads: must be at least 1, got 0. Pass the number of attention heads.'
        >>> bad("optim.learning_rate", "must be positive", -0.1, origin="from settings.json")
        'optim.learning_rate: must be positive, got -0.1 (from settings.json).'
    """
    value = got if isinstance(got, str) else repr(got)
    if len(value) > _LONGEST:
        value = f"{value[:_LONGEST]}... ({len(value):,} characters)"
    where = f" ({origin})" if origin else ""
    return printable(f"{argument}: {requirement}, got {value}{where}." + (f" {fix}" if fix else ""), lines=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The fix for a misspelt name: the known names that are most like it; empty if there are none.

    Example:
        >>> did_you_mean("quadratc", ["quadratic", "learned"])
        'Did you mean quadratic?'
    """
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def printable(text: str, *, lines: bool = False) -> str:
    """Escape what is not visible, except ends of lines if `lines`.

    Names of files and classes come from others. Printed as they are, they could control the terminal, and those that
    are not UTF-8 could not be printed at all.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii") for c in text
    )
