"""The format of errors: limited in length, and safe to print."""

import pytest

from attnconv._util.errors import bad, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("café, 日本\nsecond", "café, 日本\nsecond"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\udcff", "\\udcff"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\r\x08\x9b2J", "\\r\\x08\\x9b2J"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text, lines=True) == shown
    assert "\n" not in printable(text)
    assert bad("name", "must be fine", text) == f"name: must be fine, got {shown}."
    shown.encode()


def test_a_long_value_is_cut() -> None:
    assert bad("x", "must be short", "[" * 100_000) == f"x: must be short, got {'[' * 4000}... (100,000 characters)."
