"""One loader of models for the whole project: every command and function that takes a model takes these words.

    quadratic                     a preset's name: fresh parameters
    runs/2026-11-21-quadratic     a run folder: its best checkpoint, else its last,
                                  else the one it begins with
    weights.safetensors           a checkpoint, or a network that `attnconv recast` wrote
    timm:vit_tiny_patch16_224     a model of timm
    torchvision:resnet18          a model of torchvision
    hf:vit                        a model of transformers: a type of model, or a name on the hub, or a folder
    package.module:function       whatever the function, called without arguments, returns

A preset's name means the preset even where a folder has the same name; write `./quadratic` for the folder.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.models.checkpoint import Checkpoint, load_weights, read_checkpoint
from attnconv.models.factory import build
from attnconv.models.presets import PRESETS, preset_settings
from attnconv.models.recast_file import is_recast, read_recast
from attnconv.models.settings import ModelSettings
from attnconv.models.weights_file_checks import PICKLE_SUFFIXES, read_metadata

# Where a run folder keeps its weights, in the order of preference.
_FORMS = "a preset, a run folder, a checkpoint, timm:NAME, hf:NAME, torchvision:NAME or package.module:function"
INTERPOLATE = "interpolate_pos_encoding"  # an argument of transformers' models
RUN_WEIGHTS = ("checkpoints/best.safetensors", "checkpoints/last.safetensors", "checkpoints/start.safetensors")


@dataclass(frozen=True)
class LoadedModel:
    """A model and what is known about it.

    Attributes:
        model: in evaluation mode, on the CPU: normalised images (b, c, height, width) to logits (b, classes).
        settings: of a preset or a checkpoint; None for a model from elsewhere.
        classes: names in the order of the logits; empty where they are not known.
        mean: of each image channel, for images in [0, 1]; empty where it is not known.
        std: deviation of each image channel, likewise.
        source: where the model came from, in words.
    """

    model: nn.Module
    settings: ModelSettings | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str


def load(
    spec: str | Path, *, pretrained: bool = False, size: tuple[int, int] | None = None, **changes: Any
) -> LoadedModel:
    """Load or make the model that the words stand for (see the module's docstring for their forms).

    Args:
        spec: the words; a `Path` is always a run folder or a checkpoint.
        pretrained: fetch trained weights for models of timm, torchvision and the hub, instead of random ones.
        size: Height and width of the images in pixels, for models of timm and transformers that are made for one size:
            timm builds them for this one, and takes trained positions over to it; those of transformers interpolate
            their positions. None for their own. Other models are what they are.
        **changes: of a preset, settings in place of its own, as `classes=100` (the fields of `AttentionSettings` and
            `ResNetSettings`).

    Returns:
        The model in evaluation mode. Fresh parameters are drawn from torch's global generator; reading a checkpoint
        leaves that as it was.

    Raises:
        ValueError: if no preset or library knows the name, or the words have none of the forms, or the checkpoint is
            refused (see `read_checkpoint`), or timm cannot build the model for the size, or
            the user's function or module raises an error (it is named with its line).
        FileNotFoundError: if there is no such folder or file, or a run folder holds no weights yet.
        ImportError: if the library of the model is not installed, or the module cannot be found.
        TypeError: if a function returns something that is not a `torch.nn.Module`.

    Example:
        >>> load("quadratic-digits").source
        'preset quadratic-digits, fresh parameters'
        >>> load("quadratic-small", classes=100).model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 100])
    """
    if isinstance(spec, str) and spec in PRESETS:
        settings = preset_settings(spec, **changes)
        return _loaded(build(settings), f"preset {spec}, fresh parameters", settings=settings)
    if changes:
        name, value = next(iter(changes.items()))
        raise ValueError(bad(name, "is a setting of presets", repr(value), f"{str(spec)!r} is none."))
    if isinstance(spec, Path):
        return _load_path(spec)
    library, colon, name = spec.partition(":")
    if colon and library in _LIBRARIES:
        return _LIBRARIES[library](name, pretrained, size)
    if Path(spec).exists():
        return _load_path(Path(spec))
    if colon and not _looks_like_a_path(spec):
        return _load_function(library, name)
    if _looks_like_a_path(spec):
        raise FileNotFoundError(bad("model", "must be a run folder or a checkpoint", f"nothing at {spec}"))
    near = difflib.get_close_matches(spec, PRESETS, n=3, cutoff=0.5)
    fix = f"Did you mean {' or '.join(near)}?" if near else "`attnconv models` lists the presets."
    raise ValueError(bad("model", f"must be {_FORMS}", repr(spec), fix))


def _looks_like_a_path(spec: str) -> bool:
    return "/" in spec or os.sep in spec or spec.endswith((".safetensors", *PICKLE_SUFFIXES))


def _loaded(
    model: nn.Module,
    source: str,
    *,
    settings: ModelSettings | None = None,
    classes: tuple[str, ...] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> LoadedModel:
    return LoadedModel(model.eval(), settings, classes, mean, std, source)


def _load_path(path: Path) -> LoadedModel:
    path = checkpoint_file(path)
    if is_recast(read_metadata(path)):
        found = read_recast(path, lambda spec: load(spec).model)
        about = {"settings": found.settings, "classes": found.classes, "mean": found.mean, "std": found.std}
        return _loaded(found.model, f"recast network {path}", **about)  # type: ignore[arg-type]
    checkpoint = read_checkpoint(path)
    return _loaded(
        model_of(checkpoint),
        f"checkpoint {path}",
        settings=checkpoint.settings,
        classes=checkpoint.classes,
        mean=checkpoint.mean,
        std=checkpoint.std,
    )


def weights_of_run(folder: Path) -> Path:
    """The checkpoint that stands for a run: the best, else the last, else the weights that it begins with.

    Raises:
        FileNotFoundError: if the folder holds none of them.
    """
    for name in RUN_WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    requirement = f"must be a run folder that holds {' or '.join(RUN_WEIGHTS)}"
    fix = "A run writes its first checkpoint at the end of its first epoch."
    raise FileNotFoundError(bad("model", requirement, folder, fix))


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a path names: itself, or that of a run folder.

    Raises:
        FileNotFoundError: if it is a folder that holds none.
    """
    return weights_of_run(path) if path.is_dir() else path


