"""Accuracy of the paper's `quadratic` and ResNet-18 with better training recipes, tuned with the same effort.

The first step is a search. Every candidate of `experiments.recipe_candidates` is trained with one seed for a few
epochs, with the same number of candidates for each network. Changes that improved accuracy are then combined into one
more candidate. The best candidate is chosen on held-out images; test images are not used. In the second step, the
paper's recipe and the chosen one are trained for all epochs with several seeds. The test accuracy is reported for the
last epoch and for the epoch chosen on held-out images.

    python -m experiments.recipes --root PATH/TO/CIFAR --out results/recipes
    python -m experiments.recipes --scale paper --plan

The first command is for a CPU (scale `mini`: half the channels, 10 epochs). The second prints what would be trained on
one GPU for the full models: other candidates for 300 epochs, with stronger augmentation. A search with fewer epochs
than the final runs favours fast learning and weak augmentation.

Each training run has a run folder. Killed runs resume after their last completed epoch, and finished runs are kept. Two
processes can train different networks at the same time (`--networks quadratic`, `--networks resnet18`); a third call
then writes the table of both. The paper's other models also have candidates: `--networks quadratic-generalized
learned`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from attnconv.models.operation_counts import parameters
from attnconv.paper.training_plan import FIRST_SEED, ScaleName, folder_name
from attnconv.training.fitting import fit
from attnconv.training.run_checks import differences
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings
from experiments.common import device_of, percentage, spread, write_results
from experiments.keep_reproduction import KEPT_WEIGHTS, copy
from experiments.recipe_candidates import (
    FIRST,
    Candidate,
    NetworkName,
    candidates,
    combined,
    in_words,
    over_epochs,
    settings_of,
)

SEARCH_EPOCHS: Mapping[ScaleName, int] = {"tiny": 1, "mini": 3, "small": 5, "paper": 60}
SEARCH_SEED = FIRST_SEED - 1  # not a seed of the final runs
TINY_IMAGES = 300  # scale tiny only tests the steps


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    scale: ScaleName = "mini"
    """Scale (model sizes and epochs), as in `attnconv reproduce`."""
    root: Path = Path("data")
    """Folder of CIFAR-10; not needed at scale tiny, which uses digits."""
    out: Path | None = None
    """Output folder for the table and, for each network, one run with the chosen recipe; None only prints the table."""
    kept: Path = Path("runs/recipes")
    """Folder of all runs."""
    paper_runs: Path | None = None
    """Folder of runs from `attnconv reproduce`; finished ones with the same settings are reused for the paper's
    recipe."""
    networks: tuple[NetworkName, ...] = FIRST
    """Networks to train."""
    search_epochs: int | None = None
    """Epochs of each candidate; None for 1, 3, 5 or 60 at scale tiny, mini, small or paper, and at most --epochs."""
    epochs: int | None = None
    """Epochs of the final runs; None for those of the scale."""
    seeds: int = 3
    """Number of final runs per recipe."""
    precision: Literal["32", "bf16"] | None = None
    """Precision of all runs; None for bf16 at scale paper, otherwise that of the scale."""
    compile: bool = False
    """Compile the models."""
    plan: bool = False
    """Only print what would be trained."""


@dataclass(frozen=True)
class Trial:
    """Result of one candidate in the search; accuracy is between 0 and 1."""

    network: str
    candidate: str
    base: str
    changes: dict[str, dict[str, Any]]
    why: str
    parameters: int
    held_out: float
    """Accuracy after the last epoch."""
    seconds: float


@dataclass(frozen=True)
class Final:
    """Result of one run over all epochs; accuracies are between 0 and 1."""

    network: str
    candidate: str
    seed: int
    parameters: int
    test: float
    """Test accuracy after the last epoch."""
    held_out: float
    test_chosen: float
    """Test accuracy of the epoch with the highest accuracy on held-out images."""
    chosen_epoch: int
    seconds: float


def main(settings: Settings) -> tuple[list[Trial], list[Final]]:
    """Search for a recipe and train the final runs; print and write the tables."""
    if settings.plan:
        print(plan(settings))
        return [], []
    trials: list[Trial] = []
    finals: list[Final] = []
    for network in settings.networks:
        tried = search(network, settings)
        trials += [trial for _, trial in tried]
        chosen = max(tried, key=lambda pair: pair[1].held_out)[0]  # the first in case of ties
        finals += final_runs(network, chosen, settings)
        if settings.out is not None:
            keep_weights(network, chosen, settings, settings.out / network)
    text = tables(trials, finals, settings)
    print(text)
    if settings.out is not None:
        found = {
            "search_epochs": search_epochs(settings),
            "search_seed": SEARCH_SEED,
            "trials": [asdict(trial) for trial in trials],
            "finals": [asdict(final) for final in finals],
        }
        write_results(settings.out, "recipes", settings, text, found, device=device_of("auto"))
    return trials, finals


Tried = Sequence[tuple[Candidate, Trial]]


def search(network: NetworkName, settings: Settings) -> Tried:
    """Try every candidate of a network, and the combination of those that improved accuracy."""
    known = candidates(settings.scale, network)
    tried = [(candidate, try_out(network, candidate, settings)) for candidate in known.all]
    last = combined(known, {trial.candidate: trial.held_out for _, trial in tried})
    return tried if last is None else [*tried, (last, try_out(network, last, settings))]


def try_out(network: NetworkName, candidate: Candidate, settings: Settings) -> Trial:
    """Train one candidate for the epochs of the search. Its test accuracy is not used."""
    run = run_of(network, candidate, settings, epochs=search_epochs(settings), seed=SEARCH_SEED)
    result = trained(run, folder_of(network, candidate, run, settings))
    changes = {group: dict(to) for group, to in candidate.changes.items()}
    return Trial(
        network=network,
        candidate=candidate.name,
        base=candidate.base,
        changes=changes,
        why=candidate.why,
        parameters=result["parameters"],
        held_out=result["last"]["validation"]["accuracy"],
        seconds=result["seconds"],
    )


def final_runs(network: NetworkName, chosen: Candidate, settings: Settings) -> list[Final]:
    """Train the paper's recipe and the chosen one with all seeds."""
    paper = candidates(settings.scale, network).paper
    recipes = [paper] if chosen == paper else [paper, chosen]
    finals = []
    for candidate in recipes:
        for seed in range(FIRST_SEED, FIRST_SEED + settings.seeds):
            run = run_of(network, candidate, settings, epochs=settings.epochs, seed=seed)
            folder = folder_of(network, candidate, run, settings)
            elsewhere = None if settings.paper_runs is None else settings.paper_runs / folder_name(network, seed)
            result = finished_alike(elsewhere, run) or trained(run, folder)
            finals.append(final_of(network, candidate, seed, result))
    return finals


