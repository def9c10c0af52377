"""Training recipes for `experiments.recipes`: changes of settings with their rationale; does not import torch.

The number of candidates is the same for all networks: the paper's recipe, an alternative recipe, and single changes of
the alternative. `SHORT` is for few epochs, in which all networks underfit. `LONG` is for the full models and hundreds
of epochs, in which they overfit. No candidate changes the definition of attention. Recipes only change the position of
norms, the dropout and the initial centres of heads in the model.

Pre-norm models need an additional final norm. At full size this would be 800 parameters more than in the paper, so the
MLP has 504 instead of 512 channels. The smaller models, with 0.2 million parameters, have 128 more than in the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from attnconv.cli.parsing import merged
from attnconv.paper.training_plan import ScaleName, settings_at
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.settings import RunSettings

NetworkName = Literal[
    "quadratic", "resnet18", "quadratic-generalized", "learned", "quadratic-16-heads", "learned-content"
]
NETWORKS: tuple[NetworkName, ...] = get_args(NetworkName)
FIRST: tuple[NetworkName, ...] = ("quadratic", "resnet18")
"""Networks that are compared by default: attention and convolution with about the same number of FLOPs."""
Changes = Mapping[str, Mapping[str, Any]]

# Settings of the attention model, other than sizes, that belong to a recipe. The ResNet has no settings of this kind.
_MODEL: Mapping[RecipeName, Mapping[str, Any]] = {
    "paper": {"norm": "post", "norm_epsilon": 1e-12, "dropout": 0.1},
    "modern": {"norm": "pre", "norm_epsilon": 1e-5, "dropout": 0.0},
}


@dataclass(frozen=True)
class Candidate:
    """A candidate recipe.

    Attributes:
        name: Name in run folders and tables.
        base: Recipe of `attnconv.training.recipes` that it is based on.
        changes: Changed values, by group of settings and field.
        why: Rationale.
    """

    name: str
    base: RecipeName
    changes: Changes
    why: str


@dataclass(frozen=True)
class Candidates:
    """All candidate recipes of one network.

    Attributes:
        paper: Recipe of the paper.
        start: Alternative recipe.
        variants: Single changes of the alternative recipe.
    """

    paper: Candidate
    start: Candidate
    variants: tuple[Candidate, ...]

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates in order; in case of ties the first one is chosen."""
        return self.paper, self.start, *self.variants


def _varied(start: Candidate, *variants: tuple[str, Changes, str]) -> Candidates:
    paper = Candidate("paper", "paper", {}, "recipe of the paper")
    made = (Candidate(name, start.base, merged(start.changes, changes), why) for name, changes, why in variants)
    return Candidates(paper, start, tuple(made))


def _rate(value: float) -> Changes:
    return {"optim": {"learning_rate": value}}


_MODERN = Candidate("modern", "modern", {}, "default recipe for small presets")
_MILD = ("mild", {"augment": {"padding": 2}}, "weaker augmentation, since few epochs hardly overfit")
_NEAR = ("near", {"model": {"centres": "near"}}, "heads initialised as a narrow 3 x 3 kernel")
_FREE = ("free", {"optim": {"weight_decay": 0.01}}, "a fifth of the weight decay, which applies to position tables too")
_DECAY = ("decay", {"optim": {"weight_decay": 1e-3}}, "twice the weight decay")

_RATES = (
    ("fast", _rate(4e-3), "twice the learning rate, for few steps"),
    ("slow", _rate(1e-3), "half the learning rate"),
)
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
        ("fast", _rate(0.2), "twice the learning rate, for few steps"),
        ("slow", _rate(0.05), "half the learning rate"),
        _MILD,
        _DECAY,
    ),
}

_STRONG: Changes = {"augment": {"recipe": "modern"}}
_MIX = ("mix", {"augment": {"cutmix": 1.0}}, "additional CutMix, since many epochs overfit")
_CUTOUT = ("cutout", {"augment": {"cutout": 16, "jitter": 0.0}}, "larger cutout, no colour jitter")
_LONG_MODEL: Changes = {"model": {"dropout": 0.1, "mlp_width": 504}, **_rate(1e-3)}

_LONG_ATTENTION = Candidate(
    "long", "modern", merged(_STRONG, _LONG_MODEL), "lower learning rate, dropout, stronger augmentation"
)
_LONG_COMMON = ("fast", _rate(2e-3), "twice the learning rate"), _MIX, _CUTOUT
_LONG_GAUSSIANS = _varied(_LONG_ATTENTION, *_LONG_COMMON, _NEAR)
_LONG_TABLES = _varied(_LONG_ATTENTION, *_LONG_COMMON, _FREE)

LONG: Mapping[NetworkName, Candidates] = {
    "quadratic": _LONG_GAUSSIANS,
    "quadratic-generalized": _LONG_GAUSSIANS,
    "quadratic-16-heads": _LONG_GAUSSIANS,
    "learned": _LONG_TABLES,
    "learned-content": _LONG_TABLES,
    "resnet18": _varied(
        Candidate("long", "modern", _STRONG, "stronger augmentation"),
        ("fast", _rate(0.2), "twice the learning rate"),
        _MIX,
        _CUTOUT,
        _DECAY,
    ),
}


def candidates(scale: ScaleName, network: NetworkName) -> Candidates:
    """Return the candidates for a network at a scale.

    Example:
        >>> [len(candidates("mini", network).all) for network in NETWORKS]
        [6, 6, 6, 6, 6, 6]
    """
    return (LONG if scale == "paper" else SHORT)[network]


def combined(tried: Candidates, scores: Mapping[str, float]) -> Candidate | None:
    """Combine all variants that are better than the alternative recipe; None if there are fewer than two.

    Args:
        tried: Candidates of a network.
        scores: Accuracy on held-out images, by name. If two variants change the same field, the better one is used.
    """
    better = [variant for variant in tried.variants if scores[variant.name] > scores[tried.start.name]]
    changes = tried.start.changes
    for variant in sorted(better, key=lambda variant: scores[variant.name]):  # the last one has priority
        changes = merged(changes, _beyond(tried.start.changes, variant.changes))
    name = "+".join(variant.name for variant in better)
    return Candidate(name, tried.start.base, changes, "combined improvements") if len(better) > 1 else None


def _beyond(first: Changes, second: Changes) -> Changes:
    """Return the changes in `second` that differ from those in `first`."""
    return {
        group: {name: value for name, value in to.items() if (name, value) not in first.get(group, {}).items()}
        for group, to in second.items()
    }


def settings_of(scale: ScaleName, network: NetworkName, candidate: Candidate) -> RunSettings:
    """Return the run settings of a network with a recipe, for the epochs of the scale.

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
    epochs = replace(made.train, epochs=base.train.epochs)  # the epochs that its milestones refer to
    return over_epochs(replace(made, train=epochs), planned.train.epochs)


def over_epochs(settings: RunSettings, epochs: int) -> RunSettings:
    """Change the number of epochs and rescale the milestones; milestones at the first or last epoch are removed.

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
    """Format changes for a table.

    Example:
        >>> in_words({"optim": {"learning_rate": 0.2}, "augment": {"padding": 2}})
        'optim.learning_rate 0.2, augment.padding 2'
    """
    words: Sequence[str] = [f"{group}.{name} {value}" for group, to in changes.items() for name, value in to.items()]
    return ", ".join(words) or "none"
