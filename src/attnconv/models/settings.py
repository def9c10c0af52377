"""What a model is made of: frozen dataclasses of plain values, free of torch.

The same values are typed at the command line, written to `settings.json` and into every checkpoint, and read back
from there. A mistake in them is a sentence in the user's spelling of the flag; `problems` collects all of them, so
that they can be printed together before any work begins.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real, is_whole
from attnconv.encodings.registry_names import ENCODING_NAMES, EncodingName

LARGEST_COUNT = 65_536
"""The most channels, heads, classes, ...: no model of more can be meant, and building it would fill the memory."""
LARGEST_IMAGE = 4_096
"""Largest ``image_size``, in pixels."""
MOST_LAYERS = 1_000
MOST_PARAMETERS = 1_000_000_000

NormName = Literal["post", "pre"]
CentresName = Literal["normal", "near"]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The paper's classifier: space to depth, linear embedding, attention blocks, mean over positions, linear head.

    Attributes:
        encoding: how a query likes a shift or a position, by its name in the library.
        layers: number of blocks, at least 1.
        heads: heads of every layer, or one number for each layer (as pruning leaves them), each at least 1.
        width: channels of the hidden state.
        mlp_width: channels between the two linear maps of each block's MLP.
        downsampling: side of the square of pixels that becomes one position; it divides the image's sides.
        dropout: rate on each residual branch, from 0 up to but not including 1.
        attention_dropout: rate on the attention probabilities. Above 0 the layers run on dense matrices.
        norm: layer normalisation after each residual sum ("post", the paper) or before each branch ("pre").
        norm_epsilon: the constant that layer normalisation adds to the variance.
        head_channels: channels of each head's value (factored W_val W_out); None merges both into one matrix.
        key_channels: channels of each head's query and key, where an encoding has them; None takes the width.
        max_shift: largest shift in the tables of learned relative encodings, in positions.
        centres: where heads of quadratic encodings begin: drawn around the own position (normal, the paper),
            or one at each of the nearest shifts, with twice the spread (near): nine heads are a 3 x 3 kernel.
        centre_std: deviation of the centres of quadratic encodings when training begins, in positions.
        spread_std: deviation of their spreads around 1 when training begins.
        image_size: side of the images the model is made for, in pixels. It serves images of other sizes as well.
        image_channels: channels of the images.
        classes: number of classes.
    """

    encoding: EncodingName = "quadratic"
    layers: int = 6
    heads: int | tuple[int, ...] = 9
    width: int = 400
    mlp_width: int = 512
    downsampling: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.0
    norm: NormName = "post"
    norm_epsilon: float = 1e-12
    head_channels: int | None = None
    key_channels: int | None = None
    max_shift: int = 15
    centres: CentresName = "normal"
    centre_std: float = 2.0
    spread_std: float = 0.01
    image_size: int = 32
    image_channels: int = 3
    classes: int = 10

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Number of heads of each layer, first to last."""
        return (self.heads,) * self.layers if isinstance(self.heads, int) else self.heads


@dataclass(frozen=True, kw_only=True)
class ResNetSettings:
    """The residual network for small images: a 3x3 stem, stages of basic blocks, mean over positions, linear head.

    Attributes:
        widths: channels of each stage; every stage after the first halves the image.
        blocks: number of basic blocks in each stage, one number for each width.
        image_size: side of the images the model is made for, in pixels. It serves images of other sizes as well.
        image_channels: channels of the images.
        classes: number of classes.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    image_size: int = 32
    image_channels: int = 3
    classes: int = 10


ModelSettings = AttentionSettings | ResNetSettings

KINDS: Mapping[str, type[AttentionSettings] | type[ResNetSettings]] = {
    "attention": AttentionSettings,
    "resnet": ResNetSettings,
}


