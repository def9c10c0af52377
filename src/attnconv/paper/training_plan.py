"""The models of the study, its runs at a chosen scale, and how each is trained; torch is imported for pruning only.

    paper   the paper's models and hyper-parameters: 300 epochs of CIFAR-10, for one GPU
    small   the presets whose names end in -small: 30 epochs of CIFAR-10 on two CPU cores
    mini    the same with half the channels and 10 epochs: several seeds of all models in a night on two CPU cores
    tiny    models of the digits for a few epochs: every step in minutes; its numbers say nothing about the paper

The pruned model continues the generalised one, as in the paper (100 epochs after 300).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings, ScheduleSettings

ScaleName = Literal["tiny", "mini", "small", "paper"]

SOURCE, PRUNED = "quadratic-generalized", "quadratic-generalized-pruned"  # the second continues the first
CONTENT = "learned-content"
DROPPED = "quadratic-attention-dropout"  # drops attention probabilities as the paper's code does; in no table or figure


@final
@dataclass(frozen=True)
class PaperModel:
    """One model of the paper, with its numbers as printed; a dash or None where the paper gives none."""

    title: str  # of its row in Tables 1 and 4
    accuracy: float | None = None  # on the test images of CIFAR-10, 0 to 1
    parameters: str = "-"
    flops: str = "-"
    table_1: bool = False  # whether Table 1 has it


PAPER_MODELS: Mapping[str, PaperModel] = {
    "resnet18": PaperModel("ResNet18", 0.938, "11.2M", "1.1B", table_1=True),
    "quadratic": PaperModel("SA quadratic emb.", 0.938, "12.1M", "6.2B", table_1=True),
    SOURCE: PaperModel("SA quadratic emb. gen.", 0.934, "12.1M", "6.2B"),
    PRUNED: PaperModel("SA quadratic emb. gen. pruned", 0.934, "9.7M", "4.9B"),
    "learned": PaperModel("SA learned emb.", 0.918, "12.3M", "6.2B", table_1=True),
    CONTENT: PaperModel("SA learned emb. + content", 0.871, "29.5M", "15B", table_1=True),
    "quadratic-16-heads": PaperModel("SA quadratic emb., 16 heads"),
}
"""Name -> model, in the order of Table 4, which is also the order of training."""

RUNS: tuple[str, ...] = tuple(PAPER_MODELS)
ALL_RUNS: tuple[str, ...] = (*RUNS, DROPPED)  # the last is trained only if it is asked for by name

ATTENTION_DROPOUT = 0.1  # of the authors' code; the presets have none
FIRST_SEED = 42
TINY_EPOCHS = 5

# The mini scale. Its residual network has as many operations as its `quadratic` (a test counts both).
MINI_EPOCHS, MINI_WIDTH, MINI_MLP_WIDTH = 10, 64, 128
MINI_RESNET = ResNetSettings(widths=(22, 44, 88), blocks=(1, 1, 1))

# A name of `folder_name`, which may end in `-20-epochs`.
_FOLDER = re.compile(r"(?P<name>.+?)(-seed-(?P<seed>\d+))?(-\d+-epochs)?")


@final
@dataclass(frozen=True)
class PlannedRun:
    """One run of a reproduction; the settings of the pruned model still have all heads."""

    name: str
    settings: RunSettings
    folder: RunFolder

    @property
    def state(self) -> str:
        """`finished`, `after epoch 3` or `new`."""
        if self.folder.result() is not None:
            return "finished"
        done = max((line["epoch"] for line in self.folder.metrics()), default=0)
        return f"after epoch {done}" if done else "new"


def plan_runs(
    scale: ScaleName, out: str | Path, *, names: Sequence[str] = (), seeds: int = 1, data_root: str = "data"
) -> list[PlannedRun]:
    """List the runs of a reproduction in the folder `out`, seed by seed from 42.

    `names` are some of `ALL_RUNS`; none means `RUNS`. The pruned model brings the generalised one with it.
    """
    asked = names or RUNS
    wanted = [name for name in ALL_RUNS if name in asked or (name == SOURCE and PRUNED in asked)]
    runs = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name in wanted:
            settings = settings_at(scale, name)
            data = replace(settings.data, root=data_root)
            train = replace(settings.train, seed=seed, test_curve=True)
            folder = RunFolder(Path(out) / "runs" / folder_name(name, seed))
            runs.append(PlannedRun(name, replace(settings, data=data, train=train), folder))
    return runs


def folder_name(name: str, seed: int) -> str:
    """Name of a run's folder: `learned`, `learned-seed-43`."""
    return name if seed == FIRST_SEED else f"{name}-seed-{seed}"