def model_of(checkpoint: Checkpoint) -> nn.Module:
    """The model of a checkpoint, in the dtype of its weights; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = build(checkpoint.settings)
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    load_weights(model, checkpoint)
    return model


def _load_function(module_name: str, function_name: str) -> LoadedModel:
    spec = f"{module_name}:{function_name}"
    module = _import_module(module_name, spec)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), n=3)
        fix = f"Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(bad("model", f"must name a function of {module_name}", repr(function_name), fix))
    try:
        model = function()
    except Exception as error:
        raise ValueError(_users_error(spec, error, module)) from error
    if not isinstance(model, nn.Module):
        raise TypeError(bad("model", f"{spec} must return a torch.nn.Module", type(model).__name__))
    return _loaded(model, f"function {spec}")


def _users_error(spec: str, error: Exception, module: Any = None) -> str:
    """What a user's own code raised, with the line that did; and theirs, where that is another."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    places = dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in (frames[-1:] + theirs[-1:]))
    fix = f"It was raised at {', called from '.join(places)}: {(theirs or frames)[-1].line}"
    got = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
    return bad("model", f"{spec} must run without an error", got, fix)


def _import_module(name: str, spec: str) -> Any:
    """Import a module that the user named; one in the working folder is found as with `python -m`."""
    root = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(bad("model", f"must be {_FORMS}", repr(spec)))
    folder = str(Path.cwd())
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


