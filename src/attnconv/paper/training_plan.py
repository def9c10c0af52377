"""Which runs make up the paper at a chosen scale, and how each is trained; free of torch.

    paper   the paper's models and hyper-parameters: 300 epochs of CIFAR-10, for one GPU
    small   the presets whose names end in -small: 30 epochs of CIFAR-10 on two CPU cores
    mini    the same with half the channels, 10 epochs: several seeds of all models in a night on two CPU cores; the
            residual network costs as many operations as `quadratic` (46.8 million an image; 48.6 with every product)
    tiny    the digits models for a few epochs: every step is taken, in minutes; its numbers say nothing about the paper

The pruned model continues the generalised one for a third of its epochs at a tenth of its learning rate, as the paper's
100 epochs follow on 300. Its settings are complete once it is known which heads are pruned.

The paper's code drops attention probabilities with rate 0.1, the presets do not. `quadratic-attention-dropout` does; it
is trained where it is asked for by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from attnconv._util.errors import bad
from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings, ScheduleSettings

ScaleName = Literal["tiny", "mini", "small", "paper"]

SOURCE, PRUNED = "quadratic-generalized", "quadratic-generalized-pruned"
RUNS: tuple[str, ...] = (
    "resnet18",
    "quadratic",
    SOURCE,
    PRUNED,
    "learned",
    "learned-content",
    "quadratic-16-heads",
)
"""Names of the paper's models, in the order in which they are trained."""

DROPPED = "quadratic-attention-dropout"
EXTRA_RUNS: tuple[str, ...] = (DROPPED,)
"""Runs beside the paper's table, trained where they are asked for by name only."""

ATTENTION_DROPOUT = 0.1  # of the authors' code
FIRST_SEED = 42
TINY_EPOCHS = 5

# The mini scale: half the channels of the small presets, and a residual network of as many operations as `quadratic`
# then has (a test counts both).
MINI_EPOCHS, MINI_WIDTH, MINI_MLP_WIDTH = 10, 64, 128
MINI_RESNET = ResNetSettings(widths=(22, 44, 88), blocks=(1, 1, 1))

_FOLDER = re.compile(r"(?P<name>.+?)(-seed-(?P<seed>\d+))?(-\d+-epochs)?")


@final
@dataclass(frozen=True)
class PlannedRun:
    """One run of a reproduction.

    Attributes:
        name: The paper's model, one of `RUNS`, or one of `EXTRA_RUNS`.
        settings: Of the run; of the pruned model without the pruning.
        folder: Where it goes.
    """

    name: str
    settings: RunSettings
    folder: RunFolder

    @property
    def epochs_done(self) -> int:
        """How many epochs are complete."""
        return max((line["epoch"] for line in self.folder.metrics()), default=0)

    @property
    def state(self) -> str:
        """How far it has come, in words: `finished`, `after epoch 3`, `new`."""
        if self.folder.result() is not None:
            return "finished"
        return f"after epoch {self.epochs_done}" if self.epochs_done else "new"