def keep_weights(network: NetworkName, chosen: Candidate, settings: Settings, target: Path) -> None:
    """Copy records and half-precision weights of the first run with the chosen recipe, if it was trained here."""
    run = run_of(network, chosen, settings, epochs=settings.epochs, seed=FIRST_SEED)
    folder = RunFolder(folder_of(network, chosen, run, settings))
    if folder.last_weights.is_file():
        copy(folder, RunFolder(target), folder.last_weights, target / KEPT_WEIGHTS, torch.float16)


def final_of(network: NetworkName, candidate: Candidate, seed: int, result: Mapping[str, Any]) -> Final:
    """Convert the `result.json` of a final run to a `Final`."""
    last, best = result["last"], result["best"]
    return Final(
        network=network,
        candidate=candidate.name,
        seed=seed,
        parameters=result["parameters"],
        test=last["test"]["accuracy"],
        held_out=last["validation"]["accuracy"],
        test_chosen=best["test"]["accuracy"],
        chosen_epoch=best["epoch"],
        seconds=result["seconds"],
    )


def run_of(
    network: NetworkName, candidate: Candidate, settings: Settings, *, epochs: int | None, seed: int
) -> RunSettings:
    """Return the settings of one run; `epochs=None` uses the epochs of the scale."""
    run = settings_of(settings.scale, network, candidate)
    if epochs is not None:
        run = over_epochs(run, epochs)
    precision = settings.precision or ("bf16" if settings.scale == "paper" else run.train.precision)
    return replace(
        run,
        data=replace(
            run.data,
            root=str(settings.root),
            download=False,
            limit=TINY_IMAGES if settings.scale == "tiny" else run.data.limit,
        ),
        train=replace(run.train, seed=seed, precision=precision, compile=settings.compile),
    )


