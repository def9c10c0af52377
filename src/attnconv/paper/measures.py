"""Measures of the claims: one number for each seed, the numbers to compare it with, and the same by layer."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.inspect.head_statistics import LayerStatistics
from attnconv.inspect.null_models import LEVEL, layer_trend, mirror_partners, mirror_symmetry
from attnconv.paper.finished_run import StudyRun
from attnconv.surgery.head_pruning import attention_layers, condition_numbers

LEAST_MASS, LEAST_CONSTANCY = 0.5, 0.9  # of a head at a fixed shift
RECOVERED = 0.005  # largest loss of accuracy after which a pruned model has recovered


@final
@dataclass(frozen=True)
class Found:
    """One number of one seed."""

    value: float
    beside: Mapping[str, float]  # numbers to compare it with, by name
    meets: bool | None = None  # whether it meets the claim's criterion; None if one seed cannot say
    layers: tuple[float, ...] = ()  # the number by layer, or what `Claim.by_layer` says


def at_fixed_shift(layer: LayerStatistics) -> Bool[Tensor, "h"]:
    """Whether each head has most of its mass on one shift, and a pattern that hardly changes with the query."""
    return (layer.shift_mass >= LEAST_MASS) & (layer.constancy >= LEAST_CONSTANCY)


def fixed_shifts(run: StudyRun, *, layers: tuple[int, ...]) -> Found:
    """Share of all heads at a fixed shift; each of these layers, counted from 1, must have one."""
    now, before = ([at_fixed_shift(layer).double() for layer in found] for found in (run.end, run.start))
    value, start = (float(torch.cat(heads).mean()) for heads in (now, before))
    by_layer = tuple(float(heads.mean()) for heads in now)
    meets = None
    if len(by_layer) >= max(layers):
        meets = all(by_layer[layer - 1] > 0 for layer in layers) and value > start
    return Found(value, {"at the start": start}, meets, by_layer)


def trend(run: StudyRun, *, of: Callable[[LayerStatistics], Tensor]) -> Found:
    """Rank correlation of a number of each head with the head's layer."""
    heads = [of(layer) for layer in run.end]
    found = layer_trend([layer.tolist() for layer in heads])
    return Found(found.rho, {"chance": found.chance}, found.rises, tuple(float(layer.nanmean()) for layer in heads))


def against_turned_heads(run: StudyRun, *, of: Callable[[Any], Any], lower: bool) -> Found:
    """Mean of a number over layers, to be below or above both the start's and that of heads turned at random."""
    by_layer = tuple(float(of(layer)) for layer in run.end)
    value, start = statistics.fmean(by_layer), statistics.fmean(of(layer) for layer in run.start)
    draws = torch.stack([of(layer) for layer in run.turned]).mean(0)
    chance = float(torch.quantile(draws, 1 - LEVEL if lower else LEVEL))
    meets = value < min(start, chance) if lower else value > max(start, chance)
    return Found(value, {"at the start": start, "chance": chance}, meets, by_layer)


def mirror(run: StudyRun) -> Found:
    """How far heads have left-right partners beyond up-down ones."""
    profiles = [layer.profile for layer in run.end]
    found, before = mirror_symmetry(profiles), mirror_symmetry([layer.profile for layer in run.start])
    value = found.left_right - found.up_down
    beside = {
        "left-right": found.left_right,
        "up-down": found.up_down,
        "at the start": before.left_right - before.up_down,
        "chance": found.chance,
    }
    by_layer = tuple(float(mirror_partners(profile, 1)[0].mean()) for profile in profiles)
    return Found(value, beside, value > found.chance, by_layer)


def elongation(run: StudyRun) -> Found:
    """Rank correlation of the condition number of a head's Gaussian with the head's layer."""
    models = run.trained().model, run.initial()
    now, before = ([condition_numbers(layer) for layer in attention_layers(model).values()] for model in models)
    found = layer_trend([layer.tolist() for layer in now])
    median, start = (statistics.median(torch.cat(layers).tolist()) for layers in (now, before))
    beside = {"chance": found.chance, "median condition number": median, "at the start": start}
    by_layer = tuple(statistics.median(layer.tolist()) for layer in now)
    return Found(found.rho, beside, found.rises and median > start, by_layer)


def gain(run: StudyRun, over: StudyRun) -> Found:
    """Difference of the test accuracies of two models, of the epochs chosen on held-out images."""
    value, other = _score(run, "chosen"), _score(over, "chosen")
    return Found(value - other, {run.name: value, over.name: other})


def dip(pruned: StudyRun, source: StudyRun) -> Found:
    """Test accuracy right after pruning, minus that before; by layer the number of removed heads."""
    before, after = _score(source, "last"), _score(pruned, "start")
    heads = zip(source.heads, pruned.heads, strict=True)
    removed = tuple(float(every - kept) for every, kept in heads)
    return Found(after - before, {"before": before, "pruned": after}, after < before, removed)


def recovery(pruned: StudyRun, source: StudyRun) -> Found:
    """Test accuracy of the pruned model after further training, minus that of the unpruned one."""
    before, later = _score(source, "last"), _score(pruned, "last")
    return Found(later - before, {"before": before, "trained on": later}, later - before >= -RECOVERED)


def _score(run: StudyRun, state: str) -> float:
    score = run.score(state)
    if score is None:
        fix = "Call attnconv reproduce again: it measures what is missing."
        where = str(run.folder.path)
        raise ValueError(bad("run", f"must have the test accuracy of its {state} weights", where, fix))
    return score
