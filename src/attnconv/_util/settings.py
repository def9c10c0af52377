"""Settings: frozen dataclasses with annotations that constrain the values.

    Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]

`read` creates an instance from plain values, `problems` validates an instance, and `plain` converts it to JSON values.
The classes of a union have different values of `kind`. A class may define rules between its fields in a method
`conflicts(fine)`, which yields a `Problem` for each violated rule. `fine(*names)` returns whether the named fields, or
by default all fields, are valid so far.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta, inspect

from attnconv._util.errors import bad, did_you_mean

Fine: TypeAlias = Callable[..., bool]
Natural = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1, le=65_536)]
Counts = Annotated[tuple[Count, ...], Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# The smallest normal float. With `gt=0`, msgspec compares with a denormal number, which torch.set_flush_denormal turns
# into 0, so that 0 would be accepted.
SMALLEST = sys.float_info.min
Positive = Annotated[float, Meta(ge=SMALLEST)]
Magnitude = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True)
class Problem:
    """Invalid setting; `str` returns the error message.

    `name` is dotted, such as `optim.learning_rate`. If `conflicts` leaves `got` empty, the field's value is inserted.
    """

    name: str
    requirement: str
    got: str = ""
    fix: str = ""
    origin: str = ""

    def __str__(self) -> str:
        return bad(self.name, self.requirement, self.got, self.fix, origin=self.origin)


class SettingsError(ValueError):
    """Invalid settings. The message has one line for each of the `problems`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def problems(settings: Any, name: str = "") -> list[Problem]:
    """List the problems of an instance and of its nested instances; `name` is the prefix of the field names."""
    return _value(type(settings), settings, name)[1]


def check(settings: Any, name: str = "") -> None:
    """Raise `SettingsError` with all `problems` of an instance if there are any."""
    if found := problems(settings, name):
        raise SettingsError(found)


def read(hint: Any, values: Any, *, name: str = "", origin: str = "") -> Any:
    """Create an instance of a class, or of the class in a union that the value `kind` selects, from plain JSON values.

    Missing fields take their defaults; names in the class attribute `ignored` are skipped. Raises `SettingsError` with
    all problems; `origin` describes the source of the values.
    """
    settings, found = _value(hint, values, name)
    if found:
        raise SettingsError([replace(problem, origin=origin) for problem in found])
    return settings


def plain(settings: Any) -> dict[str, Any]:
    """Convert an instance to JSON values, including the `kind` of its class."""
    values = {"kind": settings.kind} if hasattr(settings, "kind") else {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        values[field.name] = plain(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values into a dictionary by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


def classes_in(hint: Any) -> dict[str, type]:
    """Return the settings classes of an annotation by kind; empty for a plain value."""
    found = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    return {getattr(kind, "kind", ""): kind for kind in found}


@cache
def annotations(settings_class: Any) -> dict[str, Any]:
    """Return the annotation of each field, including its `Meta`."""
    hints = get_type_hints(settings_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(settings_class)}


def _value(hint: Any, value: Any, name: str) -> tuple[Any, list[Problem]]:
    """Return the validated value, or None, and the list of problems."""
    classes = classes_in(hint)
    if type(value) in classes.values():
        return _instance(type(value), vars(value), name)
    if not classes:
        return _plain_value(hint, value, name)
    if not isinstance(value, Mapping):
        return None, [Problem(name or "settings", "must map setting names to values", repr(value))]
    if len(classes) == 1:
        return _instance(next(iter(classes.values())), value, name)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in classes:
        return None, [Problem(_join(name, "kind"), f"must be one of {', '.join(classes)}", repr(kind))]
    return _instance(classes[kind], {field: value[field] for field in value if field != "kind"}, name)


def _plain_value(hint: Any, value: Any, name: str) -> tuple[Any, list[Problem]]:
    try:
        number = float(value) if isinstance(value, float) else value  # NumPy floats become Python floats
        made = msgspec.convert(number, hint, dec_hook=lambda kind, text: kind(text))
    except msgspec.ValidationError:
        made = math.nan
    if isinstance(made, float) and not math.isfinite(made):
        return None, [Problem(name, f"must be {describe(hint)}", repr(value))]
    return made, []


def _instance(settings_class: Any, values: Mapping[str, Any], name: str) -> tuple[Any, list[Problem]]:
    """Return an instance with defaults instead of invalid values, and the list of problems."""
    hints, found, valid = annotations(settings_class), [], {}
    for field, value in values.items():
        if field in hints:
            made, wrong = _value(hints[field], value, _join(name, field))
            found += wrong
            if not wrong:
                valid[field] = made
        elif field not in getattr(settings_class, "ignored", ()):
            fix = (
                did_you_mean(field, hints) or f"Known settings are {', '.join(_join(name, known) for known in hints)}."
            )
            found.append(Problem(_join(name, field), "must be a known setting", repr(value), fix))
    required = [field.name for field in fields(settings_class) if field.default is field.default_factory is MISSING]
    found += [Problem(_join(name, field), "must be given", "no value") for field in required if field not in values]
    if not all(field in valid for field in required):
        return None, found
    settings = settings_class(**valid)

    def fine(*names: str) -> bool:
        wrong = [problem.name.removeprefix(f"{name}.") for problem in found]
        return not any(part == field or part.startswith(f"{field}.") for part in wrong for field in names or wrong)

    for rule in settings.conflicts(fine) if hasattr(settings, "conflicts") else ():
        got = rule.got or repr(attrgetter(rule.name)(settings))
        found.append(replace(rule, name=_join(name, rule.name), got=got))
    return settings, found


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


@cache
def describe(hint: Any) -> str:
    """Describe the valid values as part of a sentence, such as 'an integer from 1 to 65,536, or None'."""
    return _described(inspect.type_info(hint))


def _described(kind: inspect.Type, *, several: bool = False) -> str:
    match kind:
        case inspect.IntType():
            return ("integers" if several else "an integer") + _range(kind)
        case inspect.FloatType():
            return ("finite numbers" if several else "a finite number") + _range(kind)
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.UnionType(types=types):
            none_last = sorted(types, key=lambda each: isinstance(each, inspect.NoneType))
            return ", or ".join(map(_described, none_last))
        case inspect.VarTupleType(item_type=item, min_length=least):
            return ("one or more " if least else "a list of ") + _described(item, several=True)
        case inspect.NoneType():
            return "None"
        case inspect.BoolType():
            return "True or False"
        case inspect.StrType(min_length=least):
            return "strings" if several else "a non-empty string" if least else "a string"
    return "paths" if several else "a path"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    above = kind.ge == SMALLEST
    if kind.ge is not None and kind.le is not None and not above:
        return f" from {_number(kind.ge)} to {_number(kind.le)}"
    bounds = {"of at least": None if above else kind.ge, "below": kind.lt, "at most": kind.le}
    parts = [f"{words} {_number(bound)}" for words, bound in bounds.items() if bound is not None]
    parts = ["above 0", *parts] if above else parts
    return f" {' and '.join(parts)}" if parts else ""


def _number(bound: int | float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
