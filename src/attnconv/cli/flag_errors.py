"""Flags whose values cannot be read, all of them at once.

tyro stops at the first value that it cannot read. A user with three mistakes wants to hear of three, so the words are
looked through before tyro sees them, with the same names and types.
"""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attnconv._util.errors import bad
from attnconv.training.settings_json import in_words


def flags_of(groups: Iterable[tuple[str, type]]) -> dict[str, Any]:
    """Every flag and the type of its value; a switch also has the form that turns it off.

    Args:
        groups: (prefix, dataclass) pairs; the prefix of ``--data.root`` is ``data.``.

    Example:
        >>> from attnconv.training.settings import ScheduleSettings
        >>> list(flags_of([("schedule.", ScheduleSettings)]))[:2]
        ['--schedule.name', '--schedule.warmup']
    """
    flags: dict[str, Any] = {}
    for prefix, group in groups:
        hints = get_type_hints(group)
        for entry in fields(group):
            name = entry.name.replace("_", "-")
            flags[f"--{prefix}{name}"] = hints[entry.name]
            if hints[entry.name] is bool:
                flags[f"--{prefix}no-{name}"] = bool
    return flags


def sort_out(words: Sequence[str], flags: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What is wrong with the flags among the words, one sentence each, and the words without those flags.

    Example:
        >>> sort_out(["--epochs", "few", "--heads=9"], {"--epochs": int, "--heads": int})
        (["--epochs: must be a whole number, got 'few'."], ['--heads=9'])
    """
    found, kept = [], []
    for flag, texts, originals in _split(words):
        if flag is None or flag in ("-h", "--help"):
            kept += originals
        elif flag not in flags:
            near = difflib.get_close_matches(flag, flags, n=2)
            fix = f"Did you mean {' or '.join(near)}?" if near else "See --help."
            found.append(bad(flag, "must be one of the command's flags", repr(flag), fix))
        elif not readable(texts, flags[flag]):
            kind = "a switch without a value" if flags[flag] is bool else in_words(flags[flag])
            found.append(bad(flag, f"must be {kind}", repr(" ".join(texts)) if texts else "nothing"))
        else:
            kept += originals
    return found, kept


def positional_places(words: Sequence[str], flags: Mapping[str, Any]) -> list[int]:
    """Where among the words those stand that are no flag and no flag's value.

    Example:
        >>> positional_places(["--epochs", "3", "--list", "1", "2", "name"], {"--list": tuple[int, ...]})
        [5]
    """
    places: list[int] = []
    start = 0
    for flag, texts, originals in _split(words):
        taken = 0
        if flag is not None:  # the flag itself, and its value unless that stands behind its =
            taken = 1 if "=" in originals[0] else 1 + _values_of(texts, flags.get(flag, str))
        places += range(start + taken, start + len(originals))
        start += len(originals)
    return places


def _values_of(texts: Sequence[str], hint: Any) -> int:
    """How many of the words after a flag are its value."""
    if hint is bool:
        return 0
    if get_origin(hint) is tuple:
        return next((i for i, text in enumerate(texts) if not readable([text], hint)), len(texts))
    return min(len(texts), 1)


def readable(texts: Sequence[str], hint: Any) -> bool:
    """Whether the words after a flag are a value of its type.

    Example:
        >>> readable(["80", "150"], tuple[int, ...]), readable(["1e3"], int), readable(["None"], int | None)
        (True, False, True)
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(readable(texts, choice) for choice in get_args(hint))
    if origin is tuple:
        return all(readable([text], get_args(hint)[0]) for text in texts)
    if hint is bool:
        return not texts
    if len(texts) != 1:
        return False
    if origin is Literal:
        return texts[0] in get_args(hint)
    if hint is type(None):
        return texts[0] == "None"
    if hint in (int, float):
        try:
            hint(texts[0])
        except ValueError:
            return False
        return True
    return hint in (str, Path)


def _split(words: Sequence[str]) -> Iterator[tuple[str | None, list[str], list[str]]]:
    """Each flag with the words that follow it, and the words as they were; None for words before the first flag."""
    flag: str | None = None
    texts: list[str] = []
    originals: list[str] = []
    for word in words:
        if word.startswith("--") or word == "-h":
            if originals:
                yield flag, texts, originals
            name, equals, value = word.partition("=")
            flag, texts, originals = name.replace("_", "-"), [value] if equals else [], [word]
        else:
            texts.append(word)
            originals.append(word)
    if originals:
        yield flag, texts, originals
