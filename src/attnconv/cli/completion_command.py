"""`attnconv completion SHELL`: print a script that completes commands, flags and values."""

import argparse
import importlib
from dataclasses import dataclass
from typing import Literal

from attnconv.cli.parsing import Positional, add_option, arguments_of, distinct
from attnconv.models.presets import PRESETS


@dataclass(frozen=True)
class Arguments:
    """Print a script that completes commands, flags and values in a shell.

    Examples:
        eval "$(attnconv completion bash)"
        attnconv completion zsh > ~/.zfunc/_attnconv
        attnconv completion tcsh > ~/.attnconv.tcsh

    Attributes:
        shell: bash, zsh or tcsh.
    """

    shell: Positional[Literal["bash", "zsh", "tcsh"]]


def run(arguments: Arguments) -> None:
    """Print the script."""
    import shtab

    from attnconv.cli import COMMANDS

    parser = argparse.ArgumentParser(prog="attnconv")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        for argument in distinct(arguments_of(importlib.import_module(f"attnconv.cli.{name}_command").Arguments)):
            word = argument.name.lower()
            action = command.add_argument(word, nargs="?") if argument.positional else add_option(command, argument)
            action.help = argument.explanation.replace("%", "%%")
            kind = argument.metavar.removesuffix(" ...")
            if word == "preset" or kind.startswith("{"):
                action.choices = list(PRESETS) if word == "preset" else kind.strip("{}").split(",")
            elif kind in ("PATH", "TEXT"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
