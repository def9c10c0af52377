"""Recast networks as files: the weights of `recast(model)`, and which model that was.

One safetensors file; its header's map of strings says

    format            "attnconv-recast"
    format_version    a whole number
    model             JSON: {"settings": ..} of a preset or checkpoint, or {"spec": "torchvision:resnet18"}
    alpha, only       JSON: the arguments of `recast`
    classes, mean, std, attnconv_version    as in a checkpoint

To read one, the architecture is built afresh, recast, and given the weights. Nothing in a file is executed: where the
model came from a function of the user's own (`package.module:function`), the file is refused with the line that loads
it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import attnconv
from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv._util.json_files import read_json
from attnconv.convert import plan_shifts, recast
from attnconv.models.checkpoint import check_about, read_tensors
from attnconv.models.factory import build
from attnconv.models.settings import ModelSettings, from_dict, to_dict
from attnconv.models.weights_file_checks import in_order, read_metadata

FORMAT = "attnconv-recast"
_LISTS = ("classes", "mean", "std")
FORMAT_VERSION = 1


@dataclass(frozen=True)
class RecastFile:
    """What a recast file holds, the model rebuilt.

    Attributes:
        model: the recast network, in evaluation mode.
        settings: of the preset or checkpoint that was recast; None for models from elsewhere.
        classes, mean, std: as in a checkpoint.
    """

    model: nn.Module
    settings: ModelSettings | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def save_recast(
    path: str | Path,
    model: nn.Module,
    origin: str | ModelSettings,
    *,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
    about: dict[str, tuple[Any, ...]] | None = None,
) -> None:
    """Write a recast network, whole or not at all.

    Args:
        path: the file, usually `*.safetensors`; missing folders are made.
        model: what `recast` returned.
        origin: what was recast: settings of a model of this library, or the words that `load` took.
        alpha: as it was given to `recast`.
        only: as it was given to `recast`; patterns only.
        about: `classes`, `mean` and `std` of a checkpoint, where they are known.

    Raises:
        OSError: if the file cannot be written.
    """
    known = {"classes": (), "mean": (), "std": ()} | (about or {})
    source = {"spec": origin} if isinstance(origin, str) else {"settings": to_dict(origin)}
    values = {"model": source, "alpha": alpha, "only": None if only is None else list(only), **known}
    metadata = {name: json.dumps(value) for name, value in values.items()}
    metadata |= {"format": FORMAT, "format_version": str(FORMAT_VERSION), "attnconv_version": attnconv.__version__}
    # Copies: the format has no two names for one tensor, and shared weights are shared again when they are loaded.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, in_order(safetensors.torch.save(tensors, metadata)))


def is_recast(metadata: dict[str, str]) -> bool:
    """Whether a weights file's map of strings is that of a recast network."""
    return metadata.get("format") == FORMAT


def read_recast(path: Path, build_named: Callable[[str], nn.Module]) -> RecastFile:
    """Rebuild a recast network.

    Args:
        path: the file.
        build_named: makes the model that words stand for; never called with a function's name.

    Raises:
        ValueError: if the file is of a newer format, was made from a function of the user's own, says nonsense about
            itself, or does not fit the model that it names.
    """
    metadata, origin = read_metadata(path), str(path)
    if metadata.get("format_version") != str(FORMAT_VERSION):
        got = repr(metadata.get("format_version"))
        raise ValueError(bad("checkpoint", f"must have format version {FORMAT_VERSION}", got, origin=origin))
    try:
        values = {name: read_json(metadata[name]) for name in ("model", "alpha", "only", *_LISTS)}
        source, spec = values["model"], values["model"].get("spec")
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(bad("checkpoint", "must say what was recast", repr(error), origin=origin)) from error
    kinds = {"alpha": (float, int, type(None)), "only": (list, type(None))} | dict.fromkeys(_LISTS, (list,))
    wrong = [name for name, kind in kinds.items() if type(values[name]) not in kind]
    if wrong or not (isinstance(spec, str) or isinstance(source.get("settings"), dict)):
        name = wrong[0] if wrong else "model"
        raise ValueError(bad(f"checkpoint: {name}", "must be what recast was given", repr(values[name]), origin=origin))
    settings = None if isinstance(spec, str) else from_dict(source["settings"], origin=origin)
    if isinstance(spec, str) and spec.partition(":")[0] not in ("timm", "torchvision", "hf"):
        fix = f"Load it with: model = attnconv.recast(YOUR_MODEL, alpha={values['alpha']}, only={values['only']}); "
        fix += f"model.load_state_dict(safetensors.torch.load_file({path.name!r}))."
        raise ValueError(
            bad("checkpoint", "must name a model of a library; no function is run", spec, fix, origin=origin)
        )
    check_about(settings, values, origin=origin)
    with torch.random.fork_rng(devices=[]):
        base = build(settings) if settings is not None else build_named(str(spec))
    tensors = read_tensors(path)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    model = recast(base.to(dtypes.pop()) if len(dtypes) == 1 else base, alpha=values["alpha"], only=values["only"])
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        fix = "The model's library may have changed since."
        raise ValueError(bad("checkpoint", "must fit the model it names", str(error), fix, origin=origin)) from error
    plan_shifts(model)
    mean, std = (tuple(map(float, values[name])) for name in ("mean", "std"))
    return RecastFile(model.eval(), settings, tuple(values["classes"]), mean, std)