def folder_of(network: NetworkName, candidate: Candidate, run: RunSettings, settings: Settings) -> Path:
    """Return the folder of a run; its path contains all settings that this script can change."""
    of = f"{settings.scale}-{run.train.precision}" + ("-compiled" if run.train.compile else "")
    return settings.kept / of / f"{run.train.epochs}-epochs" / f"{network}-{candidate.name}-seed-{run.train.seed}"


def trained(run: RunSettings, folder: Path) -> Mapping[str, Any]:
    """Return the result of a run, which is started or resumed unless it is finished."""
    result = finished_alike(folder, run)
    if result is None:  # `fit` raises an error if the folder has a run with other settings
        fit(run, folder, resume=True, command=["python", "-m", "experiments.recipes"])
        result = RunFolder(folder).result()
    assert result is not None
    return result


def finished_alike(folder: Path | None, run: RunSettings) -> Mapping[str, Any] | None:
    """Return the result if the folder has a finished run whose settings lead to the same weights, otherwise None."""
    result = None if folder is None else RunFolder(folder).result()
    if folder is None or result is None:
        return None
    other = RunFolder(folder).settings()
    train = replace(other.train, test_curve=run.train.test_curve, compile=run.train.compile)
    return None if differences(replace(other, train=train), run) else result


def search_epochs(settings: Settings) -> int:
    """Return the number of epochs of each candidate."""
    if settings.search_epochs is not None:
        return settings.search_epochs
    usual = SEARCH_EPOCHS[settings.scale]
    return usual if settings.epochs is None else min(usual, settings.epochs)


def plan(settings: Settings) -> str:
    """Return a description of what would be trained, in Markdown."""
    lines = ["| network | candidate | recipe | changes | rationale | parameters |", "|---|---|---|---|---|---|"]
    for network in settings.networks:
        for c in candidates(settings.scale, network).all:
            count = parameters(settings_of(settings.scale, network, c).model)
            lines.append(f"| {network} | {c.name} | {c.base} | {in_words(c.changes)} | {c.why} | {count:,} |")
    each = sum(len(candidates(settings.scale, network).all) for network in settings.networks)
    networks = len(settings.networks)
    paper = candidates(settings.scale, "quadratic").paper
    run = run_of("quadratic", paper, settings, epochs=settings.epochs, seed=FIRST_SEED)
    lines += [
        "",
        f"{each} to {each + networks} runs of {search_epochs(settings)} epochs with seed {SEARCH_SEED}, then "
        f"{networks * settings.seeds} to {2 * networks * settings.seeds} runs of {run.train.epochs} epochs, with "
        f"precision {run.train.precision}.",
    ]
    return "\n".join(lines)


def tables(trials: Sequence[Trial], finals: Sequence[Final], settings: Settings) -> str:
    """Return the Markdown tables of the final runs and of the search."""
    epochs = search_epochs(settings)
    lines = [
        "| network | recipe | parameters | test accuracy, last epoch | best held-out epoch | held out | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, recipe in dict.fromkeys((final.network, final.candidate) for final in finals):
        runs = [final for final in finals if (final.network, final.candidate) == (network, recipe)]
        shown = [
            spread([getattr(run, name) for run in runs], percent=True) for name in ("test", "test_chosen", "held_out")
        ]
        minutes = spread([run.seconds / 60 for run in runs])
        lines.append(f"| {network} | {recipe} | {runs[0].parameters:,} | {' | '.join(shown)} | {minutes} |")
    searched = [
        f"| network | candidate | recipe | changes | rationale | parameters | held out, epoch {epochs} |",
        "|---|---|---|---|---|---|---|",
    ]
    for t in trials:
        first = max((other for other in trials if other.network == t.network), key=lambda other: other.held_out)
        mark = "**" if t is first else ""
        searched.append(
            f"| {t.network} | {t.candidate} | {t.base} | {in_words(t.changes)} | {t.why} | {t.parameters:,} | "
            f"{mark}{percentage(t.held_out)}{mark} |"
        )
    return "\n".join([*lines, "", *searched])


if __name__ == "__main__":
    main(tyro.cli(Settings))