def to_dict(settings: ModelSettings) -> dict[str, Any]:
    """The settings as plain JSON values, tagged with their kind.

    Example:
        >>> to_dict(ResNetSettings(widths=(8, 16), blocks=(1, 1)))["widths"]
        [8, 16]
    """
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    return {"kind": _kind_of(settings), **values}


def from_dict(values: Mapping[str, Any], *, origin: str = "") -> ModelSettings:
    """Settings from what `to_dict` wrote. A missing name takes its default; an unknown one is refused.

    Args:
        values: plain JSON values with the tag `kind`.
        origin: where they came from, for the message (`from runs/a/settings.json`).

    Raises:
        ValueError: if the kind or a name is unknown, or a value is not legal; all wrong values are named together.

    Example:
        >>> from_dict({"kind": "resnet", "widths": [8, 16], "blocks": [1, 1]}).widths
        (8, 16)
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(bad("model.kind", f"must be one of {', '.join(KINDS)}", repr(kind), origin=origin))
    settings_class = KINDS[kind]
    defaults = {field.name: field.default for field in fields(settings_class)}
    unknown = [name for name in values if name != "kind" and name not in defaults]
    if unknown:
        listed = ", ".join(repr(name) for name in unknown)
        fix = "Remove it, or read it with the version of attnconv that wrote it."
        raise ValueError(bad(f"model ({kind})", f"must only name {', '.join(defaults)}", listed, fix, origin=origin))
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name != "kind"
    }
    wrong = _find_problems(kind, {**defaults, **plain}, prefix="model", origin=origin)
    if wrong:
        raise ValueError("\n".join(wrong))
    return settings_class(**plain)


def problems(settings: ModelSettings, *, prefix: str = "--model", origin: str = "") -> list[str]:
    """Everything that is wrong with the settings, one sentence each, in the spelling of the command line's flags.

    Args:
        settings: the settings.
        prefix: what stands before the dot of each name.
        origin: where the values came from, for the messages.

    Example:
        >>> problems(AttentionSettings(heads=0))
        ['--model.heads: must be a whole number of at least 1, got 0.']
    """
    return _find_problems(_kind_of(settings), asdict(settings), prefix=prefix, origin=origin)


def _kind_of(settings: ModelSettings) -> str:
    return next(name for name, settings_class in KINDS.items() if type(settings) is settings_class)


def _find_problems(kind: str, values: Mapping[str, Any], *, prefix: str, origin: str) -> list[str]:
    found = _Problems(values, prefix, origin)
    if kind == "attention":
        _attention_problems(values, found)
    else:
        _resnet_problems(values, found)
    if not found.messages:
        _size_problems(KINDS[kind](**values), found)
    return found.messages


class _Problems:
    """Collects the messages about one object's values, which may have any type, as when they come from a file."""

    def __init__(self, values: Mapping[str, Any], prefix: str, origin: str) -> None:
        self.messages: list[str] = []
        self._wrong: set[str] = set()
        self._values = values
        self._prefix = prefix
        self._origin = origin

    def fine(self, *names: str) -> bool:
        """Whether nothing was found wrong with these values so far."""
        return self._wrong.isdisjoint(names)

    def add(self, name: str, requirement: str, fix: str = "") -> None:
        flag = f"{self._prefix}.{name.replace('_', '-') if self._prefix.startswith('-') else name}"
        self.messages.append(bad(flag, requirement, repr(self._values[name]), fix, origin=self._origin))
        self._wrong.add(name)

    def whole(self, name: str, minimum: int, most: int = LARGEST_COUNT, *, optional: bool = False) -> None:
        value = self._values[name]
        if optional and value is None:
            return
        if not is_whole(value, minimum):
            self.add(name, f"must be a whole number of at least {minimum}" + (" or None" if optional else ""))
        elif value > most:
            self.add(name, f"must be at most {most}")

    def wholes(self, name: str, minimum: int) -> None:
        value = self._values[name]
        if not (isinstance(value, tuple) and value and all(is_whole(item, minimum) for item in value)):
            self.add(name, f"must be one or more whole numbers of at least {minimum}")
        elif max(value) > LARGEST_COUNT:
            self.add(name, f"must be at most {LARGEST_COUNT}")

    def real(self, name: str, low: float, high: float) -> None:
        value = self._values[name]
        if not (is_real(value) and low <= value < high):
            upper = f" and below {high:g}" if math.isfinite(high) else " and finite"
            self.add(name, f"must be a number of at least {low:g}{upper}")

    def choice(self, name: str, choices: tuple[str, ...]) -> None:
        if self._values[name] not in choices:
            self.add(name, f"must be one of {', '.join(choices)}")


