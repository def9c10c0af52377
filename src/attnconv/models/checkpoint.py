"""Weights files: self-contained checkpoints and recast networks in the safetensors format.

The tensors are a model's state dict; loading a file never executes code. The header metadata contains the strings

    format            "attnconv" (checkpoint) or "attnconv-recast" (recast network)
    format_version    "1"
    attnconv_version  version of attnconv that wrote the file

and, as JSON,

    classes     class names, in the order of the logits
    mean, std   normalisation of each image channel, finite, std above 0
    settings    (checkpoint) settings from which the model is built, with a tag `kind`
    extra       (checkpoint) user data, such as metrics, epoch and preset
    model       (recast) {"settings": ...} of a preset or checkpoint, or {"spec": "torchvision:resnet18"}
    alpha, only (recast) arguments of `recast`
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
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, version]) for version in range(6)))  # zip archive, pickle protocols


class About(NamedTuple):
    """Class names and image normalisation of a model; unknown fields are empty."""

    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint.

    Attributes:
        tensors: State dict of the model, on the CPU.
        settings: Settings of the model.
        classes: Class names in the order of the logits; empty if unknown.
        mean: Mean of each image channel in the training set, for pixels in [0, 1]; empty if unknown.
        std: Standard deviation of each image channel, also for pixels in [0, 1]; empty if unknown.
        extra: User data stored with the weights.
        source: Path of the file.
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
    """Contents of a weights file."""

    source: str
    metadata: Mapping[str, str]
    tensors: dict[str, Tensor]

    def value(self, name: str, *kinds: type) -> Any:
        """Decode a metadata entry, which must be JSON of one of the given types."""
        text = self.metadata.get(name, "")
        with contextlib.suppress(ValueError, RecursionError):
            if type(value := json.loads(text)) in kinds:
                return value
        requirement = f"must contain JSON of type {' or '.join(kind.__name__ for kind in kinds)} under {name!r}"
        raise ValueError(bad("checkpoint", requirement, repr(text), origin=self.source))

    def about(self, settings: ModelSettings | None) -> About:
        """Read and validate `classes`, `mean` and `std`."""
        about = About(*(tuple(self.value(name, list)) for name in About._fields))
        _check_about(settings, about, origin=f"from {self.source}")
        return About(about.classes, tuple(map(float, about.mean)), tuple(map(float, about.std)))

    def checkpoint(self) -> Checkpoint:
        if self.metadata.get("format") != CHECKPOINT:
            fix = "Build the model, load these tensors into it, and save it with attnconv.models.save_weights."
            got = f"a safetensors file with the metadata {sorted(self.metadata)}"
            raise ValueError(bad("checkpoint", "must be written by attnconv", got, fix, origin=self.source))
        origin = f"from {self.source}"
        settings: ModelSettings = read(ModelSettings, self.value("settings", dict), name="model", origin=origin)
        about = self.about(settings)
        check_tensors(self.tensors, settings, argument="checkpoint", origin=self.source)
        return Checkpoint(self.tensors, settings, *about, self.value("extra", dict), self.source)


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
    """Write a checkpoint atomically: if the disk is full or the process is killed, an existing file is unchanged.

    Args:
        path: Path of the file, usually `*.safetensors`; missing folders are created.
        model: Model built from `settings`, on any device.
        settings: Settings of the model.
        classes: Class names in the order of the logits.
        mean: Mean of each image channel, for pixels in [0, 1]; empty if unknown.
        std: Standard deviation of each image channel, for pixels in [0, 1], above 0; empty if unknown.
        extra: User data to store with the weights; values must be encodable as JSON.

    Raises:
        ValueError: If the model's tensors do not match the settings or contain NaN or infinity, or if the class names
            or the normalisation do not match the settings.
        TypeError: If `extra` cannot be encoded as JSON.
        OSError: If the file cannot be written.
    """
    _write(Path(path), weights_bytes(model, settings, About(classes, mean, std), extra))


def weights_bytes(
    model: nn.Module, settings: ModelSettings, about: About, extra: Mapping[str, Any] | None = None
) -> bytes:
    """Return the content of the file that `save_weights` writes."""
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
    """Write a recast network atomically; `origin` is the original's settings, or its `spec` for `load`."""
    source = {"spec": origin} if isinstance(origin, str) else {"settings": plain(origin)}
    description = {"model": source, "alpha": alpha, "only": None if only is None else list(only), **about._asdict()}
    # Copy, since the format does not support shared tensors; `recast` ties shared weights again on loading.
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    _write(path, _content(tensors, RECAST, description))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read and validate a checkpoint, without executing code from the file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is a pickle, not a complete safetensors file, or not a checkpoint of this format
            version; if a tensor is not finite; or if tensors, class names or normalisation do not match the settings.
    """
    return read_weights(Path(path)).checkpoint()


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into an existing model, which is unchanged if an error is raised.

    Raises:
        TypeError: If `model` is not a module, or `checkpoint` is not a `Checkpoint`.
        ValueError: If the model has lazy layers, tensor names or shapes differ, or attention would be NaN or infinite.
    """
    check_module(model)
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(bad("checkpoint", "must be a Checkpoint (see read_checkpoint)", type(checkpoint).__name__))
    if any(nn.parameter.is_lazy(tensor) for tensor in model.state_dict().values()):
        fix = "Run the model once on an image to initialise its lazy layers."
        raise ValueError(bad("model", "must have initialised parameters", type(model).__name__, fix))
    with all_or_nothing(model):
        load_tensors(model, checkpoint.tensors, origin=checkpoint.source)


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, argument: str = "checkpoint", origin: str, assign: bool = False
) -> None:
    """Call `Module.load_state_dict`, converting its errors to a `ValueError` with the argument's name."""
    try:
        model.load_state_dict(dict(tensors), assign=assign)
    except RuntimeError as error:
        got = " ".join(str(error).split())
        fix = "They are from a different preset, settings, or version of the model's library."
        raise ValueError(bad(argument, "must have the tensors of its model", got, fix, origin=origin)) from error


