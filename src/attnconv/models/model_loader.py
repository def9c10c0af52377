"""Load any model: every command and function that accepts a model accepts what `load` accepts."""

import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attnconv._util.errors import bad, did_you_mean
from attnconv.models import recast_file
from attnconv.models.checkpoint import checkpoint_of, model_of
from attnconv.models.classifiers import build
from attnconv.models.library_models import LIBRARIES, library_model
from attnconv.models.presets import PRESETS, preset_settings
from attnconv.models.settings import ModelSettings
from attnconv.models.weights_file import PICKLE_SUFFIXES, read_weights

RUN_WEIGHTS = ("checkpoints/best.safetensors", "checkpoints/last.safetensors", "checkpoints/start.safetensors")
"""Where a run folder keeps its weights, in the order of preference."""
_FORMS = "a preset, a run folder, a checkpoint, timm:NAME, hf:NAME, torchvision:NAME or package.module:function"


@dataclass(frozen=True)
class LoadedModel:
    """A model and what is known about it.

    Attributes:
        model: In evaluation mode, on the CPU: normalised images (b, c, height, width) to logits (b, classes).
        settings: Of a preset or a checkpoint; None for other models.
        classes: Names in the order of the logits; empty where they are not known.
        mean: Mean of each image channel, for images in [0, 1]; empty where it is not known.
        std: Standard deviation of each image channel, likewise.
        source: Where the model came from, for reports.
    """

    model: nn.Module
    settings: ModelSettings | None = None
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    source: str = ""


def load(
    spec: str | Path, *, pretrained: bool = False, size: tuple[int, int] | None = None, **changes: Any
) -> LoadedModel:
    """Load or build a model, which `spec` names in one of these forms.

        quadratic                     a preset's name: fresh parameters
        runs/2026-11-21-quadratic     a run folder: its best checkpoint, else its last, else its initial one
        weights.safetensors           a checkpoint, or a network that `attnconv recast` wrote
        timm:vit_tiny_patch16_224     a model of timm
        torchvision:resnet18          a model of torchvision
        hf:vit                        a model of transformers: a type of model, or a name on the hub, or a folder
        package.module:function       whatever the function, called without arguments, returns

    A preset's name means the preset even where a folder has the same name; write `./quadratic` for the folder.

    Args:
        spec: The model; a `Path` is always a run folder or a checkpoint.
        pretrained: Download trained weights for models of timm, torchvision and the hub.
        size: Height and width of the images in pixels, for models of timm and transformers that are made for one size:
            both interpolate trained positions to it. None for the model's own.
        **changes: Settings in place of a preset's own, such as `classes=100` (the fields of `AttentionSettings` and
            `ResNetSettings`).

    Returns:
        The model in evaluation mode. Fresh parameters are drawn from torch's global generator; reading a checkpoint
        leaves that as it was.

    Raises:
        ValueError: The name is not known or has none of these forms, the checkpoint is rejected (see
            `read_checkpoint`), timm cannot build the model for the size, or the user's code raises an error.
        FileNotFoundError: There is no such folder or file, or a run folder holds no weights yet.
        ImportError: The library of the model is not installed, or the module cannot be found.
        TypeError: A function returns something that is not a `torch.nn.Module`.

    Example:
        >>> load("quadratic-digits").source
        'preset quadratic-digits, fresh parameters'
        >>> import torch
        >>> load("quadratic-small", classes=100).model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 100])
    """
    if isinstance(spec, str) and spec in PRESETS:
        settings = preset_settings(spec, **changes)
        return LoadedModel(build(settings).eval(), settings, source=f"preset {spec}, fresh parameters")
    if changes:
        name, value = next(iter(changes.items()))
        raise ValueError(bad(name, "is a setting of presets", repr(value), f"{str(spec)!r} is none."))
    if isinstance(spec, Path):
        return _load_path(spec)
    library, colon, name = spec.partition(":")
    if colon and library in LIBRARIES:
        model, about = library_model(library, name, pretrained=pretrained, size=size)
        state = "pretrained" if pretrained else "fresh parameters"
        return LoadedModel(model.eval(), None, *about, f"{spec}, {state}")
    is_path = "/" in spec or os.sep in spec or spec.endswith((".safetensors", *PICKLE_SUFFIXES))
    if Path(spec).exists():
        return _load_path(Path(spec))
    if is_path:
        raise FileNotFoundError(bad("model", "must be a run folder or a checkpoint", f"nothing at {spec}"))
    if colon:
        return _load_function(library, name)
    fix = did_you_mean(spec, PRESETS) or "`attnconv models` lists the presets."
    raise ValueError(bad("model", f"must be {_FORMS}", repr(spec), fix))


def _load_path(path: Path) -> LoadedModel:
    file = read_weights(checkpoint_file(path))
    if file.metadata.get("format") == recast_file.FORMAT:
        model, settings, about = recast_file.rebuild(file)
        return LoadedModel(model.eval(), settings, *about, f"recast network {file.source}")
    found = checkpoint_of(file)
    model, source = model_of(found), f"checkpoint {file.source}"
    return LoadedModel(model.eval(), found.settings, found.classes, found.mean, found.std, source)


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a path names: itself, or of a run folder the best, else the last, else the initial one."""
    if not path.is_dir():
        return path
    for name in RUN_WEIGHTS:
        if (path / name).is_file():
            return path / name
    requirement = f"must be a run folder that holds {' or '.join(RUN_WEIGHTS)}"
    fix = "A run writes its first checkpoint at the end of its first epoch."
    raise FileNotFoundError(bad("model", requirement, path, fix))


def _load_function(module_name: str, function_name: str) -> LoadedModel:
    spec = f"{module_name}:{function_name}"
    module = _import_module(module_name, spec)
    function = getattr(module, function_name, None)
    if not callable(function):
        fix = did_you_mean(function_name, dir(module))
        raise ValueError(bad("model", f"must name a function of {module_name}", repr(function_name), fix))
    try:
        model = function()
    except Exception as error:
        raise ValueError(_users_error(spec, error, module)) from error
    if not isinstance(model, nn.Module):
        raise TypeError(bad("model", f"{spec} must return a torch.nn.Module", type(model).__name__))
    return LoadedModel(model.eval(), source=f"function {spec}")


def _users_error(spec: str, error: Exception, module: Any = None) -> str:
    """Describe an error of a user's code, with the line that raised it, and theirs where that is another."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    places = dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in (frames[-1:] + theirs[-1:]))
    fix = f"It was raised at {', called from '.join(places)}: {(theirs or frames)[-1].line}"
    got = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
    return bad("model", f"{spec} must run without an error", got, fix)


def _import_module(name: str, spec: str) -> Any:
    """Import a module that the user named; one in the working folder is found as with `python -m`."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(bad("model", f"must be {_FORMS}", repr(spec)))
    root, folder = name.partition(".")[0], str(Path.cwd())
    if root not in sys.modules and importlib.util.find_spec(root) is None and folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the user's module exists, and itself lacks something
        fix = "Run from the folder that holds it, or install its package."
        raise ImportError(bad("model", "must name a module that can be imported", repr(name), fix)) from error
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(_users_error(spec, error)) from error
