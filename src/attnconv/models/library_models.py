"""Models of timm, torchvision and transformers, as functions of images to logits."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad, did_you_mean
from attnconv._util.exports import missing
from attnconv.models.checkpoint import About

INTERPOLATE = "interpolate_pos_encoding"  # an argument of transformers' models

Sizes: TypeAlias = tuple[int, int] | None
Found: TypeAlias = tuple[nn.Module, About]


def library_model(library: str, name: str, *, pretrained: bool = False, size: Sizes = None) -> Found:
    """Build a model of a library, with its classes and normalisation; arguments and errors as in `attnconv.load`."""
    return LIBRARIES[library](name, pretrained, size)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise (missing(error) or error) from error
    except RuntimeError as error:  # torchvision, which timm needs, was built for another torch
        fix = "Install the torch and the torchvision that were released together."
        raise ImportError(bad(package, "must be importable", str(error), fix)) from error


def _require_known(library: str, name: str, known: list[str]) -> None:
    if name.partition(".")[0] not in known:  # timm names weights after a dot
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
        model = timm.create_model(name, pretrained=pretrained)  # it accepts images of any size
    except (AssertionError, RuntimeError, ValueError) as error:
        if size is None:
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        requirement = f"must be one that timm can build {name} for"
        raise ValueError(bad("size", requirement, f"{size[0]} x {size[1]}", f"timm says: {reason}.")) from error
    values = model.pretrained_cfg
    return model, _about((), values.get("mean"), values.get("std"))


def _of_torchvision(name: str, pretrained: bool, _size: Sizes) -> Found:
    models = _import("torchvision").models
    _require_known("torchvision", name, models.list_models())
    if not pretrained:
        return models.get_model(name, weights=None), _about()
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
            # Only safetensors, because the hub's other format is a pickle; and no code from the hub.
            network = factory.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
            labels = network.config.id2label
            about = _about([str(labels[index]) for index in sorted(labels)], *_normalisation_on_hub(transformers, name))
        elif name in transformers.CONFIG_MAPPING:
            network = factory.from_config(configs.for_model(name))  # the type's default sizes, without the network
        else:
            network = factory.from_config(configs.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        requirement = "must be a type of image classifier, a name on the hub that can be reached, or a folder"
        raise ValueError(bad("model", requirement, f"hf:{name}", f"transformers says: {reason}.")) from error
    own = getattr(network.config, "image_size", None)
    own = (own, own) if isinstance(own, int) else own and tuple(own)
    interpolate = size not in (None, own) and INTERPOLATE in inspect.signature(network.forward).parameters
    return Logits(network, interpolate=interpolate), about


def _normalisation_on_hub(transformers: Any, name: str) -> tuple[Any, Any]:
    """Mean and deviation of each channel from the model's preprocessing, if it has any."""
    try:
        values, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return (), ()
    return values.get("image_mean"), values.get("image_std")


def _about(*values: Any) -> About:
    """Return tuples of what a library knows about the classes, the mean and the deviation."""
    return About(*(tuple(value or ()) for value in values))


LIBRARIES: Mapping[str, Callable[[str, bool, Sizes], Found]] = {
    "timm": _of_timm,
    "torchvision": _of_torchvision,
    "hf": _of_transformers,
}


@final
class Logits(nn.Module):
    """A model of transformers as images to logits; it can interpolate its positions to the size of the images."""

    def __init__(self, network: nn.Module, *, interpolate: bool = False) -> None:
        super().__init__()
        self.network, self.interpolate = network, interpolate

    def forward(self, images: Float[Tensor, "b c height width"], **options: object) -> Float[Tensor, "b classes"]:
        """Logits of normalised images; `options` are further arguments of the model's own forward pass."""
        if self.interpolate:
            options = {INTERPOLATE: True, **options}
        logits: Tensor = self.network(pixel_values=images, **options).logits
        return logits
