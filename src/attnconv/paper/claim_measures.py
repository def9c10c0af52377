"""What a run shows of each thing that the paper saw in its heads: one number, what it stands against, and by layer.

Each function takes the runs of one seed by their names and gives a `Found`. Statistics of heads are those of the audit,
over all queries: of blank images where positions alone are attended, else over the first 100 test images. The model at
its start is the one that the run's seed makes.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.head_arrangement import TurnedHeads, mirror_partners, mirror_symmetry, turned_heads
from attnconv.inspect.head_statistics import LayerStatistics
from attnconv.inspect.layer_trends import LEVEL, layer_trend
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.paper.figures import images_for
from attnconv.paper.fixed_shifts import fixed_heads, layers_over_shifts
from attnconv.paper.tables import accuracies
from attnconv.surgery.head_pruning import attention_layers, condition_numbers
from attnconv.training.initial_model import starting_model
from attnconv.training.run_folder import RunFolder

RECOVERED = 0.005  # of accuracy: as far below the unpruned model as still counts as recovered


@final
@dataclass(frozen=True)
class Found:
    """One number of one run.

    Attributes:
        value: The number.
        beside: What it is compared with, by its name.
        meets: Whether it meets the observation's criterion; None where the run cannot say, or not alone.
        layers: The same by layer, first to last, or what the observation says is shown by layer.
    """

    value: float
    beside: Mapping[str, float]
    meets: bool | None = None
    layers: tuple[float, ...] = ()


@final
@dataclass(frozen=True)
class MeasuredRun:
    """A run whose heads are measured once, when they are first asked for.

    Attributes:
        run: Its folder, with the weights of a complete epoch.
    """

    run: RunFolder

    @cached_property
    def end(self) -> list[LayerStatistics]:
        """Statistics of each layer after the last complete epoch."""
        return layers_over_shifts(self._loaded.model, self._images)

    @cached_property
    def start(self) -> list[LayerStatistics]:
        """The same before the first step."""
        return layers_over_shifts(self._first, self._images)

    @cached_property
    def turned(self) -> list[TurnedHeads]:
        """Each layer's heads turned at random."""
        return [turned_heads(layer.profile, seed=number) for number, layer in enumerate(self.end)]

    def conditions(self, *, start: bool = False) -> list[list[float]]:
        """Condition number of each head's Gaussian, layer by layer, at the end or at the start."""
        model = self._first if start else self._loaded.model
        return [condition_numbers(layer).tolist() for layer in attention_layers(model).values()]

    def score(self, state: str) -> float:
        """Test accuracy of `start`, `last` or `best`.

        Raises:
            ValueError: It was not measured.
        """
        found = (self.run.result() or {}).get(state, {})
        if "test" not in found:
            fix = "Call attnconv reproduce again: it measures what is missing."
            raise ValueError(bad("run", f"must have the test accuracy of its {state} weights", str(self.run.path), fix))
        return float(found["test"]["accuracy"])

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of heads of each layer."""
        model = self.run.settings().model
        assert isinstance(model, AttentionSettings)
        return model.heads_per_layer

    @property
    def _loaded(self) -> LoadedModel:  # read anew each time: statistics are small, models of all runs together are not
        return load_model(self.run.last_weights)

    @property
    def _first(self) -> nn.Module:
        return starting_model(self.run)

    @cached_property
    def _images(self) -> Tensor:
        return images_for(self.run, self._loaded)


Runs: TypeAlias = Mapping[str, MeasuredRun]  # of one seed, by the names of their models
Measure: TypeAlias = Callable[[Runs], Found]


def fixed_shifts(name: str, layers: Sequence[int]) -> Measure:
    """Share of all heads that hold a fixed shift; these layers, counted from 1, are asked to have one each."""

    def measure(runs: Runs) -> Found:
        shares, before = _fixed(runs[name].end), _fixed(runs[name].start)
        value, start = _by_heads(shares), _by_heads(before)
        by_layer = tuple(statistics.fmean(heads) for heads in shares)
        known = len(by_layer) >= max(layers)
        meets = all(by_layer[layer - 1] > 0 for layer in layers) and value > start if known else None
        return Found(value, {"at the start": start}, meets, by_layer)

    return measure


def centre_distance(name: str) -> Measure:
    """How the distance of a head's mean centre of attention from the query goes with its layer."""
    return _trend(name, lambda layer: layer.centre.norm(dim=1))


def reach(name: str) -> Measure:
    """How the mean distance between query and key goes with the layer."""
    return _trend(name, lambda layer: layer.distance)


def content(name: str) -> Measure:
    """How the share of content goes with the layer."""

    def share(layer: LayerStatistics) -> Tensor:
        if layer.content_share is None:
            raise ValueError(bad("run", "must attend by content", f"positions alone, in {name}"))
        return layer.content_share

    return _trend(name, share)


