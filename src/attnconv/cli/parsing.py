"""Parse a command's arguments into its dataclass, with a flag and a help text for each field.

Fields of nested settings have a prefix: the field `validation` of `data` is `--data-validation`. Settings of the model
and of the training loop (`settings.model.heads`, `settings.train.epochs`) have none: `--heads`, `--epochs`. All errors
are reported together.
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
from attnconv._util.settings import Problem, SettingsError, annotations, classes_in, describe, flat, read

T = TypeVar("T")
Positional = Annotated[T, "positional"]
Nested: TypeAlias = dict[str, Any]
# Plain values that replace a command's defaults, nested like its fields, and the origin of each by dotted name.
Defaults: TypeAlias = tuple[Nested, Mapping[str, str]]
_NARROW = 50  # maximum length of a list of choices next to its flag; longer lists are part of the help text
_BARE = re.compile(r"^(?:settings\.)?(?:(?:model|train)\.)?")  # prefixes that flags omit
# Arguments of the library's functions and the flags that set them. Those in `_LABELS` are replaced only where a message
# starts with them, since messages also contain Python code with them.
_LABELS = {"alpha": "--alpha", "only": "--only", "prefix": "--prefix"}
_FLAGS = {"run_dir": "--out", "size": "--image-size"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("image_size", "layers", "port", "resume", "skip_broken", "start_from")
}


class Argument(NamedTuple):
    """Field of a command or of its nested settings: dotted name, annotation and dataclass."""

    name: str
    hint: Any
    group: type

    @property
    def positional(self) -> bool:
        return "positional" in get_args(self.hint)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flag, followed by its `--no-` form if it is a switch; for a positional argument, its name."""
        if self.positional:
            return (self.name.upper(),)
        name = re.sub("[._]", "-", _BARE.sub("", self.name))
        return (f"--{name}", f"--no-{name}") if self.hint is bool else (f"--{name}",)

    @property
    def default(self) -> Any:
        return getattr(self.group, self.name.rpartition(".")[2], MISSING)

    @property
    def metavar(self) -> str:
        """Placeholder for the value in the help, such as INT, PATH or {cpu,cuda}."""
        return _metavar(types.type_info(self.hint))

    @property
    def explanation(self) -> str:
        """Description of the field from the docstring of its class or a base class, on one line."""
        field = self.name.rpartition(".")[2]
        for group in self.group.__mro__:
            listed = str(inspect.getdoc(group)).partition("Attributes:")[2]
            if found := re.search(rf"^    {field}: (.*(?:\n      .*)*)", listed, re.MULTILINE):
                return " ".join(found[1].split())
        return ""


def parse(command: type[T], words: Sequence[str]) -> T:
    """Parse a command's words into its dataclass; `--help` prints the help and exits.

    If the command has a method `defaults`, it computes the defaults from the values given. Raises a `SettingsError`
    that lists all invalid words and values.
    """
    arguments = list(arguments_of(command))
    given, wrong, misspelt = _given(arguments, words)
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
            if misspelt and name.isupper():  # the value of an unknown flag may have been read as this argument
                continue
            origin = problem.origin if problem.name in given else origins.get(problem.name, problem.origin)
            wrong.append(replace(problem, name=name, origin=origin))
    if wrong:
        raise SettingsError(wrong)
    return made


def arguments_of(settings_class: type, prefix: str = "") -> Iterator[Argument]:
    """Yield every field of a dataclass and of its nested settings, including every class of a union."""
    for field, hint in annotations(settings_class).items():
        inner = classes_in(hint).values()
        for kind in inner:
            yield from arguments_of(kind, f"{prefix}{field}.")
        if not inner:
            yield Argument(prefix + field, hint, settings_class)


def distinct(arguments: Iterable[Argument]) -> list[Argument]:
    """Keep the first argument for each flag; several models, or a command and its settings, may share a flag."""
    found: dict[str, Argument] = {}
    for argument in arguments:
        found.setdefault(argument.flags[0].lower().lstrip("-"), argument)
    return list(found.values())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Nested:
    """Merge nested values; `over` takes precedence, and a group of a different `kind` is replaced as a whole."""
    values = dict(base)
    for name, value in over.items():
        before = values.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            other = value.get("kind", before.get("kind")) != before.get("kind")
            values[name] = dict(value) if other else merged(before, value)
        else:
            values[name] = value
    return values


