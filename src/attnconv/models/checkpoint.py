"""Weights files: checkpoints and recast networks, each with everything needed to use it, in one safetensors file.

The tensors are a model's state dict, and nothing in a file is executed. The header's map of strings describes them:

    format            "attnconv" (a checkpoint) or "attnconv-recast" (a recast network)
    format_version    "1"
    attnconv_version  the version that wrote it

and, as JSON,

    classes     names, in the order of the logits
    mean, std   the normalisation of each image channel, finite, std above 0
    settings    (checkpoint) with a tag `kind`: the model is built from it
    extra       (checkpoint) whatever the writer wants to remember (metrics, epoch, preset)
    model       (recast) {"settings": ..} of a preset or checkpoint, or {"spec": "torchvision:resnet18"}
    alpha, only (recast) the arguments of `recast`
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

import attnconv
from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv._util.module_state import all_or_nothing
from attnconv._util.settings import plain, read
from attnconv._util.value_checks import check_module, is_real
from attnconv.models.classifiers import build
from attnconv.models.settings import ModelSettings

CHECKPOINT = "attnconv"
RECAST = "attnconv-recast"
FORMAT_VERSION = "1"
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin", ".th", ".tar")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, version]) for version in range(6)))  # a zip of one, or its protocol


class About(NamedTuple):
    """Names of the classes and the normalisation of the images; each is empty where it is not known."""

    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        tensors: The model's state dict, on the CPU.
        settings: Settings of the model.
        classes: Names in the order of the logits; empty if unknown.
        mean: Mean of each image channel in the training set, for images in [0, 1]; empty if unknown.
        std: Standard deviation of each image channel, likewise.
        extra: Whatever the writer wanted to remember.
        source: Where it was read.
    """

    tensors: Mapping[str, Tensor]
    settings: ModelSettings
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class WeightsFile:
    """The contents of a weights file."""

    source: str
    metadata: Mapping[str, str]
    tensors: dict[str, Tensor]

    def value(self, name: str, *kinds: type) -> Any:
        """Decode an entry of the header, which must be JSON of one of these types."""
        text = self.metadata.get(name, "")
        with contextlib.suppress(ValueError, RecursionError):
            if type(value := json.loads(text)) in kinds:
                return value
        requirement = f"must hold JSON of type {' or '.join(kind.__name__ for kind in kinds)} under {name!r}"
        raise ValueError(bad("checkpoint", requirement, repr(text), origin=self.source))


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
    """Write a checkpoint atomically: after a full disk or a kill, the file is the one that was there before.

    Args:
        path: The file, usually `*.safetensors`; missing folders are created.
        model: Built from `settings`; its tensors may be on any device.
        settings: Settings of the model.
        classes: Names in the order of the logits.
        mean: Mean of each image channel.
        std: Standard deviation of each image channel, above 0.
        extra: JSON values to remember.

    Raises:
        ValueError: The model's tensors are not those of the settings, or one of them holds NaN or infinity; or the
            names or the normalisation do not fit the settings.
        TypeError: `extra` is not made of JSON values.
        OSError: The file cannot be written.
    """
    _write(Path(path), weights_bytes(model, settings, About(classes, mean, std), extra))


def weights_bytes(
    model: nn.Module, settings: ModelSettings, about: About, extra: Mapping[str, Any] | None = None
) -> bytes:
    """The content of the file that `save_weights` writes."""
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    _check_about(settings, about)
    check_tensors(tensors, settings, argument="model")
    return _content(tensors, CHECKPOINT, {"settings": plain(settings), **about._asdict(), "extra": dict(extra or {})})