def _import_extra(package: str, spec: str) -> Any:
    """Import one of the optional libraries of models."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fix = "Install it with: pip install 'attnconv[models]'."
        raise ImportError(bad("model", f"{spec} needs the package {package}", str(error), fix)) from error
    except RuntimeError as error:  # torchvision, of which timm is made, was built for another torch
        fix = "Install the torch and the torchvision that were released together."
        raise ImportError(bad("model", f"{spec} needs a {package} that can be imported", str(error), fix)) from error


def _load_timm(name: str, pretrained: bool, size: tuple[int, int] | None) -> LoadedModel:
    timm = _import_extra("timm", f"timm:{name}")
    _require_known("timm", name, timm.list_models())
    model = _of_timm(timm, name, pretrained, size)
    values = model.pretrained_cfg
    mean, std = values.get("mean", ()), values.get("std", ())
    return _loaded(model, _named_source("timm", name, pretrained), mean=tuple(mean), std=tuple(std))


def _of_timm(timm: Any, name: str, pretrained: bool, size: tuple[int, int] | None) -> Any:
    """A model of timm, made for a size where its kind is made for one."""
    if size is None:
        return timm.create_model(name, pretrained=pretrained)
    try:
        return timm.create_model(name, pretrained=pretrained, img_size=size)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        requirement = f"must be one that timm can build {name} for"
        raise ValueError(bad("size", requirement, f"{size[0]} x {size[1]}", f"It says: {reason}.")) from error
    return timm.create_model(name, pretrained=pretrained)  # takes images of any size


def _load_torchvision(name: str, pretrained: bool, _size: tuple[int, int] | None) -> LoadedModel:
    torchvision = _import_extra("torchvision", f"torchvision:{name}")
    _require_known("torchvision", name, torchvision.models.list_models())
    if not pretrained:
        return _loaded(torchvision.models.get_model(name, weights=None), _named_source("torchvision", name, False))
    weights = torchvision.models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    return _loaded(
        torchvision.models.get_model(name, weights=weights),
        _named_source("torchvision", name, True),
        classes=tuple(weights.meta.get("categories", ())),
        mean=tuple(getattr(transform, "mean", ())),
        std=tuple(getattr(transform, "std", ())),
    )


def _load_transformers(name: str, pretrained: bool, size: tuple[int, int] | None) -> LoadedModel:
    transformers = _import_extra("transformers", f"hf:{name}")
    factory, configs = transformers.AutoModelForImageClassification, transformers.AutoConfig
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    try:
        if pretrained:
            # Only safetensors, because the hub's other format is a pickle; and no code from the hub.
            network = factory.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
            mean, std = _normalisation_on_hub(transformers, name)
        elif name in transformers.CONFIG_MAPPING:
            network = factory.from_config(configs.for_model(name))  # the type's default sizes, without the network
        else:
            network = factory.from_config(configs.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        requirement = "must be a type of image classifier, a name on the hub that can be reached, or a folder"
        raise ValueError(bad("model", requirement, f"hf:{name}", f"transformers says: {reason}.")) from error
    labels = network.config.id2label if pretrained else {}
    classes = tuple(str(labels[index]) for index in sorted(labels))
    network = Logits(network, interpolate=_interpolates(network, size))
    return _loaded(network, _named_source("hf", name, pretrained), classes=classes, mean=mean, std=std)


def _interpolates(network: Any, size: tuple[int, int] | None) -> bool:
    """Whether a model of transformers is made for another size than that, and interpolates its positions on request."""
    if size is None or INTERPOLATE not in inspect.signature(network.forward).parameters:
        return False
    own = getattr(network.config, "image_size", None)
    return size != ((own, own) if isinstance(own, int) else own and tuple(own))


def _normalisation_on_hub(transformers: Any, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel from the model's preprocessing, if it has any."""
    try:
        values, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return (), ()
    return tuple(values.get("image_mean", ())), tuple(values.get("image_std", ()))


_LIBRARIES = {"timm": _load_timm, "torchvision": _load_torchvision, "hf": _load_transformers}


def _named_source(library: str, name: str, pretrained: bool) -> str:
    return f"{library}:{name}, {'pretrained' if pretrained else 'fresh parameters'}"


def _require_known(library: str, name: str, known: list[str]) -> None:
    if name.partition(".")[0] not in known:  # timm names weights behind a dot
        near = difflib.get_close_matches(name, known, n=3)
        fix = f"Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(bad("model", f"must be the name of a {library} model", repr(name), fix))


@final
class Logits(nn.Module):
    """A model of transformers as images to logits; the model itself is `.network`.

    Args:
        network: The model.
        interpolate: Whether it is asked to interpolate its positions to the size of the images.
    """

    def __init__(self, network: nn.Module, *, interpolate: bool = False) -> None:
        super().__init__()
        self.network, self.interpolate = network, interpolate

    def forward(self, images: Float[Tensor, "b c height width"], **options: object) -> Float[Tensor, "b classes"]:
        """Logits of normalised images.

        Args:
            images: As the model was trained on.
            options: Further arguments of the model's own forward pass, as `interpolate_pos_encoding`.
        """
        if self.interpolate:
            options = {INTERPOLATE: True, **options}
        logits: Tensor = self.network(pixel_values=images, **options).logits
        return logits
