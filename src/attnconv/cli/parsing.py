"""From words to a command's dataclass, by tyro; help that ends with examples."""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(command: type[T], name: str, words: Sequence[str], *, about: str, examples: str, default: Any = None) -> T:
    """Read a command's words into its dataclass; prints the help or what is wrong, and exits, as command lines do.

    Args:
        command: a dataclass whose fields are the arguments.
        name: of the command, as typed.
        words: that follow the name.
        about: what the command does, above the arguments in its help.
        examples: lines that stand below it.
        default: an instance to start from.
    """
    description = f"{about}\n\nexamples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines())
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(command, prog=f"attnconv {name}", description=description, args=list(words), **options)
