"""Loader for presets, runs, checkpoints and models from other libraries, used by all functions and commands."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad, did_you_mean
from attnconv._util.exports import missing
from attnconv._util.settings import read
from attnconv.convert import plan_shifts, recast
from attnconv.models.checkpoint import PICKLE_SUFFIXES, RECAST, About, WeightsFile, load_tensors, read_weights
from attnconv.models.classifiers import build
from attnconv.models.hub_download import download
from attnconv.models.presets import PRESETS, preset_settings
from attnconv.models.settings import ModelSettings

Sizes: TypeAlias = tuple[int, int] | None
Found: TypeAlias = tuple[nn.Module, About]

RUN_WEIGHTS = (
    "checkpoints/best.safetensors",
    "checkpoints/last.safetensors",
    "checkpoints/start.safetensors",
    "weights.safetensors",  # the only weights of a published run
)
"""Weights files of a run folder, in order of preference."""
_FORMS = (
    "a preset, a run folder, a checkpoint, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or "
    "package.module:function"
)
_INTERPOLATE = "interpolate_pos_encoding"  # an argument of transformers' models


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its settings, class names and normalisation.

    Attributes:
        model: Model in evaluation mode, on the CPU; maps normalised images (b, c, height, width) to logits.
        settings: Settings of a preset or checkpoint; None for other models.
        classes: Class names in the order of the logits; empty if unknown.
        mean: Mean of each image channel, for pixels in [0, 1]; empty if unknown.
        std: Standard deviation of each image channel, for pixels in [0, 1]; empty if unknown.
        source: Description of the model's origin, for reports. For a model from the hub, it is
            `hub:OWNER/NAME@COMMIT`, with which `load` returns the same model again.
        random: Whether the parameters are initial random values; False if this is unknown.
    """

    model: nn.Module
    settings: ModelSettings | None = None
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    source: str = ""
    random: bool = False


def load(
    spec: str | Path, *, pretrained: bool = False, size: tuple[int, int] | None = None, **changes: Any
) -> LoadedModel:
    """Load or build the model that `spec` names.

        quadratic                     a preset, with random initial parameters
        runs/2026-11-21-quadratic     a run folder: its best checkpoint, else the last, the initial one, or
                                      `weights.safetensors`
        weights.safetensors           a checkpoint, or a network written by `attnconv recast`
        hub:OWNER/NAME                such a file, `weights.safetensors`, of a repository on the Hugging Face hub
        hub:OWNER/NAME@REVISION       the same for a branch, a tag or a commit
        timm:vit_tiny_patch16_224     a timm model
        torchvision:resnet18          a torchvision model
        hf:vit                        a transformers model: a model type, a name on the Hugging Face hub, or a folder
        package.module:function       the return value of a function, which is called without arguments

    Random parameters are sampled with torch's global generator; reading weights from a file leaves its state unchanged.

    Args:
        spec: Name of the model in one of the forms above. A `Path` is always a run folder or a checkpoint. Presets take
            precedence over folders of the same name; write `./quadratic` for the folder.
        pretrained: Download pretrained weights for timm, torchvision and transformers models.
        size: Image size (height, width) in pixels for timm and transformers models with a fixed image size, whose
            trained position embeddings are then interpolated. None uses the model's own size.
        **changes: Settings that override those of a preset, such as `classes=100` (fields of `AttentionSettings`,
            `StagedSettings` or `ResNetSettings`).

    Raises:
        ValueError: If the name is unknown or has none of these forms, `pretrained` is True for a model of another kind,
            the checkpoint is invalid (see `read_checkpoint`) or differs from the hub's checksum, timm cannot build the
            model for `size`, or the function raises an error.
        FileNotFoundError: If the folder or file does not exist, or a run folder has no weights yet.
        OSError: If the hub has no such weights, or it cannot be reached and they are not in its cache.
        ImportError: If the library that provides the model is not installed, or the module cannot be found.
        TypeError: If `spec` is neither a string nor a path, or the function does not return a `torch.nn.Module`.

    Example:
        >>> load("quadratic-digits").source
        'preset quadratic-digits, fresh parameters'
    """
    if not isinstance(spec, str | Path):
        raise TypeError(bad("spec", "must be a string or a path", repr(spec)))
    if pretrained and str(spec).partition(":")[0] not in LIBRARIES:
        fix = f"For the pretrained model of this name, pass torchvision:{spec}." if spec == "resnet18" else ""
        requirement = f"must be False unless the model is from {', '.join(LIBRARIES)}"
        raise ValueError(bad("pretrained", requirement, f"True with {str(spec)!r}", fix))
    if isinstance(spec, str) and spec in PRESETS:
        settings = preset_settings(spec, **changes)
        return LoadedModel(build(settings).eval(), settings, source=f"preset {spec}, fresh parameters", random=True)
    if changes:
        name, value = next(iter(changes.items()))
        raise ValueError(bad(name, "must be omitted unless the model is a preset", f"{value!r} with {str(spec)!r}"))
    if isinstance(spec, Path):
        return _load_path(spec)
    library, colon, name = spec.partition(":")
    if colon and library == "hub":
        file, source = download(name)
        return replace(_load_path(file), source=source)
    if colon and library in LIBRARIES:
        model, about = LIBRARIES[library](name, pretrained, size)
        state = "pretrained" if pretrained else "fresh parameters"
        return LoadedModel(model.eval(), None, *about, f"{spec}, {state}", random=not pretrained)
    if Path(spec).exists():
        return _load_path(Path(spec))
    if "/" in spec or os.sep in spec or spec.endswith((".safetensors", *PICKLE_SUFFIXES)):
        raise FileNotFoundError(bad("model", "must be an existing run folder or checkpoint", f"nothing at {spec}"))
    if colon:
        return _load_function(library, name)
    fix = did_you_mean(spec, PRESETS) or "`attnconv models` lists the presets."
    fix += "" if "-" in spec else f" For the timm model of this name, pass timm:{spec}."  # no name in timm has a hyphen
    raise ValueError(bad("model", f"must be {_FORMS}", repr(spec), fix))


