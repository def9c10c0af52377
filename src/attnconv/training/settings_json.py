"""Run settings as plain JSON values and back: what ``settings.json`` and a checkpoint's metadata hold.

Reading trusts nothing: a name that is not known, a missing group, a value of the wrong type are named, all of them at
once, with the file they came from. Fields that an older version did not write take their defaults.
"""

import types
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real
from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.models import settings as model_settings
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, SettingsError, TrainSettings

T = TypeVar("T")

_GROUPS: Mapping[str, type] = {
    "data": DataSettings,
    "augment": AugmentSettings,
    "optim": OptimSettings,
    "schedule": ScheduleSettings,
    "train": TrainSettings,
}


def to_plain(settings: RunSettings) -> dict[str, Any]:
    """The settings as plain values: dictionaries, lists, strings, numbers, booleans and None.

    Example:
        >>> from attnconv.models.presets import PRESETS
        >>> plain = to_plain(RunSettings(preset="resnet18", model=PRESETS["resnet18"]))
        >>> plain["schedule"]["milestones"]
        [80, 150, 250]
    """
    groups = {name: _listed(asdict(getattr(settings, name))) for name in _GROUPS}
    return {"preset": settings.preset, "model": model_settings.to_dict(settings.model), **groups}


def from_plain(values: Mapping[str, Any], *, origin: str = "") -> RunSettings:
    """Settings from what ``to_plain`` wrote.

    Args:
        values: plain JSON values.
        origin: where they came from, for the messages (``from runs/a/settings.json``).

    Raises:
        SettingsError: naming every unknown name and every value of a wrong type.

    Example:
        >>> from attnconv.models.presets import PRESETS
        >>> settings = RunSettings(preset="resnet18", model=PRESETS["resnet18"])
        >>> from_plain(to_plain(settings)) == settings
        True
    """
    found = [
        bad(name, "must be a known group of settings", repr(values[name]), origin=origin)
        for name in values
        if name not in ("preset", "model", *_GROUPS)
    ]
    preset = values.get("preset")
    if not isinstance(preset, str):
        found.append(bad("preset", "must be a name", repr(preset), origin=origin))
    model: Any = None
    if not isinstance(values.get("model"), Mapping):
        found.append(bad("model", "must be a group of settings", repr(values.get("model")), origin=origin))
    else:
        try:
            model = model_settings.from_dict(values["model"], origin=origin)
        except ValueError as error:
            found += str(error).splitlines()
    groups: dict[str, Any] = {
        name: _group(cls, values.get(name, {}), name, origin, found) for name, cls in _GROUPS.items()
    }
    if found:
        raise SettingsError(found)
    return RunSettings(preset=str(preset), model=model, **groups)


def _group(cls: type[T], values: Any, group: str, origin: str, found: list[str]) -> T | None:
    if not isinstance(values, Mapping):
        found.append(bad(group, "must be a group of settings", repr(values), origin=origin))
        return None
    hints = get_type_hints(cls)
    known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
    before = len(found)
    read: dict[str, Any] = {}
    for name, value in values.items():
        if (group, name) in (("train", "devices"), ("train", "nodes")):  # of earlier versions; torchrun knows both
            continue
        if name not in known:
            fix = f"Known are {', '.join(known)}."
            found.append(bad(f"{group}.{name}", "must be a known setting", repr(value), fix, origin=origin))
            continue
        read[name] = tuple(value) if isinstance(value, list) else value
        if not fits(read[name], hints[name]):
            found.append(bad(f"{group}.{name}", f"must be {in_words(hints[name])}", repr(value), origin=origin))
    return cls(**read) if len(found) == before else None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type that a field is annotated with."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in get_args(hint))
    if origin is tuple:
        choices = get_args(hint)
        if choices[-1] is Ellipsis:
            return isinstance(value, tuple) and all(fits(item, choices[0]) for item in value)
        return isinstance(value, tuple) and len(value) == len(choices) and all(map(fits, value, choices))
    if origin is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if is_typeddict(hint):
        known = get_type_hints(hint)
        return isinstance(value, dict) and all(name in value and fits(value[name], known[name]) for name in known)
    if hint is float:
        return isinstance(value, float) or is_real(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def in_words(hint: Any) -> str:
    """What a value of an annotated type is, as part of a sentence.

    Example:
        >>> in_words(int | None), in_words(Literal["sgd", "adamw"])
        ('a whole number or None', 'one of sgd, adamw')
    """
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(choice) for choice in get_args(hint))
    if origin is tuple:
        return f"a list, each item {in_words(get_args(hint)[0])}"
    return "None" if hint is type(None) else names.get(hint, str(hint))


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
