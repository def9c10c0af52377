"""Settings: annotations that are allowed, values that are read, and error messages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

import attnconv
from attnconv._util.settings import (
    Count,
    Counts,
    Fine,
    Fraction,
    Magnitude,
    Positive,
    Problem,
    Seed,
    SettingsError,
    check,
    describe,
    plain,
    problems,
    read,
)


@dataclass(frozen=True)
class Round:
    """First kind of shape."""

    kind: ClassVar[str] = "round"
    radius: Positive = 1.0


@dataclass(frozen=True)
class Square:
    """Second kind of shape."""

    kind: ClassVar[str] = "square"
    side: Count = 1


@dataclass(frozen=True)
class Settings:
    """Fields of every type, in groups."""

    ignored: ClassVar[tuple[str, ...]] = ("old",)
    name: str
    shape: Round | Square = field(default_factory=Round)
    counts: Count | Counts = 3
    seed: Seed = 0
    rate: Fraction = 0.5
    size: Magnitude = 1.0
    colour: Literal["red", "blue"] | None = None
    folder: Path | None = None
    switch: bool = False

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Yield the problems of combinations of fields."""
        if fine("counts", "seed") and self.seed == self.counts:
            yield Problem("seed", "must not be the count")
        if fine() and self.switch:
            yield Problem("switch", "must be off while all is well")


def found(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of all problems."""
    with pytest.raises(SettingsError) as error:
        read(Settings, {"name": "a", **values}, name="it", origin="from a.json")
    assert all(problem.origin == "from a.json" for problem in error.value.problems)
    return [(problem.name, problem.got) for problem in error.value.problems]


@pytest.mark.parametrize(
    "settings",
    [Settings("a"), Settings("b", Square(2), counts=(1, 2), colour="red", folder=None), Settings("c", rate=0, size=2)],
)
@pytest.mark.usefixtures("unhooked")
def test_what_is_written_is_read(settings: Settings) -> None:
    again = read(Settings, plain(settings))
    assert again == settings
    assert isinstance(again.rate, float)
    assert problems(settings) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("counts", True),
        ("counts", 3.0),
        ("counts", "3"),
        ("counts", 0),
        ("counts", 65_537),
        ("counts", []),
        ("counts", [1, 0]),
        ("seed", 2**63),
        ("seed", None),
        ("rate", 1),
        ("rate", float("nan")),
        ("size", float("inf")),
        ("size", 10**400),
        ("size", False),
        ("colour", "green"),
        ("colour", ["red"]),
        ("switch", 1),
        ("shape", 3),
        ("name", 3),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    assert found({name: value}) == [(f"it.{name}", repr(value))]


def test_all_problems_are_named_at_once_with_the_rules_that_can_be_judged() -> None:
    wrong = {"shape": {"kind": "square", "side": 0}, "counts": 4, "seed": 4, "rate": 2.0, "switch": True, "rat": 1}
    assert found(wrong) == [("it.shape.side", "0"), ("it.rate", "2.0"), ("it.rat", "1"), ("it.seed", "4")]
    assert found({"seed": 3}) == [("it.seed", "3")]
    assert found({"counts": 0, "seed": 3}) == [("it.counts", "0")]
    assert found({"switch": True}) == [("it.switch", "True")]


def test_names() -> None:
    assert read(Settings, {"name": "a", "old": 3}) == Settings("a")
    with pytest.raises(SettingsError, match=r"^colur: .*got 'red'\. Did you mean colour or folder or counts\?$"):
        read(Settings, {"name": "a", "colur": "red"})
    with pytest.raises(SettingsError, match=r"^name: must be given"):
        read(Settings, {})
    assert found({"shape": {"kind": "oval"}}) == [("it.shape.kind", "'oval'")]
    assert found({"shape": {"kind": "round", "side": 3}}) == [("it.shape.side", "3")]


@pytest.mark.usefixtures("unhooked")
def test_check_raises_all_of_an_instance() -> None:
    with pytest.raises(SettingsError, match=r"(?s)settings\.name: .*got 3.*settings\.shape\.radius: .*got 0\.0"):
        check(Settings(3, Round(0.0)), "settings")  # type: ignore[arg-type]


def test_zero_stays_wrong_where_denormal_numbers_count_as_zero() -> None:
    torch.set_flush_denormal(True)
    assert [problem.got for problem in problems(Round(0.0))] == ["0.0"]


def test_only_the_command_line_knows_flags() -> None:
    """Errors of all other packages name Python arguments."""
    package = Path(attnconv.__file__).parent
    below = [path for path in package.rglob("*.py") if path.parent.name != "cli"]
    assert [path.name for path in below if re.search(r"(?:bad|Problem)\(\s*f?\"--", path.read_text())] == []


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Count | None, "an integer from 1 to 65,536, or None"),
        (Positive, "a finite number above 0"),
        (Fraction, "a finite number of at least 0 and below 1"),
        (Counts, "one or more integers from 1 to 65,536"),
        (tuple[str, ...], "a list of strings"),
        (Literal["b", "a"], "one of a, b"),
        (Path, "a path"),
        (bool, "True or False"),
    ],
)
def test_what_a_value_may_be(hint: Any, text: str) -> None:
    assert describe(hint) == text
