"""A command's arguments as its dataclass: a flag for each field, its help, and all errors at once.

Nested settings have flags of their own: the field `validation` of `data` is `--data.validation`. Settings of a run's
model and of its training loop (`settings.model.heads`, `settings.train.epochs`) have no prefix: `--heads`, `--epochs`.
"""

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect as types

from attnconv._util.errors import did_you_mean
from attnconv._util.settings import Problem, SettingsError, annotations, classes_in, describe, read

T = TypeVar("T")
Positional = Annotated[T, "positional"]
Nested: TypeAlias = dict[str, Any]
# Plain values in place of a command's defaults, nested as the command is, and their origins by dotted name.
Defaults: TypeAlias = tuple[Nested, Mapping[str, str]]
_NARROW = 50  # characters of a list of choices in the help; longer ones are in the text
_BARE = re.compile(r"^(?:settings\.)?(?:(?:model|train)\.)?")  # what a flag leaves out of a name
# Arguments of the library's functions and the flags that set them.
_FLAGS = {"run_dir": "--out"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("layers", "port", "resume", "skip_broken", "skip_unreadable", "start_from")
}


class Argument(NamedTuple):
    """A field of a command, or of settings in it: its name, dotted from the command, annotation and dataclass."""

    name: str
    hint: Any
    group: type

    @property
    def positional(self) -> bool:
        return "positional" in get_args(self.hint)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and of a switch the one that turns it off; of a positional argument its name."""
        if self.positional:
            return (self.name.upper(),)
        *groups, name = _BARE.sub("", self.name).replace("_", "-").split(".")
        names = (name, f"no-{name}") if self.hint is bool else (name,)
        return tuple("--" + ".".join([*groups, name]) for name in names)

    @property
    def explanation(self) -> str:
        """Its explanation in the docstring of its class or of one that this derives from, in one line."""
        field = self.name.rpartition(".")[2]
        for group in self.group.__mro__:
            listed = str(inspect.getdoc(group)).partition("Attributes:")[2]
            if found := re.search(rf"^    {field}: (.*(?:\n      .*)*)", listed, re.MULTILINE):
                return " ".join(found[1].split())
        return ""


def parse(command: type[T], words: Sequence[str]) -> T:
    """Read a command's words into its dataclass; `--help` prints the help and ends the process.

    A command's `defaults`, if it has them, makes defaults of the given values. Raises `SettingsError` with every wrong
    word and value.
    """
    arguments = list(arguments_of(command))
    given, wrong = _given(arguments, words)
    wants_help = given.pop("help", False)
    values: Nested = {}
    origins: Mapping[str, str] = {}
    flags = {argument.name: argument.flags[0] for argument in arguments}
    try:
        if (defaults := getattr(command, "defaults", None)) is not None:
            values, origins = defaults(given)
        if wants_help:
            print(_help_page(command, arguments, values))
            raise SystemExit(0)
        for name, value in given.items():
            values = merged(values, reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value))
        made: T = read(command, values)
    except SettingsError as error:
        for problem in error.problems:
            name = flags.get(problem.name, problem.name.removeprefix("settings."))
            origin = problem.origin if problem.name in given else origins.get(problem.name, problem.origin)
            wrong.append(replace(problem, name=name, origin=origin))
    if wrong:
        raise SettingsError(wrong)
    return made


def arguments_of(settings_class: type, prefix: str = "") -> Iterator[Argument]:
    """Every field of a dataclass and of the settings in it, of every class of a union."""
    for field, hint in annotations(settings_class).items():
        inner = classes_in(hint).values()
        for kind in inner:
            yield from arguments_of(kind, f"{prefix}{field}.")
        if not inner:
            yield Argument(prefix + field, hint, settings_class)


def distinct(arguments: Iterable[Argument]) -> list[Argument]:
    """The first of arguments with the same flag: of several models, or of a command and the settings in it."""
    found: dict[str, Argument] = {}
    for argument in arguments:
        found.setdefault(argument.flags[0].lower().lstrip("-"), argument)
    return list(found.values())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Nested:
    """Nested values with others laid over them; a group of another `kind` replaces the whole."""
    values = dict(base)
    for name, value in over.items():
        before = values.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            other = value.get("kind", before.get("kind")) != before.get("kind")
            values[name] = dict(value) if other else merged(before, value)
        else:
            values[name] = value
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> Nested:
    """Nested values by their dotted names."""
    found: Nested = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


def in_flags(text: str) -> str:
    """A message of the library with flags in place of Python's names.

    Example:
        >>> in_flags("train.batch_size: must be 4, got 3. Pass train.epochs=2, or raise optim.clip.")
        '--batch-size: must be 4, got 3. Pass --epochs 2, or raise --optim.clip.'
    """
    from attnconv.training.settings import RunSettings

    flags = _FLAGS | {argument.name: argument.flags[0] for argument in arguments_of(RunSettings)}

    def spelled(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if value is None:
            labels = "." in name or text.startswith(": ", found.end())
            return flags[name] if labels else found[0]
        if value in ("True", "False"):
            return flags[name] if value == "True" else re.sub(r"([^.-][^.]*)$", r"no-\1", flags[name])
        return f"{flags[name]} {re.sub('[][]|' + chr(39), '', value).replace(', ', ',')}"

    names = "|".join(re.escape(name) for name in sorted(flags, key=len, reverse=True))
    value = r"=(?P<value>'[^']*'|\[[^\]]*\]|[\w+-]+(?:\.\w+)*)"
    return re.sub(rf"(?<![\w./-])(?P<name>{names})(?:{value}|(?![\w/=-]|\.\w))", spelled, text)


def _given(arguments: Sequence[Argument], words: Sequence[str]) -> tuple[Nested, list[Problem]]:
    """The given values, by dotted name, and the problems with words that cannot be read."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    parser.add_argument("-h", "--help", action="store_true")
    named = {argument.name: argument for argument in distinct(arguments) if not argument.positional}
    for name, argument in named.items():
        if argument.hint is bool:
            for flag, constant in zip(argument.flags, (True, False), strict=True):
                parser.add_argument(flag, dest=name, action="store_const", const=constant)
        else:
            parser.add_argument(*argument.flags, dest=name, nargs="*" if _is_list(argument.hint) else "?")
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in words]
    try:
        found, rest = parser.parse_known_args(dashed)
    except argparse.ArgumentError as error:
        raise SettingsError([Problem(str(error.argument_name), "must be a switch without a value", "one")]) from error
    values, wrong = {}, []
    for name, value in vars(found).items():
        if value is None:
            wrong.append(Problem(named[name].flags[0], f"must be {describe(named[name].hint)}", "nothing"))
        else:
            values[name] = value if isinstance(value, bool) else _typed(value, named[name].hint)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    for flag in unknown:
        fix = did_you_mean(flag, [each for argument in arguments for each in argument.flags]) or "See --help."
        wrong.append(Problem(flag, "must be one of the command's flags", repr(flag), fix))
    others = [word for word in rest if not word.startswith("-")]
    positional = [argument for argument in arguments if argument.positional]
    values |= {argument.name: word for argument, word in zip(positional, others, strict=False)}
    if others[len(positional) :] and not unknown:
        names = " ".join(argument.flags[0] for argument in positional)
        wrong.append(Problem("arguments", f"must be {names or 'flags only'}", repr(" ".join(others)), "See --help."))
    return values, wrong


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(map(_is_list, get_args(hint)))