def runs_in(out: str | Path) -> dict[str, list[RunFolder]]:
    """Find the runs of each model in a reproduction: for each seed that of the most epochs, in order of seeds."""
    longest: dict[tuple[str, int], tuple[int, RunFolder]] = {}
    for path in sorted((Path(out) / "runs").glob("*/")):
        matched, run = _FOLDER.fullmatch(path.name), RunFolder(path)
        if matched is not None and matched["name"] in ALL_RUNS and run.exists():
            key, epochs = (matched["name"], int(matched["seed"] or FIRST_SEED)), run.settings().train.epochs
            if key not in longest or epochs > longest[key][0]:
                longest[key] = epochs, run
    return {name: [longest[key][1] for key in sorted(longest) if key[0] == name] for name in ALL_RUNS}


def settings_at(scale: ScaleName, name: str) -> RunSettings:
    """Return how a model, one of `ALL_RUNS`, is trained at a scale."""
    label = name if scale == "paper" else f"{name}-{scale}"
    if name == PRUNED:
        return continued(settings_at(scale, SOURCE), label)
    if name == DROPPED:
        settings = settings_at(scale, "quadratic")
        assert isinstance(settings.model, AttentionSettings)
        return replace(settings, preset=label, model=replace(settings.model, attention_dropout=ATTENTION_DROPOUT))
    if scale == "paper":
        return recipe(name)
    preset = "resnet" if name == "resnet18" else name
    if scale == "small":
        return recipe(f"{preset}-small")
    model: ModelSettings
    if scale == "mini":
        settings, epochs, model = recipe(f"{preset}-small"), MINI_EPOCHS, MINI_RESNET
        if isinstance(settings.model, AttentionSettings):
            model = replace(settings.model, width=MINI_WIDTH, mlp_width=MINI_MLP_WIDTH)
    else:
        settings, epochs = recipe("resnet-digits" if name == "resnet18" else "quadratic-digits"), TINY_EPOCHS
        model, full = settings.model, preset_settings(name)
        if isinstance(model, AttentionSettings) and isinstance(full, AttentionSettings):
            model = replace(model, encoding=full.encoding, heads=full.heads)
    return replace(settings, preset=label, model=model, train=replace(settings.train, epochs=epochs))


def continued(settings: RunSettings, label: str) -> RunSettings:
    """Return how a pruned model trains on: a third of the epochs at a tenth of the rate, without warm-up."""
    optim = replace(settings.optim, learning_rate=settings.optim.learning_rate / 10)
    train = replace(settings.train, epochs=max(1, settings.train.epochs // 3))
    schedule = ScheduleSettings(name="cosine", warmup=0.0)
    return replace(settings, preset=label, optim=optim, schedule=schedule, train=train)


@final
class NothingToPruneError(ValueError):
    """There is no pruned model to train."""


def pruned_start(planned: PlannedRun, source: RunFolder) -> tuple[RunSettings, Path, str]:
    """Remove the degenerate heads of a trained model: by the paper's threshold, else by that of its code.

    Returns the settings with the remaining heads, the file of the pruned weights, and a sentence on both. Raises
    `NothingToPruneError` if the source is not complete, no head is degenerate, or every head of a layer is.
    """
    from attnconv.models.checkpoint import save_weights
    from attnconv.models.model_loader import load
    from attnconv.surgery import head_pruning

    name = planned.folder.path.name
    if source.result() is None:
        raise NothingToPruneError(f"{name}: not trained, since {source.path.name} is not complete.")
    loaded = load(source.last_weights)
    layers = head_pruning.attention_layers(loaded.model)
    criteria: tuple[head_pruning.Criterion, ...] = ("paper", "code")
    for criterion in criteria:
        removed = {layer: head_pruning.degenerate_heads(attention, criterion) for layer, attention in layers.items()}
        if any(removed.values()):
            break
    else:
        none = f"no head of {source.path.name} is degenerate, so nothing is pruned"
        raise NothingToPruneError(f"{name}: not trained, since {none}.")
    if empty := [layer for layer, attention in layers.items() if len(removed[layer]) == attention.heads]:
        raise NothingToPruneError(f"{name}: not trained, since every head of {', '.join(empty)} is degenerate.")
    model = head_pruning.prune_heads(loaded.model, removed)
    assert isinstance(loaded.settings, AttentionSettings)
    settings = replace(planned.settings, model=head_pruning.settings_after_pruning(loaded.settings, model))
    weights = planned.folder.path.with_name(f"{name}-start.safetensors")
    extra = {"pruned": {layer: list(heads) for layer, heads in removed.items()}, "criterion": criterion}
    classes, mean, std = loaded.classes, loaded.mean, loaded.std
    save_weights(weights, model, settings.model, classes=classes, mean=mean, std=std, extra=extra)
    counts = [len(heads) for heads in removed.values()]
    return settings, weights, f"{name}: heads pruned per layer {counts}, threshold of the {criterion}."
