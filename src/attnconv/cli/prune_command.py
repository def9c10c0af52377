"""`attnconv prune MODEL`: remove degenerate heads from a trained model."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attnconv._util.errors import bad
from attnconv.cli.output import print_table, print_text
from attnconv.cli.parsing import Positional
from attnconv.training.run_folder import RunFolder, writing

if TYPE_CHECKING:
    from torch import nn

    from attnconv.models.model_loader import LoadedModel


@dataclass(frozen=True)
class Arguments:
    """Remove degenerate heads, whose attention forms a thin line or is uniform (Appendix E of the paper).

    The command prints the degenerate heads, the parameter and FLOP counts before and after pruning, and the layers that
    cannot express every 3 x 3 kernel after pruning.

    Examples:
        attnconv prune runs/quadratic-generalized
        attnconv prune runs/quadratic-generalized --criterion code --out runs/pruned
        attnconv evaluate runs/pruned
        attnconv train quadratic-generalized --start-from runs/pruned --out runs/after

    Attributes:
        model: Run folder, weights file (.safetensors) or hub:OWNER/NAME of a model with quadratic or generalised
            quadratic heads.
        criterion: A head is degenerate if the condition number of the covariance of its attention exceeds 1e3 (code,
            the authors' implementation) or 1e5 (paper). With either criterion, a head is also degenerate if the largest
            eigenvalue of the inverse covariance is below 1e-5 / position^2.
        out: Folder for the pruned weights and settings. It must be new or empty. By default, nothing is written.
    """

    model: Positional[str]
    criterion: Literal["paper", "code"] = "paper"
    out: Path | None = None


def run(arguments: Arguments) -> None:
    """Remove degenerate heads, print what this saves, and write the model."""
    with nullcontext() if arguments.out is None else writing(RunFolder(arguments.out)):
        if arguments.out is not None and not RunFolder(arguments.out).is_empty():
            raise ValueError(bad("--out", "must be a new or empty folder", str(arguments.out)))
        _prune(arguments)


def _prune(arguments: Arguments) -> None:
    """Prune the model while the output folder is locked for writing."""
    from attnconv.models.model_loader import load
    from attnconv.models.operation_counts import flops_all, flops_paper, parameters
    from attnconv.models.settings import AttentionSettings
    from attnconv.surgery.head_pruning import attention_layers, degenerate_heads, prune_heads, settings_after_pruning

    loaded = load(arguments.model)
    before = loaded.settings
    if not isinstance(before, AttentionSettings):
        raise ValueError(bad("MODEL", "must be an attention model without stages", loaded.source))
    layers = attention_layers(loaded.model)
    removed = {name: degenerate_heads(layer, arguments.criterion) for name, layer in layers.items()}
    if empty := [name for name, layer in layers.items() if len(removed[name]) == layer.heads]:
        got = f"{arguments.criterion}, for which all heads of {', '.join(empty)} are degenerate"
        fix = "Use attnconv.surgery.prune_heads in Python to select the heads of each layer."
        raise ValueError(bad("--criterion", "must leave at least one head in every layer", got, fix))
    pruned = prune_heads(loaded.model, removed)
    after = settings_after_pruning(before, pruned)
    print(f"{loaded.source}, criterion {arguments.criterion}")
    _print_layers(loaded.model, pruned, removed, side=before.image_size // before.downsampling)
    counts = {"parameters": parameters, "FLOPs, linear layers": flops_paper, "FLOPs, with dense attention": flops_all}
    for name, count in counts.items():
        print(f"{name}: {count(before):,} -> {count(after):,}")
    if arguments.out is not None:
        _write(arguments, replace(loaded, model=pruned, settings=after), removed)


def _print_layers(
    model: "nn.Module", pruned: "nn.Module", removed: Mapping[str, tuple[int, ...]], *, side: int
) -> None:
    from attnconv.inspect.auditing import KERNEL, kernel_span
    from attnconv.surgery.head_pruning import attention_layers

    kernel = f"{KERNEL} x {KERNEL}"
    columns = ("layer", "removed heads", "kept", f"{kernel} before", f"{kernel} after")
    rows: list[tuple[str, ...]] = []
    lost: list[str] = []
    unknown: list[str] = []
    rest = attention_layers(pruned)
    for name, layer in attention_layers(model).items():
        # Layers without removed heads need no second measurement.
        full = kernel_span(layer, (side, side))
        left = kernel_span(rest[name], (side, side)) if removed[name] else full
        if full.expresses and left.missed is not None and not left.expresses:
            lost.append(name)
        unknown += [f"{kernel} is unknown for {name}: {span.reason}." for span in (full, left) if span.reason][:1]
        heads = ", ".join(map(str, removed[name])) or "-"
        parts = ("unknown" if span.missed is None else f"{span.missed:.1e}" for span in (full, left))
        rows.append((name, heads, f"{rest[name].heads} of {layer.heads}", *parts))
    print_table("", columns, rows, left=2)
    print_text(
        f"{kernel}: relative norm of the part of {kernel} kernels that no weights of the layer can express, away from "
        f"the border of a grid of {full.sizes[0]} x {full.sizes[1]} positions."
    )
    for sentence in unknown:
        print_text(sentence)
    every = f"express every {kernel} kernel"
    print_text(f"Can no longer {every}: {', '.join(lost)}." if lost else f"No layer lost the ability to {every}.")


def _write(arguments: Arguments, pruned: "LoadedModel", removed: Mapping[str, tuple[int, ...]]) -> None:
    """Write a run that starts from the pruned weights, with the settings of the original run if there is one."""
    import torch

    from attnconv.models.checkpoint import save_weights
    from attnconv.training.environment import environment

    assert arguments.out is not None
    assert pruned.settings is not None
    folder = RunFolder(arguments.out)
    model, classes, mean, std = pruned.model, pruned.classes, pruned.mean, pruned.std
    extra = {"pruned": {name: list(heads) for name, heads in removed.items()}, "criterion": arguments.criterion}
    save_weights(folder.start_weights, model, pruned.settings, classes=classes, mean=mean, std=std, extra=extra)
    origin = RunFolder.holding(Path(arguments.model))
    preset = "PRESET"
    if origin is not None:
        settings = replace(origin.settings(), model=pruned.settings)
        preset = settings.preset
        folder.begin(settings, environment(["attnconv", *sys.argv[1:]], torch.device("cpu")))
    print(f"Pruned: {folder.path}. To train it: attnconv train {preset} --start-from {folder.path} --out FOLDER")
