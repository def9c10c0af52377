"""From words to a command's dataclass, by tyro; help that ends with examples."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")
_INDENT = "  "  # above the arguments tyro wraps nothing, and joins lines that begin with a letter


def parse(command: type[T], name: str, words: Sequence[str], *, about: str, examples: str, default: Any = None) -> T:
    """Read a command's words into its dataclass; prints the help or what is wrong, and exits, as command lines do.

    Args:
        command: a dataclass whose fields are the arguments.
        name: of the command, as typed.
        words: that follow the name.
        about: what the command does, above the arguments in its help; each of its lines is wrapped for itself.
        examples: lines that stand below it.
        default: an instance to start from.
    """
    description = f"{_wrapped(about)}\n\nexamples:\n" + textwrap.indent(examples.strip(), _INDENT)
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(command, prog=f"attnconv {name}", description=description, args=list(words), **options)


def _wrapped(text: str) -> str:
    """The text's lines at the terminal's width."""
    width = shutil.get_terminal_size().columns - len(_INDENT)
    return textwrap.indent("\n".join(textwrap.fill(line, width) for line in text.splitlines()), _INDENT)
