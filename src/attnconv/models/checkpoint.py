"""Checkpoints: a model's weights and everything needed to use them, in one safetensors file.

The tensors are the model's state dict. The header's map of strings says what they are:

    format            "attnconv"
    format_version    a whole number; what is written today is FORMAT_VERSION
    settings          JSON, `settings.to_dict`: from it the model is built
    classes           JSON list of names, in the order of the logits
    mean, std         JSON lists: the normalisation of each image channel, finite, std above 0
    attnconv_version  the library that wrote it
    extra             JSON: whatever the writer wants to remember (metrics, epoch, preset)

Older versions are brought up to date by `MIGRATIONS`, one step at a time; newer ones are refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import attnconv
from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv._util.input_checks import check_module
from attnconv._util.json_files import read_json
from attnconv._util.rollback import all_or_nothing
from attnconv._util.value_checks import is_real
from attnconv.models.factory import build
from attnconv.models.settings import ModelSettings, from_dict, to_dict
from attnconv.models.weights_file_checks import in_order, read_metadata

FORMAT = "attnconv"
FORMAT_VERSION = 1

Contents: TypeAlias = tuple[dict[str, str], dict[str, Tensor]]  # metadata, tensors
Migration: TypeAlias = Callable[[dict[str, str], dict[str, Tensor]], Contents]

# version -> what turns its contents into the next version's. Version 1 is the first, so there is none yet.
MIGRATIONS: Mapping[int, Migration] = {}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        tensors: the model's state dict, on the CPU.
        settings: of the model.
        classes: names in the order of the logits; empty where the writer had none.
        mean: of each image channel in the training set, for images in [0, 1]; empty where the writer had none.
        std: deviation of each image channel, likewise.
        extra: whatever the writer wanted to remember.
        version: of the library that wrote it.
        source: where it was read.
    """

    tensors: Mapping[str, Tensor]
    settings: ModelSettings
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    source: str = ""


