"""The recipes that `experiments.recipes` compares: changes of settings, each with a word why; free of torch.

Of all networks the same number is tried: the paper's recipe; another to start from; and changes of that, one at a
time. `short` is for few epochs, in which every network here underfits; `long` is for the full models over hundreds,
where it overfits. Nothing changes how attention is defined: what belongs to a recipe of the model is where its norms
stand, its dropout and where heads begin.

A norm before each branch needs one more at the end. At full size that would be 800 parameters above the paper's, so
the MLP gives up 8 of its 512 channels there; the reduced models have 128 parameters more in 0.2 million.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from attnconv.paper.training_plan import ScaleName, settings_at
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.settings import RunSettings

NetworkName = Literal[
    "quadratic", "resnet18", "quadratic-generalized", "learned", "quadratic-16-heads", "learned-content"
]
NETWORKS: tuple[NetworkName, ...] = get_args(NetworkName)
FIRST: tuple[NetworkName, ...] = ("quadratic", "resnet18")
"""What is compared where nothing else is asked for: attention and convolutions of as many operations."""
Changes = Mapping[str, Mapping[str, Any]]

# What a recipe of the library says of the attention model beside its sizes; the residual network has nothing such.
_MODEL: Mapping[RecipeName, Mapping[str, Any]] = {
    "paper": {"norm": "post", "norm_epsilon": 1e-12, "dropout": 0.1},
    "modern": {"norm": "pre", "norm_epsilon": 1e-5, "dropout": 0.0},
}


@dataclass(frozen=True)
class Candidate:
    """A recipe.

    Attributes:
        name: Of its runs and in tables.
        base: The recipe of `attnconv.training.recipes` that it begins with.
        changes: Group of settings -> field -> value.
        why: What speaks for it.
    """

    name: str
    base: RecipeName
    changes: Changes
    why: str


@dataclass(frozen=True)
class Candidates:
    """What is tried for one network.

    Attributes:
        paper: The paper's recipe.
        start: The other one.
        variants: That one with single changes.
    """

    paper: Candidate
    start: Candidate
    variants: tuple[Candidate, ...]

    @property
    def all(self) -> tuple[Candidate, ...]:
        """In the order in which they are tried; of equals the first is taken."""
        return self.paper, self.start, *self.variants


def merged(first: Changes, second: Changes) -> dict[str, dict[str, Any]]:
    """Changes on top of others; where both name a field the second stands.

    Example:
        >>> merged({"optim": {"clip": 1.0}}, {"optim": {"learning_rate": 0.2}})
        {'optim': {'clip': 1.0, 'learning_rate': 0.2}}
    """
    groups = dict.fromkeys([*first, *second])
    return {group: {**first.get(group, {}), **second.get(group, {})} for group in groups}


def _varied(start: Candidate, *variants: tuple[str, Changes, str]) -> Candidates:
    paper = Candidate("paper", "paper", {}, "the paper's own")
    made = (Candidate(name, start.base, merged(start.changes, changes), why) for name, changes, why in variants)
    return Candidates(paper, start, tuple(made))


def _rate(value: float) -> Changes:
    return {"optim": {"learning_rate": value}}


_MODERN = Candidate("modern", "modern", {}, "the library's for small presets")
_MILD = ("mild", {"augment": {"padding": 2}}, "few epochs hardly overfit: smaller shifts")
_NEAR = ("near", {"model": {"centres": "near"}}, "heads begin as a 3 x 3 kernel, narrow")
_FREE = ("free", {"optim": {"weight_decay": 0.01}}, "a fifth of the weight decay, which tables of positions have too")
_DECAY = ("decay", {"optim": {"weight_decay": 1e-3}}, "twice the weight decay")

_RATES = ("fast", _rate(4e-3), "twice the rate: few steps"), ("slow", _rate(1e-3), "half the rate")
_GAUSSIANS = _varied(_MODERN, *_RATES, _MILD, _NEAR)
_TABLES = _varied(_MODERN, *_RATES, _MILD, _FREE)

SHORT: Mapping[NetworkName, Candidates] = {
    "quadratic": _GAUSSIANS,
    "quadratic-generalized": _GAUSSIANS,
    "quadratic-16-heads": _GAUSSIANS,
    "learned": _TABLES,
    "learned-content": _TABLES,
    "resnet18": _varied(
        _MODERN,
        ("fast", _rate(0.2), "twice the rate: few steps"),
        ("slow", _rate(0.05), "half the rate"),
        _MILD,
        _DECAY,
    ),
}

_STRONG: Changes = {"augment": {"recipe": "modern"}}
_MIX = ("mix", {"augment": {"cutmix": 1.0}}, "CutMix on top: many epochs overfit")
_CUTOUT = ("cutout", {"augment": {"cutout": 16, "jitter": 0.0}}, "a larger square cut out, colours left alone")
_LONG_MODEL: Changes = {"model": {"dropout": 0.1, "mlp_width": 504}, **_rate(1e-3)}

_LONG_ATTENTION = Candidate(
    "long", "modern", merged(_STRONG, _LONG_MODEL), "modern, slower, with dropout and stronger changes"
)
_LONG_COMMON = ("fast", _rate(2e-3), "twice the rate"), _MIX, _CUTOUT
_LONG_GAUSSIANS = _varied(_LONG_ATTENTION, *_LONG_COMMON, _NEAR)
_LONG_TABLES = _varied(_LONG_ATTENTION, *_LONG_COMMON, _FREE)

LONG: Mapping[NetworkName, Candidates] = {
    "quadratic": _LONG_GAUSSIANS,
    "quadratic-generalized": _LONG_GAUSSIANS,
    "quadratic-16-heads": _LONG_GAUSSIANS,
    "learned": _LONG_TABLES,
    "learned-content": _LONG_TABLES,
    "resnet18": _varied(
        Candidate("long", "modern", _STRONG, "modern with stronger changes"),
        ("fast", _rate(0.2), "twice the rate"),
        _MIX,
        _CUTOUT,
        _DECAY,
    ),
}


def candidates(scale: ScaleName, network: NetworkName) -> Candidates:
    """What is tried at a scale.

    Example:
        >>> [len(candidates("mini", network).all) for network in NETWORKS]
        [6, 6, 6, 6, 6, 6]
    """
    return (LONG if scale == "paper" else SHORT)[network]


def combined(tried: Candidates, scores: Mapping[str, float]) -> Candidate | None:
    """All variants together that did better by themselves than what they vary; None where fewer than two did.

    Args:
        tried: Candidates of a network.
        scores: Name -> accuracy on held-out images. Of two that change the same field the better one has it.
    """
    better = [variant for variant in tried.variants if scores[variant.name] > scores[tried.start.name]]
    changes = tried.start.changes
    for variant in sorted(better, key=lambda variant: scores[variant.name]):  # the best last, so that it stands
        changes = merged(changes, _beyond(tried.start.changes, variant.changes))
    name = "+".join(variant.name for variant in better)
    return Candidate(name, tried.start.base, changes, "what did better alone, together") if len(better) > 1 else None


def _beyond(first: Changes, second: Changes) -> Changes:
    """What the second changes otherwise than the first."""
    return {
        group: {name: value for name, value in to.items() if (name, value) not in first.get(group, {}).items()}
        for group, to in second.items()
    }


def settings_of(scale: ScaleName, network: NetworkName, candidate: Candidate) -> RunSettings:
    """The run of a network at a scale with a recipe, over the scale's epochs.

    Example:
        >>> settings = settings_at("paper", "resnet18")
        >>> replace(settings_of("paper", "resnet18", LONG["resnet18"].paper), preset="resnet18") == settings
        True
    """
    planned, base = settings_at(scale, network), recipe(network, candidate.base)
    changes = merged({"model": _MODEL[candidate.base]} if network != "resnet18" else {}, candidate.changes)
    model = replace(planned.model, **changes.pop("model", {}))
    groups = {"augment": base.augment, "optim": base.optim, "schedule": base.schedule}
    changed: Any = {name: replace(group, **changes.pop(name, {})) for name, group in groups.items()}  # type: ignore[type-var]
    assert not changes, f"unknown groups of settings: {changes}"
    made = replace(planned, preset=f"{planned.preset}-{candidate.name}", model=model, **changed)
    epochs = replace(made.train, epochs=base.train.epochs)  # those that its milestones are made for
    return over_epochs(replace(made, train=epochs), planned.train.epochs)


def over_epochs(settings: RunSettings, epochs: int) -> RunSettings:
    """A run on another number of epochs, its milestones moved with it; those that fall on its ends go.

    Example:
        >>> over_epochs(settings_at("paper", "resnet18"), 4).schedule.milestones
        (1, 2, 3)
    """
    schedule, train = settings.schedule, replace(settings.train, epochs=epochs)
    if schedule.name == "steps":
        moved = {stone * epochs // settings.train.epochs for stone in schedule.milestones}
        schedule = replace(schedule, milestones=tuple(sorted(stone for stone in moved if 0 < stone < epochs)))
    return replace(settings, schedule=schedule, train=train)


def in_words(changes: Changes) -> str:
    """Changes as they stand in a table.

    Example:
        >>> in_words({"optim": {"learning_rate": 0.2}, "augment": {"padding": 2}})
        'optim.learning_rate 0.2, augment.padding 2'
    """
    words: Sequence[str] = [f"{group}.{name} {value}" for group, to in changes.items() for name, value in to.items()]
    return ", ".join(words) or "none"
