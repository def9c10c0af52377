"""The one form of the library's error messages.

*argument: requirement, got value (where it came from). Fix.* The reader learns which argument is meant, what it must
satisfy, what arrived instead, and what to do, in that order and in one line.
"""

import difflib
from collections.abc import Iterable

_LONGEST = 4000  # characters of a value in a message


def bad(argument: str, requirement: str, got: object, fix: str = "", *, origin: str = "") -> str:
    """Format an error message; the caller raises ``ValueError`` or ``TypeError`` with it.

    Args:
        argument: name of the offending argument, in the user's spelling (``heads``, ``optim.clip``).
        requirement: what the argument must satisfy (``must be at least 1``).
        got: the value that arrived, cut where it is very long. Strings are taken as they stand, everything else through
            ``repr``; pass ``repr(value)`` for a string value that needs its quotes.
        fix: one sentence that says what to do, with its full stop. Optional.
        origin: where the value came from (``from settings.json``). Optional.

    Returns:
        The message.

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
    r"""Text for a terminal, with escapes for what is not visible.

    Names of files and classes come from others. Printed as they are, they could move the cursor, or rename the window;
    and those that are not UTF-8 could not be printed at all.

    Args:
        text: the text.
        lines: whether the ends of lines stay.

    Example:
        >>> printable("caf\u00e9 \x1b[2J")
        'café \\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii") for c in text
    )