def _trend(name: str, number: Callable[[LayerStatistics], Tensor]) -> Measure:
    def measure(runs: Runs) -> Found:
        values = [number(layer) for layer in runs[name].end]
        trend = layer_trend([layer.tolist() for layer in values])
        by_layer = tuple(float(layer.nanmean()) for layer in values)
        return Found(trend.rho, {"chance": trend.chance}, trend.rises, by_layer)

    return measure


def overlap(name: str) -> Measure:
    """Mean cosine between the profiles of two heads of a layer, against the start and heads turned at random."""
    return _turned(name, lambda layer: layer.redundancy, lower=True)


def coverage(name: str) -> Measure:
    """Mean mass that distinct heads hold on the kernel they could make up, against the start and turned heads."""
    return _turned(name, lambda layer: layer.coverage, lower=False)


def _turned(name: str, number: Callable[[LayerStatistics | TurnedHeads], Any], *, lower: bool) -> Measure:
    """A number of layers, of draws a tensor of it, that is to lie below or above both the start's and chance."""

    def measure(runs: Runs) -> Found:
        run = runs[name]
        by_layer = tuple(float(number(layer)) for layer in run.end)
        value, start = statistics.fmean(by_layer), statistics.fmean(number(layer) for layer in run.start)
        draws = torch.stack([number(layer) for layer in run.turned]).mean(0)
        chance = float(torch.quantile(draws, 1 - LEVEL if lower else LEVEL))
        meets = value < min(start, chance) if lower else value > max(start, chance)
        return Found(value, {"at the start": start, "chance": chance}, meets, by_layer)

    return measure


def mirrored(name: str) -> Measure:
    """How far heads have left-right partners beyond up-down ones."""

    def measure(runs: Runs) -> Found:
        profiles = [layer.profile for layer in runs[name].end]
        before = mirror_symmetry([layer.profile for layer in runs[name].start])
        found = mirror_symmetry(profiles)
        value = found.left_right - found.up_down
        beside = {
            "left-right": found.left_right,
            "up-down": found.up_down,
            "at the start": before.left_right - before.up_down,
            "chance": found.chance,
        }
        return Found(
            value, beside, value > found.chance, tuple(float(mirror_partners(one, 1)[0].mean()) for one in profiles)
        )

    return measure


def elongation(name: str) -> Measure:
    """How the condition number of a head's Gaussian goes with the layer."""

    def measure(runs: Runs) -> Found:
        numbers, before = runs[name].conditions(), runs[name].conditions(start=True)
        trend = layer_trend(numbers)
        middle, start = (statistics.median(value for layer in some for value in layer) for some in (numbers, before))
        beside = {"chance": trend.chance, "median condition number": middle, "at the start": start}
        meets = trend.rises and middle > start
        return Found(trend.rho, beside, meets, tuple(statistics.median(layer) for layer in numbers))

    return measure


def gain(name: str, over: str) -> Measure:
    """Difference of the test accuracies of two models, of the epochs chosen on held-out images."""

    def measure(runs: Runs) -> Found:
        found = {which: accuracies([runs[which].run]) for which in (name, over)}
        if not all(found.values()):
            raise ValueError(bad("run", "must have test accuracies", "no test images"))
        return Found(found[name][0] - found[over][0], {which: one[0] for which, one in found.items()})

    return measure


def dip(name: str, source: str) -> Measure:
    """Test accuracy right after pruning, minus that before; by layer the heads that went."""

    def measure(runs: Runs) -> Found:
        before, after = runs[source].score("last"), runs[name].score("start")
        pairs = zip(runs[source].heads, runs[name].heads, strict=True)
        gone = tuple(float(one - other) for one, other in pairs)
        return Found(after - before, {"before": before, "pruned": after}, after < before, gone)

    return measure


def recovery(name: str, source: str) -> Measure:
    """Test accuracy of the pruned model after training on, minus that of the unpruned one."""

    def measure(runs: Runs) -> Found:
        before, later = runs[source].score("last"), runs[name].score("last")
        value = later - before
        return Found(value, {"before": before, "trained on": later}, value >= -RECOVERED)

    return measure


def _fixed(layers: Sequence[LayerStatistics]) -> list[list[bool]]:
    """Whether each head holds a fixed shift, layer by layer."""
    found: list[list[bool]] = [[] for _ in layers]
    for head in fixed_heads(layers):
        found[head.layer - 1].append(head.fixed)
    return found


def _by_heads(layers: Sequence[Sequence[bool]]) -> float:
    """The share over all heads: layers need not have as many."""
    return statistics.fmean(value for layer in layers for value in layer)
