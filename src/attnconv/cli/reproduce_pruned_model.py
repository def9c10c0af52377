"""The pruned model of a reproduction: which heads of the generalised model are removed, and the weights to train on."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from attnconv.paper.training_plan import PlannedRun
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

if TYPE_CHECKING:
    from attnconv.surgery.head_pruning import Criterion


@final
class NothingToPruneError(ValueError):
    """There is no pruned model to train."""


def pruned_start(planned: PlannedRun, source: RunFolder) -> tuple[RunSettings, Path, str]:
    """Prune a trained model of its degenerate heads and write what is left.

    Heads are chosen by the paper's threshold and, where no head meets it, by that of the authors' code: short runs
    seldom stretch a head so far.

    Args:
        planned: Run of the pruned model.
        source: Run of the model before.

    Returns:
        Settings of the run with the heads that are left, the file of the pruned weights (beside the run's folder), and
        a sentence with the number of removed heads and the threshold.

    Raises:
        NothingToPruneError: The source is not complete, no head is degenerate, or every head of a layer is.
    """
    from attnconv.models.checkpoint import save_weights
    from attnconv.models.model_loader import load
    from attnconv.models.settings import AttentionSettings
    from attnconv.surgery.head_pruning import attention_layers, degenerate_heads, prune_heads, settings_after_pruning

    name = planned.folder.path.name
    if source.result() is None:
        raise NothingToPruneError(f"{name}: not trained, since {source.path.name} is not complete.")
    loaded = load(source.last_weights)
    layers = attention_layers(loaded.model)
    criterion: Criterion = "paper"
    removed = {layer: degenerate_heads(attention, criterion) for layer, attention in layers.items()}
    if not any(removed.values()):
        criterion = "code"
        removed = {layer: degenerate_heads(attention, criterion) for layer, attention in layers.items()}
    if not any(removed.values()):
        none = f"no head of {source.path.name} is degenerate, so nothing is pruned"
        raise NothingToPruneError(f"{name}: not trained, since {none}.")
    if empty := [layer for layer, attention in layers.items() if len(removed[layer]) == attention.heads]:
        raise NothingToPruneError(f"{name}: not trained, since every head of {', '.join(empty)} is degenerate.")
    model = prune_heads(loaded.model, removed)
    assert isinstance(loaded.settings, AttentionSettings)
    settings = replace(planned.settings, model=settings_after_pruning(loaded.settings, model))
    weights = planned.folder.path.with_name(f"{name}-start.safetensors")
    extra = {"pruned": {layer: list(heads) for layer, heads in removed.items()}, "criterion": criterion}
    classes, mean, std = loaded.classes, loaded.mean, loaded.std
    save_weights(weights, model, settings.model, classes=classes, mean=mean, std=std, extra=extra)
    counts = [len(heads) for heads in removed.values()]
    return settings, weights, f"{name}: heads pruned per layer {counts}, threshold of the {criterion}."
