"""The help of a command, from its dataclass."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING
from itertools import groupby
from typing import Any

from msgspec import inspect as types

from attnconv.cli.parsing import Argument, arguments_of, distinct

_NARROW = 50  # characters of a list of choices; longer ones are in the text


def help_page(command: type, values: Mapping[str, Any]) -> str:
    """Usage, the command's docstring, and every argument with its default.

    `values` take the place of the defaults, nested as the command is.
    """
    arguments = [each for each in arguments_of(command) if _group(each, values).get("kind") in (None, _kind(each))]
    shown = sorted(distinct(arguments), key=lambda argument: bool(_title(argument)))
    positional = [argument.flags[0] for argument in shown if argument.positional]
    lines = [" ".join(["usage: attnconv", command.__name__.lower(), "[-h] [OPTIONS]", *positional]), ""]
    about, _, examples = _docstring(command).partition("Attributes:")[0].partition("Examples:\n")
    for paragraph in about.strip().split("\n\n"):
        lines += [*_wrapped(paragraph), ""]
    lines += ["examples:", textwrap.indent(inspect.cleandoc(examples), "  ")]
    for title, members in groupby(shown, key=_title):
        several = list(members)
        lines += ["", f"{title} options:".strip()]
        lines += _wrapped(_docstring(several[0].group).partition("\n")[0], "  ") if title else []
        for argument in several:
            lines += _entry(argument, values)
    return "\n".join(lines)


def _entry(argument: Argument, values: Mapping[str, Any]) -> list[str]:
    """An argument's flags and type, its explanation and its default."""
    field = argument.name.rpartition(".")[2]
    value = "" if argument.hint is bool or argument.positional else f" {_metavar(types.type_info(argument.hint))}"
    text = explanation(argument)
    if len(value) > _NARROW:
        text, value = f"{text} One of {value.strip(' {}').replace(',', ', ')}.", " NAME"
    default = _group(argument, values).get(field, getattr(argument.group, field, MISSING))
    if default is not MISSING and not argument.positional:
        listed = " ".join(map(str, default)) or "none" if isinstance(default, list | tuple) else default
        text += f" (default: {listed})"
    return [f"  {', '.join(argument.flags)}{value}", *_wrapped(text, "      ")]


def _metavar(kind: types.Type) -> str:
    match kind:
        case types.LiteralType(values=choices):
            return f"{{{','.join(map(str, choices))}}}"
        case types.UnionType(types=several):
            return next(name for each in reversed(several) if (name := _metavar(each)) != "None")
        case types.VarTupleType(item_type=item):
            return f"{_metavar(item)} ..."
        case types.BoolType():
            return "{True,False}"
    names = {types.IntType: "INT", types.FloatType: "FLOAT", types.StrType: "TEXT", types.NoneType: "None"}
    return names.get(type(kind), "PATH")


def _group(argument: Argument, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested values that hold an argument."""
    for group in argument.name.split(".")[:-1]:
        inner = values.get(group)
        values = inner if isinstance(inner, Mapping) else {}
    return values


def _kind(argument: Argument) -> str | None:
    return getattr(argument.group, "kind", None)


def explanation(argument: Argument) -> str:
    """The explanation of an argument in the docstring of its class, in one line."""
    listed = _docstring(argument.group).partition("Attributes:")[2]
    field = argument.name.rpartition(".")[2]
    found = re.search(rf"^    {field}: (.*(?:\n      .*)*)", listed, re.MULTILINE)
    return "" if found is None else " ".join(found[1].split())


def _title(argument: Argument) -> str:
    """The group of an argument; empty for the command's own."""
    return argument.name.rpartition(".")[0].removeprefix("settings.")


def _docstring(group: type) -> str:
    return str(inspect.getdoc(group))


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
