"""Models of the reproduction, their runs at each scale, and their training settings; torch is imported only to prune.

    paper   the paper's models and hyperparameters: 300 epochs of CIFAR-10, for one GPU
    small   the presets whose names end in -small: 30 epochs of CIFAR-10, for two CPU cores
    mini    like small, with half the channels and 10 epochs: several seeds of all models in a night on two CPU cores
    tiny    small models of digits, trained for a few epochs: tests every step in minutes; accuracies are meaningless

The pruned model continues the training of the generalised model, as in the paper (100 epochs after 300).
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
DROPPED = "quadratic-attention-dropout"  # with the attention dropout of the paper's code; in no table or figure


@final
@dataclass(frozen=True)
class PaperModel:
    """One model of the paper, with the numbers printed in it; a dash or None stands for a missing number."""

    title: str  # of its row in Tables 1 and 4
    accuracy: float | None = None  # on the test images of CIFAR-10, 0 to 1
    parameters: str = "-"
    flops: str = "-"
    table_1: bool = False  # whether it is in Table 1


PAPER_MODELS: Mapping[str, PaperModel] = {
    "resnet18": PaperModel("ResNet18", 0.938, "11.2M", "1.1B", table_1=True),
    "quadratic": PaperModel("SA quadratic emb.", 0.938, "12.1M", "6.2B", table_1=True),
    SOURCE: PaperModel("SA quadratic emb. gen.", 0.934, "12.1M", "6.2B"),
    PRUNED: PaperModel("SA quadratic emb. gen. pruned", 0.934, "9.7M", "4.9B"),
    "learned": PaperModel("SA learned emb.", 0.918, "12.3M", "6.2B", table_1=True),
    CONTENT: PaperModel("SA learned emb. + content", 0.871, "29.5M", "15B", table_1=True),
    "quadratic-16-heads": PaperModel("SA quadratic emb., 16 heads"),
}
"""Models by name, in the order of Table 4 and of training."""

RUNS: tuple[str, ...] = tuple(PAPER_MODELS)
ALL_RUNS: tuple[str, ...] = (*RUNS, DROPPED)  # the last one is trained only if requested by name

ATTENTION_DROPOUT = 0.1  # in the authors' code; the presets have none
FIRST_SEED = 42

# The mini scale. Its ResNet has about the same number of operations as its `quadratic` model, which a test verifies.
MINI_EPOCHS, MINI_WIDTH, MINI_MLP_WIDTH = 10, 64, 128
MINI_RESNET = ResNetSettings(widths=(22, 44, 88), blocks=(1, 1, 1))

# A name from `folder_name`, optionally followed by a number of epochs such as `-20-epochs`.
_FOLDER = re.compile(r"(?P<name>.+?)(-seed-(?P<seed>\d+))?(-\d+-epochs)?")


@final
@dataclass(frozen=True)
class PlannedRun:
    """One planned run; the settings of the pruned model still include all heads."""

    name: str
    settings: RunSettings
    folder: RunFolder

    @property
    def state(self) -> str:
        """State of the run: `finished`, `after epoch 3` or `new`."""
        if self.folder.result() is not None:
            return "finished"
        done = max((line["epoch"] for line in self.folder.metrics()), default=0)
        return f"after epoch {done}" if done else "new"


def plan_runs(
    scale: ScaleName, out: str | Path, *, names: Sequence[str] = (), seeds: int = 1, data_root: str = "data"
) -> list[PlannedRun]:
    """List the runs of a reproduction in the folder `out`, ordered by seed; the first seed is 42.

    `names` are from `ALL_RUNS`; if empty, all of `RUNS` are planned. The pruned model also adds the generalised model.
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
    """Return the name of a run's folder, such as `learned` or `learned-seed-43`."""
    return name if seed == FIRST_SEED else f"{name}-seed-{seed}"