def plan_runs(
    scale: ScaleName,
    out: str | Path,
    *,
    names: Sequence[str] = (),
    seeds: int = 1,
    data_root: str = "data",
) -> list[PlannedRun]:
    """The runs of a reproduction, seed by seed.

    Args:
        scale: See above.
        out: Folder of the reproduction; runs go into `runs` in it.
        names: Of `RUNS` and `EXTRA_RUNS`; none for all of `RUNS`. The pruned model brings the generalised one with it.
        seeds: Runs of each model, at least 1; their seeds are 42, 43, ...
        data_root: Folder that holds CIFAR-10.

    Raises:
        ValueError: An unknown name, or fewer than one seed.

    Example:
        >>> [run.settings.preset for run in plan_runs("small", "out", names=["quadratic-generalized-pruned"])]
        ['quadratic-generalized-small', 'quadratic-generalized-pruned-small']
    """
    known = (*RUNS, *EXTRA_RUNS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(bad("--only", f"must be of {', '.join(known)}", ", ".join(unknown)))
    if seeds < 1:
        raise ValueError(bad("--seeds", "must be at least 1", seeds))
    asked = names or RUNS
    wanted = [name for name in known if name in asked or (name == SOURCE and PRUNED in asked)]
    runs = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name in wanted:
            settings = settings_at(scale, name)
            settings = replace(
                settings,
                data=replace(settings.data, root=data_root),
                train=replace(settings.train, seed=seed, test_curve=True),
            )
            folder = RunFolder(Path(out) / "runs" / folder_name(name, seed))
            runs.append(PlannedRun(name, settings, folder))
    return runs


def folder_name(name: str, seed: int) -> str:
    """What a run's folder is called.

    Example:
        >>> folder_name("learned", 42), folder_name("learned", 43)
        ('learned', 'learned-seed-43')
    """
    return name if seed == FIRST_SEED else f"{name}-seed-{seed}"


def runs_in(out: str | Path) -> dict[str, list[RunFolder]]:
    """Model -> its runs in a reproduction, first seed first: one for each seed, that of the most epochs.

    Args:
        out: Folder of the reproduction. A run's folder is called as `folder_name` does, and may end in `-20-epochs`.
    """
    found: dict[str, list[RunFolder]] = {name: [] for name in (*RUNS, *EXTRA_RUNS)}
    seeds: dict[tuple[str, int], tuple[int, RunFolder]] = {}
    for path in sorted((Path(out) / "runs").glob("*/")):
        matched = _FOLDER.fullmatch(path.name)
        if matched is None or matched["name"] not in found or not (run := RunFolder(path)).exists():
            continue
        key, epochs = (matched["name"], int(matched["seed"] or FIRST_SEED)), run.settings().train.epochs
        if key not in seeds or epochs > seeds[key][0]:
            seeds[key] = epochs, run
    for (name, _), (_, run) in sorted(seeds.items()):
        found[name].append(run)
    return found


def settings_at(scale: ScaleName, name: str) -> RunSettings:
    """How a model of the paper is trained at a scale.

    Args:
        scale: `tiny`, `mini`, `small` or `paper`.
        name: One of `RUNS` or `EXTRA_RUNS`.

    Example:
        >>> settings_at("paper", "quadratic-generalized-pruned").optim.learning_rate
        0.01
        >>> settings_at("mini", "quadratic").train.epochs
        10
    """
    ending = "" if scale == "paper" else f"-{scale}"
    if name == PRUNED:
        return continued(settings_at(scale, SOURCE), f"{PRUNED}{ending}")
    if name == DROPPED:
        settings = settings_at(scale, "quadratic")
        assert isinstance(settings.model, AttentionSettings)
        model = replace(settings.model, attention_dropout=ATTENTION_DROPOUT)
        return replace(settings, preset=f"{DROPPED}{ending}", model=model)
    if scale == "paper":
        return recipe(name)
    if scale == "tiny":
        return _tiny(name)
    settings = recipe("resnet-small" if name == "resnet18" else f"{name}-small")
    if scale == "small":
        return settings
    train = replace(settings.train, epochs=MINI_EPOCHS)
    return replace(settings, preset=f"{name}{ending}", model=_mini(settings.model), train=train)


def _tiny(name: str) -> RunSettings:
    settings = recipe("resnet-digits" if name == "resnet18" else "quadratic-digits")
    model, full = settings.model, preset_settings(name)
    if isinstance(model, AttentionSettings) and isinstance(full, AttentionSettings):
        model = replace(model, encoding=full.encoding, heads=full.heads)
    train = replace(settings.train, epochs=TINY_EPOCHS, tensorboard=False)
    return replace(settings, preset=f"{name}-tiny", model=model, train=train)


def _mini(model: ModelSettings) -> ModelSettings:
    if isinstance(model, AttentionSettings):
        return replace(model, width=MINI_WIDTH, mlp_width=MINI_MLP_WIDTH)
    return MINI_RESNET


def continued(settings: RunSettings, label: str) -> RunSettings:
    """How a pruned model trains on: a third of the epochs at a tenth of the rate, from the first step on.

    Args:
        settings: Of the training before.
        label: What the preset is called.

    Example:
        >>> continued(settings_at("tiny", "quadratic"), "on").preset
        'on'
    """
    return replace(
        settings,
        preset=label,
        optim=replace(settings.optim, learning_rate=settings.optim.learning_rate / 10),
        schedule=ScheduleSettings(name="cosine", warmup=0.0),
        train=replace(settings.train, epochs=max(1, settings.train.epochs // 3)),
    )
