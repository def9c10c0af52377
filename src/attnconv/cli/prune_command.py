"""`attnconv prune MODEL`: a trained model without its degenerate heads, written so that it loads and trains on."""

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

    from attnconv.inspect.auditing import KernelSpan
    from attnconv.models.model_loader import LoadedModel


@dataclass(frozen=True)
class Arguments:
    """Remove heads that attend to a thin stripe or to everything alike (appendix E of the paper).

    Prints what that saves, and which layers can then no longer express a 3 x 3 kernel.

    Examples:
        attnconv prune runs/quadratic-generalized
        attnconv prune runs/quadratic-generalized --criterion code --out runs/pruned
        attnconv evaluate runs/pruned
        attnconv train quadratic-generalized --start-from runs/pruned --epochs 100 --out runs/after

    Attributes:
        model: Run folder or weights file of a model with quadratic or generalised quadratic heads.
        criterion: What counts as degenerate: condition number of the covariance above 1e5 (paper) or 1000 (the authors'
            code), or largest eigenvalue of its inverse below 1e-5 (both).
        out: New folder for the pruned weights and settings; None only prints what would be removed.
    """

    model: Positional[str]
    criterion: Literal["paper", "code"] = "paper"
    out: Path | None = None


def run(arguments: Arguments) -> None:
    """Find, remove and count heads; write the model."""
    with nullcontext() if arguments.out is None else writing(RunFolder(arguments.out)):
        if arguments.out is not None and not RunFolder(arguments.out).is_empty():
            raise ValueError(bad("--out", "must be new or an empty folder", str(arguments.out)))
        _prune(arguments)


def _prune(arguments: Arguments) -> None:
    """Do the work, with the folder locked for writing."""
    from attnconv.models.model_loader import load
    from attnconv.models.operation_counts import flops_all, flops_paper, parameters
    from attnconv.models.settings import AttentionSettings
    from attnconv.surgery.head_pruning import attention_layers, degenerate_heads, prune_heads, settings_after_pruning

    loaded = load(arguments.model)
    before = loaded.settings
    if not isinstance(before, AttentionSettings):
        raise ValueError(bad("model", "must be an attention model with settings of this library", loaded.source))
    layers = attention_layers(loaded.model)
    removed = {name: degenerate_heads(layer, arguments.criterion) for name, layer in layers.items()}
    if empty := [name for name, layer in layers.items() if len(removed[name]) == layer.heads]:
        got = f"{arguments.criterion}, by which all heads of {', '.join(empty)} are degenerate"
        fix = "To leave such a layer as it is, remove heads in Python with attnconv.surgery.prune_heads."
        raise ValueError(bad("--criterion", "must leave at least one head in every layer", got, fix))
    pruned = prune_heads(loaded.model, removed)
    after = settings_after_pruning(before, pruned)
    print(f"{loaded.source}, criterion {arguments.criterion}")
    _print_layers(loaded.model, pruned, removed, side=before.image_size // before.downsampling)
    counts = {"parameters": parameters, "FLOPs, paper's way": flops_paper, "FLOPs, everything": flops_all}
    for name, count in counts.items():
        print(f"{name}: {count(before):,} -> {count(after):,}")
    if arguments.out is not None:
        _write(arguments, replace(loaded, model=pruned, settings=after), removed)


def _print_layers(
    model: "nn.Module", pruned: "nn.Module", removed: Mapping[str, tuple[int, ...]], *, side: int
) -> None:
    """Print each layer's heads, and its distance from every 3 x 3 convolution."""
    from attnconv.inspect.auditing import KERNEL, kernel_span
    from attnconv.surgery.head_pruning import attention_layers

    kernel = f"{KERNEL} x {KERNEL}"
    columns = ("layer", "removed heads", "left", f"{kernel} before", f"{kernel} after")
    rows: list[tuple[str, ...]] = []
    lost: list[str] = []
    unknown: list[str] = []
    rest = attention_layers(pruned)
    for name, layer in attention_layers(model).items():
        # A pruned layer answers anew; the others' answer stands.
        full = kernel_span(layer, (side, side))
        left = kernel_span(rest[name], (side, side)) if removed[name] else full
        if full.expresses and left.missed is not None and not left.expresses:
            lost.append(name)
        unknown += [f"{kernel} is not known of {name}: {span.reason}." for span in (full, left) if span.reason][:1]
        heads = ", ".join(map(str, removed[name])) or "-"
        rows.append((name, heads, f"{rest[name].heads} of {layer.heads}", _missed(full), _missed(left)))
    print_table("", columns, rows, left=2)
    print_text(
        f"{kernel}: the relative part of such kernels that no weights of the layer reach, away from the "
        f"border of {full.sizes[0]} x {full.sizes[1]} positions."
    )
    for sentence in unknown:
        print_text(sentence)
    print_text(f"Can no longer express every {kernel} kernel: {', '.join(lost) or 'none that could before'}.")


def _missed(span: "KernelSpan") -> str:
    return "not known" if span.missed is None else f"{span.missed:.1e}"


def _write(arguments: Arguments, pruned: "LoadedModel", removed: Mapping[str, tuple[int, ...]]) -> None:
    """Write a run that starts from the pruned weights, with the settings of the pruned run if it is known."""
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
    print(f"Pruned: {folder.path}. Train on: attnconv train {preset} --start-from {folder.path} --out FOLDER")