def runs_in(out: str | Path) -> dict[str, list[RunFolder]]:
    """Find the runs of each model in a reproduction, ordered by seed; per seed, only the one with the most epochs."""
    longest: dict[tuple[str, int], tuple[int, RunFolder]] = {}
    for path in sorted((Path(out) / "runs").glob("*/")):
        matched, run = _FOLDER.fullmatch(path.name), RunFolder(path)
        if matched is not None and matched["name"] in ALL_RUNS and run.exists():
            key, epochs = (matched["name"], int(matched["seed"] or FIRST_SEED)), run.settings().train.epochs
            if key not in longest or epochs > longest[key][0]:
                longest[key] = epochs, run
    return {name: [longest[key][1] for key in sorted(longest) if key[0] == name] for name in ALL_RUNS}


def settings_at(scale: ScaleName, name: str) -> RunSettings:
    """Return the training settings of a model, one of `ALL_RUNS`, at a scale."""
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
        settings, epochs = recipe("resnet-digits" if name == "resnet18" else "quadratic-digits"), 5
        model, full = settings.model, preset_settings(name)
        if isinstance(model, AttentionSettings) and isinstance(full, AttentionSettings):
            model = replace(model, encoding=full.encoding, heads=full.heads)
    return replace(settings, preset=label, model=model, train=replace(settings.train, epochs=epochs))


def continued(settings: RunSettings, label: str) -> RunSettings:
    """Return the settings of a pruned model: a third of the epochs, a tenth of the learning rate, no warm-up."""
    optim = replace(settings.optim, learning_rate=settings.optim.learning_rate / 10)
    train = replace(settings.train, epochs=max(1, settings.train.epochs // 3))
    schedule = ScheduleSettings(name="cosine", warmup=0.0)
    return replace(settings, preset=label, optim=optim, schedule=schedule, train=train)


@final
class NothingToPruneError(ValueError):
    """Error for a reproduction without a pruned model to train."""


def pruned_start(planned: PlannedRun, source: RunFolder) -> tuple[RunSettings, Path, str]:
    """Remove the degenerate heads of a trained model: those above the paper's threshold or, if none, that of its code.

    Return the settings with the remaining heads, the file of pruned weights, and a message. Raise
    `NothingToPruneError` if the source is incomplete, no head is degenerate, or all heads of a layer are degenerate.
    """
    from attnconv.models.checkpoint import save_weights
    from attnconv.models.model_loader import load
    from attnconv.surgery import head_pruning

    name = planned.folder.path.name
    if source.result() is None:
        raise NothingToPruneError(f"{name}: not trained, because {source.path.name} is not complete.")
    loaded = load(source.last_weights)
    layers = head_pruning.attention_layers(loaded.model)
    criteria: tuple[head_pruning.Criterion, ...] = ("paper", "code")
    for criterion in criteria:
        removed = {layer: head_pruning.degenerate_heads(attention, criterion) for layer, attention in layers.items()}
        if any(removed.values()):
            break
    else:
        raise NothingToPruneError(f"{name}: not trained, because no head of {source.path.name} is degenerate.")
    if empty := [layer for layer, attention in layers.items() if len(removed[layer]) == attention.heads]:
        raise NothingToPruneError(f"{name}: not trained, because all heads of {', '.join(empty)} are degenerate.")
    model = head_pruning.prune_heads(loaded.model, removed)
    assert isinstance(loaded.settings, AttentionSettings)
    settings = replace(planned.settings, model=head_pruning.settings_after_pruning(loaded.settings, model))
    weights = planned.folder.path.with_name(f"{name}-start.safetensors")
    extra = {"pruned": {layer: list(heads) for layer, heads in removed.items()}, "criterion": criterion}
    classes, mean, std = loaded.classes, loaded.mean, loaded.std
    save_weights(weights, model, settings.model, classes=classes, mean=mean, std=std, extra=extra)
    counts = [len(heads) for heads in removed.values()]
    return settings, weights, f"{name}: number of heads pruned per layer {counts}, by the threshold of the {criterion}."