def _load_path(path: Path) -> LoadedModel:
    file = read_weights(checkpoint_file(path))
    if file.metadata.get("format") == RECAST:
        return _rebuild(file)
    found = file.checkpoint()
    model = _fresh(lambda: build(found.settings), file)
    load_tensors(model, file.tensors, origin=file.source)
    return LoadedModel(model.eval(), found.settings, found.classes, found.mean, found.std, f"checkpoint {file.source}")


def _fresh(make: Callable[[], nn.Module], file: WeightsFile) -> nn.Module:
    """Build a model in the dtype of a file's tensors, without changing the state of torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        model = make()
    dtypes = {tensor.dtype for tensor in file.tensors.values() if tensor.is_floating_point()}
    return model.to(dtypes.pop()) if len(dtypes) == 1 else model


def checkpoint_file(path: Path) -> Path:
    """Return the checkpoint at a path: the file itself, or the first of `RUN_WEIGHTS` in a folder."""
    if not path.is_dir():
        return path
    for name in RUN_WEIGHTS:
        if (path / name).is_file():
            return path / name
    requirement = f"must be a run folder with {' or '.join(RUN_WEIGHTS)}"
    fix = "A run writes its first checkpoint at the end of its first epoch."
    raise FileNotFoundError(bad("model", requirement, path, fix))


def _rebuild(file: WeightsFile) -> LoadedModel:
    """Rebuild a recast network: build the original, recast it and load the weights; never call a user's function."""
    source, origin = file.value("model", dict), file.source
    alpha, only = file.value("alpha", float, int, type(None)), file.value("only", list, type(None))
    spec, given, settings = source.get("spec"), source.get("settings"), None
    library, _, name = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if isinstance(given, dict):
        settings = read(ModelSettings, given, name="model", origin=origin)
    elif library not in LIBRARIES:
        fix = f"Load it with: model = attnconv.recast(YOUR_MODEL, alpha={alpha}, only={only}); "
        fix += f"model.load_state_dict(safetensors.torch.load_file({Path(origin).name!r}))."
        requirement = f"must name a model from {', '.join(LIBRARIES)}, since functions are not called"
        raise ValueError(bad("checkpoint", requirement, repr(spec), fix, origin=origin))
    about = file.about(settings)
    base = _fresh(lambda: build(settings) if settings else LIBRARIES[library](name, False, None)[0], file)
    model = recast(base, alpha=alpha, only=only)
    load_tensors(model, file.tensors, origin=origin)
    plan_shifts(model)
    return LoadedModel(model.eval(), settings, *about, f"recast network {origin}")


def _load_function(module_name: str, function_name: str) -> LoadedModel:
    """Call a user's function. Modules in the working directory can be imported, as with `python -m`."""
    spec = f"{module_name}:{function_name}"
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(bad("model", f"must be {_FORMS}", repr(spec)))
    root, folder = module_name.partition(".")[0], str(Path.cwd())
    if root not in sys.modules and importlib.util.find_spec(root) is None and folder not in sys.path:
        sys.path.append(folder)
    module = function = model = None
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        model = function() if callable(function) else None
    except ModuleNotFoundError as error:
        if module is not None or error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module exists, but one of its imports does not
        fix = "Run from the folder that contains it, or install its package."
        raise ImportError(bad("model", "must name a module that can be imported", repr(module_name), fix)) from error
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(_users_error(spec, error, module)) from error
    if not callable(function):
        fix = did_you_mean(function_name, dir(module))
        raise ValueError(bad("model", f"must name a function of {module_name}", repr(function_name), fix))
    if not isinstance(model, nn.Module):
        raise TypeError(bad("model", f"{spec} must return a torch.nn.Module", type(model).__name__))
    return LoadedModel(model.eval(), source=f"function {spec}")