def _typed(texts: str | list[str], hint: Any) -> Any:
    """The words after a flag as its type; unchanged where they are no value of it, or as a number out of its range."""
    single = texts[0] if isinstance(texts, list) and len(texts) == 1 else texts
    readings: list[tuple[Any, Any]] = [(None, hint)] if single == "None" else []
    readings += [(single, hint), (texts, hint), (single, int), (single, float)]
    for words, kind in readings:
        try:
            return msgspec.convert(words, kind, strict=False, dec_hook=lambda _, text: Path(text))
        except msgspec.ValidationError:
            continue
    return " ".join(texts) if isinstance(texts, list) else texts


def _help_page(command: type, arguments: Iterable[Argument], values: Nested) -> str:
    """Usage, the command's docstring, and every argument with its default, in place of which `values` stand."""

    def title(argument: Argument) -> str:
        return argument.name.rpartition(".")[0].removeprefix("settings.")

    defaults = flat(values)
    kinds = {name.rpartition(".")[0]: kind for name, kind in defaults.items() if name.endswith(".kind")}
    fitting = [
        argument
        for argument in arguments
        if kinds.get(argument.name.rpartition(".")[0]) in (None, getattr(argument.group, "kind", None))
    ]
    shown = sorted(distinct(fitting), key=lambda argument: (title(argument) != "", not argument.positional))
    positional = [argument.flags[0] for argument in shown if argument.positional]
    name = command.__module__.rpartition(".")[2].removesuffix("_command")
    lines = [" ".join(["usage: attnconv", name, "[-h] [OPTIONS]", *positional]), ""]
    about, _, examples = str(inspect.getdoc(command)).partition("Attributes:")[0].partition("Examples:\n")
    for paragraph in about.strip().split("\n\n"):
        lines += [*_wrapped(paragraph), ""]
    lines += ["examples:", textwrap.indent(inspect.cleandoc(examples), "  ")]
    for name, members in groupby(shown, key=title):
        several = list(members)
        lines += ["", f"{name} options:".strip()]
        lines += _wrapped(str(inspect.getdoc(several[0].group)).partition("\n")[0], "  ") if name else []
        for argument in several:
            field = argument.name.rpartition(".")[2]
            lines += _entry(argument, defaults.get(argument.name, getattr(argument.group, field, MISSING)))
    return "\n".join(lines)


def _entry(argument: Argument, default: Any) -> list[str]:
    """An argument's flags and type, its explanation and its default."""
    text, value = argument.explanation, ""
    if argument.hint is not bool and not argument.positional:
        value = f" {_metavar(types.type_info(argument.hint))}"
    if len(value) > _NARROW:
        text, value = f"{text} One of {value.strip(' {}').replace(',', ', ')}.", " NAME"
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


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