def in_flags(text: str, command: type | None = None) -> str:
    """Replace the Python names of arguments in a message with flags, or with the command's MODEL, RUN and so on.

    Example:
        >>> in_flags("train.batch_size: must be 4, got 3. Pass train.epochs=2, or raise optim.clip.")
        '--batch-size: must be 4, got 3. Pass --epochs 2, or raise --optim-clip.'
    """
    from attnconv.training.settings import RunSettings

    several = () if command is None else arguments_of(command)
    labels = _LABELS | {argument.name: argument.flags[0] for argument in several if argument.positional}
    label = rf"(^|: )({'|'.join(labels)})(?=: )"
    text = re.sub(label, lambda found: found[1] + labels[found[2]], text, flags=re.MULTILINE)
    flags = _FLAGS | {argument.name: argument.flags[0] for argument in arguments_of(RunSettings)}

    def spelled(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if value is None:
            labelled = "." in name or text.startswith(": ", found.end())
            return flags[name] if labelled else found[0]
        if value in ("True", "False"):
            return flags[name] if value == "True" else flags[name].replace("--", "--no-", 1)
        return f"{flags[name]} {re.sub('[][]|' + chr(39), '', value).replace(', ', ',')}"

    names = "|".join(re.escape(name) for name in sorted(flags, key=len, reverse=True))
    value = r"=(?P<value>'[^']*'|\[[^\]]*\]|[\w+-]+(?:\.\w+)*)"
    return re.sub(rf"(?<![\w./-])(?:settings\.)?(?P<name>{names})(?:{value}|(?![\w/=-]|\.\w))", spelled, text)


def _given(arguments: Sequence[Argument], words: Sequence[str]) -> tuple[Nested, list[Problem], bool]:
    """Return the values by dotted name, the problems with invalid words, and whether a flag is unknown."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    named = {argument.name: argument for argument in distinct(arguments) if not argument.positional}
    for argument in named.values():
        add_option(parser, argument)
    parser.add_argument("-h", "--help", action="store_true")
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in words]
    try:
        found, rest = parser.parse_known_args(dashed)
    except argparse.ArgumentError as error:
        raise SettingsError([Problem(str(error.argument_name), "must be given without a value", "one")]) from error
    values, wrong = {}, []
    for name, value in vars(found).items():
        if value is None:
            wrong.append(Problem(named[name].flags[0], f"must be {describe(named[name].hint)}", "no value"))
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
        names = " and ".join(("flags", *(argument.flags[0] for argument in positional)))
        wrong.append(Problem("arguments", f"must be {names}", repr(" ".join(others)), "See --help."))
    return values, wrong, bool(unknown)


def add_option(parser: argparse.ArgumentParser, argument: Argument) -> argparse.Action:
    """Add an argument's flags to a parser, which returns values as text."""
    if argument.hint is bool:
        for flag, constant in zip(argument.flags, (True, False), strict=True):
            action = parser.add_argument(flag, dest=argument.name, action="store_const", const=constant)
        return action
    return parser.add_argument(*argument.flags, dest=argument.name, nargs="*" if _is_list(argument.hint) else "?")


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(map(_is_list, get_args(hint)))


def _typed(texts: str | list[str], hint: Any) -> Any:
    """Convert the words after a flag to its type; if they are invalid, to a number if possible, otherwise to text."""
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
    """Format the usage, the command's docstring, and every argument with its default, overridden by `values`."""

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
    positional = [argument for argument in shown if argument.positional]
    usage = [f"[{each.flags[0]}]" if each.default is not MISSING else each.flags[0] for each in positional]
    name = command.__module__.rpartition(".")[2].removesuffix("_command")
    lines = [" ".join(["usage: attnconv", name, "[-h] [OPTIONS]", *usage]), ""]
    about, _, examples = str(inspect.getdoc(command)).partition("Attributes:")[0].partition("Examples:\n")
    for paragraph in about.strip().split("\n\n"):
        lines += [*_wrapped(paragraph), ""]
    lines += ["examples:", textwrap.indent(inspect.cleandoc(examples), "  ")]
    for name, members in groupby(shown, key=title):
        several = list(members)
        lines += ["", f"{name} options:".strip()]
        lines += _wrapped(str(inspect.getdoc(several[0].group)).partition("\n")[0], "  ") if name else []
        for argument in several:
            lines += _entry(argument, defaults.get(argument.name, argument.default))
    return "\n".join(lines)


def _entry(argument: Argument, default: Any) -> list[str]:
    """Format an argument's flags and type, its explanation, and its default unless that is None or empty."""
    text, value = argument.explanation, ""
    if argument.hint is not bool and not argument.positional:
        value = f" {argument.metavar}"
    if len(value) > _NARROW:
        text, value = f"{text} One of {value.strip(' {}').replace(',', ', ')}.", " NAME"
    if default not in (MISSING, None, (), []) and not argument.positional:
        listed = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
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