def check_tensors(tensors: Mapping[str, Tensor], settings: ModelSettings, *, argument: str, origin: str = "") -> None:
    """Check that tensors are finite and match a model with the given settings."""
    wrong = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if wrong:
        fix = "Training diverged. Use an earlier checkpoint or a lower learning rate."
        got = f"NaN or infinity in {', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}"
        raise ValueError(bad(argument, "must have only finite values", got, fix, origin=origin))
    with torch.random.fork_rng(devices=[]):  # the meta device would take seconds to import torch._dynamo
        model = build(settings)
    load_tensors(model, tensors, argument=argument, origin=origin, assign=True)


def _check_about(settings: ModelSettings | None, about: About, *, origin: str = "") -> None:
    """Compare class names and normalisation with the model's settings; None for models from other libraries."""
    classes, mean, std = about
    count = len(classes) if settings is None else settings.classes
    if classes and not (len(classes) == count and all(isinstance(name, str) for name in classes)):
        raise ValueError(bad("classes", f"must be {count} names", list(classes), origin=origin))
    channels = len(mean) if settings is None else settings.image_channels
    for name, values, least in (("mean", mean, -math.inf), ("std", std, 0.0)):
        fine = all(is_real(value) and value > least for value in values)
        if not fine or len(mean) != len(std) or len(values) not in (0, channels):
            above = " above 0" if name == "std" else ""
            requirement = f"must be finite numbers{above}, one per image channel ({channels})"
            raise ValueError(bad(name, requirement, list(values), origin=origin))


def read_weights(path: Path) -> WeightsFile:
    """Read a safetensors file to the CPU; pickles are rejected unread, with a hint on how to convert them."""
    if not path.is_file():
        got = f"the folder {path}" if path.is_dir() else f"nothing at {path}"
        raise FileNotFoundError(bad("checkpoint", "must be a file", got))
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
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
    with path.open("rb") as file:
        is_pickle = file.read(4).startswith(_PICKLE_STARTS) or path.suffix.lower() in PICKLE_SUFFIXES
    if not is_pickle:
        fix = "If it was truncated while copying or downloading, fetch it again."
        return bad("checkpoint", "must be a complete safetensors file", error, fix, origin=str(path))
    fix = f"Convert the weights of a preset: `model.load_state_dict(torch.load({path.name!r}, weights_only=True))`, "
    fix += "`attnconv.models.save_weights('weights.safetensors', model, settings)`."
    if beside := sorted(other for other in path.parent.glob("*.safetensors") if other != path):
        fix = f"If {beside[0]} contains the same weights, load it or the run folder instead. Otherwise: {fix}"
    requirement = "must be a safetensors file, since a pickle can execute arbitrary code"
    return bad("checkpoint", requirement, "a pickle, which was not read", fix, origin=str(path))


def _content(tensors: Mapping[str, Tensor], form: str, description: Mapping[str, Any]) -> bytes:
    """Return the bytes of a weights file with JSON values in its header, identical in every process."""
    metadata = {name: json.dumps(value) for name, value in description.items()}
    metadata |= {"format": form, "format_version": FORMAT_VERSION, "attnconv_version": attnconv.__version__}
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    # safetensors orders the metadata differently in each process, so sort it.
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors must start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