def _users_error(spec: str, error: Exception, module: Any) -> str:
    """Format an error raised by a user's function, with the line that raised it and the user's line that called it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    places = dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in (frames[-1:] + theirs[-1:]))
    fix = f"It was raised at {', called from '.join(places)}: {(theirs or frames)[-1].line}"
    got = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
    return bad("model", f"{spec} must run without errors", got, fix)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise (missing(error) or error) from error
    except RuntimeError as error:  # torchvision, which timm imports, was built for a different version of torch
        fix = "Install matching versions of torch and torchvision."
        raise ImportError(bad(package, "must be importable", str(error), fix)) from error


def _require_known(library: str, name: str, known: list[str]) -> None:
    if name.partition(".")[0] not in known:  # in timm, the name of the weights follows a dot
        raise ValueError(bad("model", f"must be the name of a {library} model", repr(name), did_you_mean(name, known)))


def _of_timm(name: str, pretrained: bool, size: Sizes) -> Found:
    timm = _import("timm")
    _require_known("timm", name, timm.list_models())
    options = {} if size is None else {"img_size": size}
    try:
        model = timm.create_model(name, pretrained=pretrained, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = timm.create_model(name, pretrained=pretrained)  # this model accepts images of any size
    except (AssertionError, RuntimeError, ValueError) as error:
        if size is None:
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        requirement = f"must be supported by timm for {name}"
        raise ValueError(bad("size", requirement, f"{size[0]} x {size[1]}", f"Error from timm: {reason}.")) from error
    values = model.pretrained_cfg
    subset = timm.data.infer_imagenet_subset(model) if pretrained else None
    classes = timm.data.ImageNetInfo(subset).label_descriptions() if subset else ()
    return model, _about(classes, values.get("mean"), values.get("std"))


def _of_torchvision(name: str, pretrained: bool, _size: Sizes) -> Found:
    models = _import("torchvision").models
    _require_known("torchvision", name, models.list_models())
    if not pretrained:
        parameters = inspect.signature(models.get_model_builder(name)).parameters
        backbone = {"weights_backbone": None} if "weights_backbone" in parameters else {}  # downloaded by default
        return models.get_model(name, weights=None, **backbone), _about()
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    mean, std = getattr(transform, "mean", ()), getattr(transform, "std", ())
    return models.get_model(name, weights=weights), _about(weights.meta.get("categories"), mean, std)


def _of_transformers(name: str, pretrained: bool, size: Sizes) -> Found:
    transformers = _import("transformers")
    factory, configs = transformers.AutoModelForImageClassification, transformers.AutoConfig
    about = _about()
    try:
        if pretrained:
            # Only safetensors, since the hub's other format is a pickle; and no remote code.
            network = factory.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
            labels, preprocessing = network.config.id2label, {}
            with suppress(OSError):  # the repository may have no preprocessing
                preprocessing, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
            classes = [str(labels[index]) for index in sorted(labels)]
            about = _about(classes, preprocessing.get("image_mean"), preprocessing.get("image_std"))
        elif name in transformers.CONFIG_MAPPING:
            network = factory.from_config(configs.for_model(name))  # default sizes of the type, without download
        else:
            network = factory.from_config(configs.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        requirement = "must be the model type of an image classifier, an available model on the hub, or a folder"
        raise ValueError(bad("model", requirement, f"hf:{name}", f"Error from transformers: {reason}.")) from error
    own = getattr(network.config, "image_size", None)
    own = (own, own) if isinstance(own, int) else own and tuple(own)
    interpolate = size not in (None, own) and _INTERPOLATE in inspect.signature(network.forward).parameters
    return Logits(network, interpolate=interpolate), about


def _about(*values: Any) -> About:
    """Return the class names, mean and standard deviation that a library provides."""
    return About(*(tuple(value or ()) for value in values))


LIBRARIES: Mapping[str, Callable[[str, bool, Sizes], Found]] = {
    "timm": _of_timm,
    "torchvision": _of_torchvision,
    "hf": _of_transformers,
}


@final
class Logits(nn.Module):
    """Wrapper of a transformers model that maps images to logits, and can interpolate position embeddings."""

    def __init__(self, network: nn.Module, *, interpolate: bool = False) -> None:
        super().__init__()
        self.network, self.interpolate = network, interpolate

    def forward(self, images: Float[Tensor, "b c height width"], **options: object) -> Float[Tensor, "b classes"]:
        """Return the logits of normalised images; `options` are passed to the model's forward pass."""
        if self.interpolate:
            options = {_INTERPOLATE: True, **options}
        logits: Tensor = self.network(pixel_values=images, **options).logits
        return logits