def _attention_problems(values: Mapping[str, Any], found: _Problems) -> None:
    found.choice("encoding", ENCODING_NAMES)
    found.choice("norm", get_args(NormName))
    found.choice("centres", get_args(CentresName))
    for name in ("width", "mlp_width", "downsampling", "image_channels", "classes"):
        found.whole(name, 1)
    found.whole("layers", 1, MOST_LAYERS)
    found.whole("image_size", 1, LARGEST_IMAGE)
    found.whole("max_shift", 0)
    for name in ("head_channels", "key_channels"):
        found.whole(name, 1, optional=True)
    for name in ("dropout", "attention_dropout"):
        found.real(name, 0.0, 1.0)
    for name in ("norm_epsilon", "centre_std", "spread_std"):
        found.real(name, 0.0, math.inf)
    _head_problems(values, found)
    placed = found.fine("encoding", "centres") and values["centres"] == "near"
    if placed and not values["encoding"].startswith("quadratic"):
        found.add("centres", f"must be normal for encoding {values['encoding']}, whose heads have no centres")
    if found.fine("image_size", "downsampling") and values["image_size"] % values["downsampling"]:
        found.add("downsampling", f"must divide the image size {values['image_size']}")
    if found.fine("encoding", "width", "key_channels"):
        _vector_problems(values, found)


def _head_problems(values: Mapping[str, Any], found: _Problems) -> None:
    if not isinstance(values["heads"], tuple):
        found.whole("heads", 1)
        return
    found.wholes("heads", 1)
    if found.fine("heads", "layers") and len(values["heads"]) != values["layers"]:
        found.add("heads", f"must be one number, or one for each of the {values['layers']} layers")


def _vector_problems(values: Mapping[str, Any], found: _Problems) -> None:
    """Each axis takes an equal part of a query's vector, or of a position's, which also needs sines and cosines."""
    encoding, keys = values["encoding"], values["key_channels"]
    if encoding == "absolute-sinusoidal" and values["width"] % 4:
        found.add("width", f"must be a multiple of 4 for encoding {encoding}")
    if encoding == "learned-content" and keys is not None and keys % 2:
        found.add("key_channels", f"must be even for encoding {encoding}")


def _size_problems(settings: ModelSettings, found: _Problems) -> None:
    from attnconv.models.operation_counts import parameters  # which imports this module

    if (count := parameters(settings)) > MOST_PARAMETERS:
        fix = f"It has {count:,}."
        widths = "width" if isinstance(settings, AttentionSettings) else "widths"
        found.add(widths, f"must be such that the model has at most {MOST_PARAMETERS:,} parameters", fix)


def _resnet_problems(values: Mapping[str, Any], found: _Problems) -> None:
    for name in ("image_channels", "classes"):
        found.whole(name, 1)
    found.whole("image_size", 1, LARGEST_IMAGE)
    for name in ("widths", "blocks"):
        found.wholes(name, 1)
    if found.fine("widths", "blocks") and len(values["blocks"]) != len(values["widths"]):
        found.add("blocks", f"must be one number for each of the {len(values['widths'])} widths")
    if found.fine("blocks") and sum(values["blocks"]) > MOST_LAYERS:
        found.add("blocks", f"must be at most {MOST_LAYERS} in all")