def save_weights(
    path: str | Path,
    model: nn.Module,
    settings: ModelSettings,
    *,
    classes: tuple[str, ...] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint. The file is either whole or, after a full disk or a kill, the one that was there before.

    Args:
        path: the file, usually `*.safetensors`; missing folders are made.
        model: built from `settings`; its tensors may lie on any device.
        settings: of the model.
        classes: names in the order of the logits.
        mean: normalisation of the images, for each channel.
        std: likewise.
        extra: plain JSON values to remember.

    Raises:
        ValueError: if the model's tensors are not those of the settings, or one of them holds NaN or infinity; or the
            names or the normalisation do not fit the settings (see `check_about`).
        TypeError: if `extra` is not made of plain JSON values.
        OSError: if the file cannot be written.
    """
    content = weights_bytes(model, settings, classes=classes, mean=mean, std=std, extra=extra)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def weights_bytes(
    model: nn.Module,
    settings: ModelSettings,
    *,
    classes: tuple[str, ...] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """What `save_weights` writes, for a later moment."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    check_about(settings, {"classes": classes, "mean": mean, "std": std})
    check_tensors(tensors, settings, argument="model")
    _refuse_nonfinite(tensors, argument="model", origin="")
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "settings": json.dumps(to_dict(settings)),
        "classes": json.dumps(list(classes)),
        "mean": json.dumps([float(value) for value in mean]),
        "std": json.dumps([float(value) for value in std]),
        "attnconv_version": attnconv.__version__,
        "extra": _as_json(extra),
    }
    return in_order(safetensors.torch.save(tensors, metadata))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read and check a checkpoint. Nothing in the file is executed.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is a pickle, truncated, not a safetensors file, not written by this library, or written
            in a newer version of its format; if its tensors are not those of its settings, or not finite; or if its
            classes or its normalisation do not fit its settings.
    """
    path = Path(path)
    metadata = read_metadata(path)
    tensors = read_tensors(path)
    version = _format_version(metadata, path)
    metadata, tensors = migrate(metadata, tensors, version=version, origin=str(path))
    checkpoint = _interpret(metadata, tensors, path)
    check_tensors(checkpoint.tensors, checkpoint.settings, argument="checkpoint", origin=str(path))
    _refuse_nonfinite(checkpoint.tensors, argument="checkpoint", origin=str(path))
    return checkpoint


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        ValueError: if the file is none.
    """
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(bad("checkpoint", "must be a safetensors file", str(error), origin=str(path))) from error


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into a model that exists already.

    Raises:
        TypeError: if there is no model or no checkpoint.
        ValueError: if the model has lazy layers; if its tensors differ from the checkpoint's in name or shape, and the
            message says which; or if an attention layer is given NaN or infinity. The model then keeps all that it had.
    """
    check_module(model)
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(bad("checkpoint", "must be what read_checkpoint gives", type(checkpoint).__name__))
    if any(nn.parameter.is_lazy(tensor) for tensor in model.state_dict().values()):
        fix = "Run the model once on an image, so that its lazy layers take their shapes."
        raise ValueError(bad("model", "must have its parameters", type(model).__name__, fix))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _refuse_mismatch(checkpoint.tensors, shapes, argument="checkpoint", origin=checkpoint.source)
    with all_or_nothing(model):
        model.load_state_dict(dict(checkpoint.tensors))


def migrate(
    metadata: dict[str, str],
    tensors: dict[str, Tensor],
    *,
    version: int,
    target: int = FORMAT_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
    origin: str = "",
) -> Contents:
    """Bring contents of an older format version up to `target`, one version at a time.

    Raises:
        ValueError: if the version is newer than the target, or no migration leads on from one on the way.
    """
    if version > target:
        requirement = f"must have format version {target} or older"
        fix = f"It was written by attnconv {metadata.get('attnconv_version', 'unknown')}; install that or a newer one."
        raise ValueError(bad("checkpoint", requirement, version, fix, origin=origin))
    while version < target:
        if version not in migrations:
            requirement = f"must have a format version that leads to {target} ({sorted(migrations)} do)"
            raise ValueError(bad("checkpoint", requirement, version, origin=origin))
        metadata, tensors = migrations[version](metadata, tensors)
        version += 1
    return metadata, tensors


def check_tensors(tensors: Mapping[str, Tensor], settings: ModelSettings, *, argument: str, origin: str = "") -> None:
    """Hold tensors against those that a model of these settings has, without the memory for a second model.

    Raises:
        ValueError: if a name is missing or unknown, or a shape differs.
    """
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build(settings).state_dict().items()}
    _refuse_mismatch(tensors, expected, argument=argument, origin=origin)


def check_about(settings: ModelSettings | None, about: Mapping[str, Any], *, origin: str = "") -> None:
    """Check what is said of a model's classes and images.

    Args:
        settings: of the model; None for one from elsewhere, of which the numbers are not known.
        about: `classes`, `mean` and `std`, lists or tuples; each may be empty.
        origin: where they came from, for the message.

    Raises:
        ValueError: if there are not as many names as classes; or if mean and deviation are not one finite number for
            each channel of the images, the deviation above 0.
    """
    classes, mean, std = about["classes"], about["mean"], about["std"]
    count = len(classes) if settings is None else settings.classes
    if classes and not (len(classes) == count and all(isinstance(name, str) for name in classes)):
        raise ValueError(bad("classes", f"must be {count} names", list(classes), origin=origin))
    channels = len(mean) if settings is None else settings.image_channels
    for name, values, least in (("mean", mean, -math.inf), ("std", std, 0.0)):
        fine = all(is_real(value) and value > least for value in values)
        if not fine or len(mean) != len(std) or len(values) not in (0, channels):
            above = " above 0" if name == "std" else ""
            requirement = f"must be {channels} finite numbers{above}, one for each channel of the images"
            raise ValueError(bad(name, requirement, list(values), origin=origin))


def _format_version(metadata: Mapping[str, str], path: Path) -> int:
    if metadata.get("format") != FORMAT:
        got = f"a safetensors file with the metadata {sorted(metadata)}" if metadata else "one without metadata"
        fix = "Build the model, load these tensors into it, and write it with attnconv.models.save_weights."
        raise ValueError(bad("checkpoint", "must be written by attnconv", got, fix, origin=str(path)))
    text = metadata.get("format_version", "")
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ValueError(bad("checkpoint", "must say its format version", repr(text), origin=str(path)))
    return int(text)


def _interpret(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], path: Path) -> Checkpoint:
    origin = f"from {path}"
    settings = from_dict(_json_value(metadata, "settings", dict, path), origin=origin)
    about = {name: tuple(_json_value(metadata, name, list, path)) for name in ("classes", "mean", "std")}
    check_about(settings, about, origin=origin)
    return Checkpoint(
        tensors=tensors,
        settings=settings,
        classes=about["classes"],
        mean=tuple(map(float, about["mean"])),
        std=tuple(map(float, about["std"])),
        extra=_json_value(metadata, "extra", dict, path),
        version=metadata.get("attnconv_version", ""),
        source=str(path),
    )


def _json_value(metadata: Mapping[str, str], name: str, kind: type, path: Path) -> Any:
    text = metadata.get(name)
    try:
        value = None if text is None else read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        requirement = f"must hold a JSON {'map' if kind is dict else 'list'} under {name!r}"
        raise ValueError(bad("checkpoint", requirement, repr(text), origin=str(path)))
    return value


def _as_json(extra: Mapping[str, Any] | None) -> str:
    values = {} if extra is None else dict(extra)
    try:
        return json.dumps(values)
    except (TypeError, ValueError) as error:
        raise TypeError(bad("extra", "must be made of plain JSON values", f"{values!r} ({error})")) from error


def _refuse_mismatch(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], *, argument: str, origin: str
) -> None:
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    shapes = [
        f"{name} of shape {tuple(tensors[name].shape)} in place of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    differences = [_some("no", missing), _some("unexpected", unknown), _some("", shapes)]
    if any(differences):
        got = "; ".join(text for text in differences if text)
        fix = "It belongs to a model of another preset or with other settings."
        raise ValueError(bad(argument, f"must hold the {len(expected)} tensors of its model", got, fix, origin=origin))


def _some(label: str, names: list[str]) -> str:
    """The first three names and the number of the others."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{label} {', '.join(names[:3])}{more}".strip()


def _refuse_nonfinite(tensors: Mapping[str, Tensor], *, argument: str, origin: str) -> None:
    wrong = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if wrong:
        fix = "The training that made it diverged; use an earlier checkpoint, or a lower learning rate."
        got = f"NaN or infinity in {_some('', wrong)}"
        raise ValueError(bad(argument, "must hold finite numbers only", got, fix, origin=origin))