def save_recast(
    path: Path,
    model: nn.Module,
    origin: str | ModelSettings,
    *,
    about: About,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Write a recast network atomically; `origin` is the settings of what was recast, or the argument of `load`."""
    source = {"spec": origin} if isinstance(origin, str) else {"settings": plain(origin)}
    description = {"model": source, "alpha": alpha, "only": None if only is None else list(only), **about._asdict()}
    # Copies: the format has no two names for one tensor, and shared weights are shared again when they are loaded.
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    _write(path, _content(tensors, RECAST, description))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read and check a checkpoint. Nothing in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is a pickle, not a whole safetensors file, or not a checkpoint of this version of the
            format; its tensors are not those of its settings, or not finite; or its classes or its normalisation do
            not fit its settings.
    """
    return checkpoint_of(read_weights(Path(path)))


def checkpoint_of(file: WeightsFile) -> Checkpoint:
    """Check and interpret a weights file as a checkpoint."""
    if file.metadata.get("format") != CHECKPOINT:
        fix = "Build the model, load these tensors into it, and write it with attnconv.models.save_weights."
        got = f"a safetensors file with the metadata {sorted(file.metadata)}"
        raise ValueError(bad("checkpoint", "must be written by attnconv", got, fix, origin=file.source))
    origin = f"from {file.source}"
    settings: ModelSettings = read(ModelSettings, file.value("settings", dict), name="model", origin=origin)
    about = read_about(file, settings)
    check_tensors(file.tensors, settings, argument="checkpoint", origin=file.source)
    return Checkpoint(file.tensors, settings, *about, file.value("extra", dict), file.source)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into an existing model. If an error is raised, the model is unchanged.

    Raises:
        TypeError: The arguments are not a module and a checkpoint.
        ValueError: The model has lazy layers; its tensors differ from the checkpoint's in name or shape, and the
            message says which; or an attention layer is given NaN or infinity.
    """
    check_module(model)
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(bad("checkpoint", "must be what read_checkpoint returns", type(checkpoint).__name__))
    if any(nn.parameter.is_lazy(tensor) for tensor in model.state_dict().values()):
        fix = "Run the model once on an image, so that its lazy layers take their shapes."
        raise ValueError(bad("model", "must have its parameters", type(model).__name__, fix))
    with all_or_nothing(model):
        load_tensors(model, checkpoint.tensors, origin=checkpoint.source)


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, argument: str = "checkpoint", origin: str, assign: bool = False
) -> None:
    """`Module.load_state_dict`, whose errors become a `ValueError` with the argument's name."""
    try:
        model.load_state_dict(dict(tensors), assign=assign)
    except RuntimeError as error:
        got = " ".join(str(error).split())
        fix = "They belong to a model of another preset, with other settings, or of another version of its library."
        raise ValueError(bad(argument, "must hold the tensors of its model", got, fix, origin=origin)) from error


def check_tensors(tensors: Mapping[str, Tensor], settings: ModelSettings, *, argument: str, origin: str = "") -> None:
    """Check that tensors are finite and those of a model with these settings, without memory for a second model."""
    wrong = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if wrong:
        fix = "The training that made it diverged; use an earlier checkpoint, or a lower learning rate."
        got = f"NaN or infinity in {', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}"
        raise ValueError(bad(argument, "must hold only finite numbers", got, fix, origin=origin))
    with torch.device("meta"):
        model = build(settings)
    load_tensors(model, tensors, argument=argument, origin=origin, assign=True)


def read_about(file: WeightsFile, settings: ModelSettings | None) -> About:
    """Read and check `classes`, `mean` and `std` of a weights file."""
    about = About(*(tuple(file.value(name, list)) for name in About._fields))
    _check_about(settings, about, origin=f"from {file.source}")
    return About(about.classes, tuple(map(float, about.mean)), tuple(map(float, about.std)))


def _check_about(settings: ModelSettings | None, about: About, *, origin: str = "") -> None:
    """Compare names and normalisation with the settings of their model, None for one of another library."""
    classes, mean, std = about
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


def read_weights(path: Path) -> WeightsFile:
    """Read a safetensors file, with tensors on the CPU; pickles are rejected unread, with the way to convert them."""
    if not path.is_file():
        got = f"the folder {path}" if path.is_dir() else f"nothing at {path}"
        raise FileNotFoundError(bad("checkpoint", "must be a file", got))
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(_refusal(path, str(error))) from error
    version = metadata.get("format_version")
    if metadata.get("format") in (CHECKPOINT, RECAST) and version != FORMAT_VERSION:
        fix = f"It was written by attnconv {metadata.get('attnconv_version', 'unknown')}; read it with that version."
        requirement = f"must have format version {FORMAT_VERSION}"
        raise ValueError(bad("checkpoint", requirement, repr(version), fix, origin=str(path)))
    return WeightsFile(str(path), metadata, tensors)


def _refusal(path: Path, error: str) -> str:
    """Explain why a file is not a weights file, and what to do."""
    with path.open("rb") as file:
        is_pickle = file.read(4).startswith(_PICKLE_STARTS) or path.suffix.lower() in PICKLE_SUFFIXES
    if not is_pickle:
        fix = "If it was cut off while it was copied or downloaded, fetch it again."
        return bad("checkpoint", "must be a whole safetensors file", error, fix, origin=str(path))
    fix = f"Convert a preset's: `model.load_state_dict(torch.load({path.name!r}, weights_only=True))`, "
    fix += "`attnconv.models.save_weights('weights.safetensors', model, settings)`."
    if beside := sorted(other for other in path.parent.glob("*.safetensors") if other != path):
        fix = f"Next to it is {beside[0]}; name that, or the run folder."
    requirement = "must be a safetensors file, for a pickle can execute anything"
    return bad("checkpoint", requirement, "a pickle, which was not read", fix, origin=str(path))


def _content(tensors: Mapping[str, Tensor], form: str, description: Mapping[str, Any]) -> bytes:
    """The bytes of a weights file with JSON values in its header; equal contents are equal bytes."""
    metadata = {name: json.dumps(value) for name, value in description.items()}
    metadata |= {"format": form, "format_version": FORMAT_VERSION, "attnconv_version": attnconv.__version__}
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    # safetensors orders the map of strings differently in each process: it is sorted here.
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _write(path: Path, content: bytes) -> None:
    """Write a weights file atomically; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
