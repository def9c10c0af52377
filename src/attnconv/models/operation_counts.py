"""How many parameters a model has and how many operations it takes, from its settings alone, exactly.

    the paper's way     2 x multiply-adds of the linear and convolution modules only. The weighted sum (attention x
                        values) and q.k are products of two activations and stay out.
    everything counted  those products as well, for the dense form of attention, in which every query meets every key.

An operation is one addition or one multiplication, for one image. Elementwise work (norms, softmax, GELU) is in
neither. A model is seen as a list of `Part`s; `attnconv.models.flop_counter` counts a built module instead, and the
tests hold the two against each other. Nothing here imports torch, so that the table of presets appears at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from attnconv._util.errors import bad
from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings

if TYPE_CHECKING:
    from torch import nn

ImageShape: TypeAlias = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Part:
    """A piece of a model.

    Attributes:
        parameters: how many numbers it learns.
        linear: multiply-adds of its linear maps, for one image.
        products: multiply-adds of its products between activations, for one image.
    """

    parameters: int
    linear: int = 0
    products: int = 0


def parameters(model: "ModelSettings | str | nn.Module") -> int:
    """Number of parameters of settings, of a preset, or of a module.

    Example:
        >>> parameters("quadratic")
        12086844
    """
    if isinstance(model, AttentionSettings | ResNetSettings | str):
        settings = _settings(model)
        return sum(part.parameters for part in parts(settings, default_shape(settings)))
    return sum(parameter.numel() for parameter in model.parameters())


def flops_paper(model: "ModelSettings | str | nn.Module", image_shape: ImageShape | None = None) -> int:
    """Operations for one image, counted in the paper's way.

    Args:
        model: settings, a preset's name, or a module.
        image_shape: (channels, height, width); None for the size in the settings. A module needs it.

    Raises:
        ValueError: if the model cannot take such images, or a module comes without their shape.

    Example:
        >>> flops_paper("quadratic")
        6175956800
    """
    if isinstance(model, AttentionSettings | ResNetSettings | str):
        return 2 * sum(part.linear for part in _parts(model, image_shape))
    from attnconv.models.flop_counter import measure_flops

    return measure_flops(model, _required(image_shape)).paper


def flops_all(model: "ModelSettings | str | nn.Module", image_shape: ImageShape | None = None) -> int:
    """Operations for one image with everything counted, attention in its dense form.

    Args:
        model: settings, a preset's name, or a module.
        image_shape: (channels, height, width); None for the size in the settings. A module needs it.

    Raises:
        ValueError: if the model cannot take such images, or a module comes without their shape.

    Example:
        >>> flops_all("quadratic")
        9007112000
    """
    if isinstance(model, AttentionSettings | ResNetSettings | str):
        return 2 * sum(part.linear + part.products for part in _parts(model, image_shape))
    from attnconv.models.flop_counter import measure_flops

    return measure_flops(model, _required(image_shape)).everything


def default_shape(settings: ModelSettings) -> ImageShape:
    """(channels, height, width) of the images that the settings are made for."""
    return settings.image_channels, settings.image_size, settings.image_size


def parts(settings: ModelSettings, image_shape: ImageShape) -> Iterator[Part]:
    """The pieces of a model, in order, each with its counts."""
    if isinstance(settings, AttentionSettings):
        return _classifier_parts(settings, image_shape)
    return _resnet_parts(settings, image_shape)


def _settings(model: ModelSettings | str) -> ModelSettings:
    return preset_settings(model) if isinstance(model, str) else model


def _parts(model: ModelSettings | str, image_shape: ImageShape | None) -> Iterator[Part]:
    settings = _settings(model)
    shape = default_shape(settings) if image_shape is None else image_shape
    multiple = settings.downsampling if isinstance(settings, AttentionSettings) else 1
    channels, *sides = shape
    if channels != settings.image_channels or any(side < 1 or side % multiple for side in sides):
        sizes = f"height and width at least 1 and divisible by {multiple}"
        raise ValueError(bad("image_shape", f"must be ({settings.image_channels}, height, width), {sizes}", shape))
    return parts(settings, shape)


def _required(image_shape: ImageShape | None) -> ImageShape:
    if image_shape is None:
        fix = "Pass (channels, height, width)."
        raise ValueError(bad("image_shape", "must be given for a module, which does not know its images", None, fix))
    return image_shape


def _linear(inputs: int, outputs: int, times: int, *, bias: bool = True) -> Part:
    """A linear map that is applied to `times` vectors."""
    return Part(inputs * outputs + outputs * bias, times * inputs * outputs)


def _classifier_parts(settings: AttentionSettings, image_shape: ImageShape) -> Iterator[Part]:
    channels, height, width = image_shape
    rows, columns = height // settings.downsampling, width // settings.downsampling
    positions, hidden = rows * columns, settings.width
    norm = Part(2 * hidden)
    yield _linear(channels * settings.downsampling**2, hidden, positions)
    for heads in settings.heads_per_layer:
        yield _encoding_part(settings, heads, rows, columns)
        yield from _attention_parts(settings, heads, positions)
        yield _linear(hidden, hidden, positions)
        yield norm
        yield _linear(hidden, settings.mlp_width, positions)
        yield _linear(settings.mlp_width, hidden, positions)
        yield norm
    if settings.norm == "pre":
        yield norm
    yield _linear(hidden, settings.classes, 1)


def _attention_parts(settings: AttentionSettings, heads: int, positions: int) -> Iterator[Part]:
    """Values, their weighted sums, and the output: equation (11), merged or factored."""
    hidden = settings.width
    if settings.head_channels is None:
        yield Part(0, products=heads * positions**2 * hidden)
        yield _linear(heads * hidden, hidden, positions)
    else:
        yield _linear(hidden, heads * settings.head_channels, positions, bias=False)
        yield Part(0, products=heads * positions**2 * settings.head_channels)
        yield _linear(heads * settings.head_channels, hidden, positions)


def _encoding_part(settings: AttentionSettings, heads: int, rows: int, columns: int) -> Part:
    """Parameters and linear maps of an encoding, and its products q.k and q.r.

    Scores that no image enters are computed once for all images and count as nothing, except in the learned encoding:
    the authors' code applies its two linear maps to every pair of a query's and a key's row, and of their columns.
    """
    positions, width = rows * columns, settings.width
    table = 2 * settings.max_shift + 1
    key = width if settings.key_channels is None else settings.key_channels
    projection = width * heads * key  # one linear map to queries or keys
    content = heads * positions**2 * key  # q.k
    match settings.encoding:
        case "quadratic":
            return Part(heads * 3)
        case "quadratic-generalized":
            return Part(heads * 6)
        case "learned":
            return Part(2 * table * width + 2 * width * heads, linear=(rows**2 + columns**2) * width * heads)
        case "learned-content":
            learned = 2 * (projection + heads * key) + 2 * table * (key // 2)
            relative = heads * positions * (rows + columns) * (key // 2)  # q.r: half of q meets each table
            return Part(learned, linear=2 * positions * projection, products=content + relative)
        case "sinusoidal":
            # Equation (8): W^_key meets the query once, and the product meets the sinusoids of each row and column
            # shift. The term without content does the same with v, for every pair of rows and of columns.
            relative = heads * positions * (rows + columns) * width + positions * projection
            without_content = heads * (rows**2 + columns**2) * width + projection
            learned = 3 * projection + 2 * heads * key
            return Part(learned, linear=2 * positions * projection, products=content + relative + without_content)
        case "absolute-sinusoidal":
            return Part(2 * projection, linear=2 * positions * projection, products=content)
        case "absolute-learned":
            table_of_positions = width * (settings.image_size // settings.downsampling) ** 2
            return Part(2 * projection + table_of_positions, linear=2 * positions * projection, products=content)


def _resnet_parts(settings: ResNetSettings, image_shape: ImageShape) -> Iterator[Part]:
    channels, height, width = image_shape
    before = settings.widths[0]
    yield from _convolution(channels, before, 3, height * width)
    for stage, (after, blocks) in enumerate(zip(settings.widths, settings.blocks, strict=True)):
        for block in range(blocks):
            halves = stage > 0 and block == 0
            if halves:
                height, width = -(-height // 2), -(-width // 2)
            yield from _convolution(before, after, 3, height * width)
            yield from _convolution(after, after, 3, height * width)
            if halves or before != after:
                yield from _convolution(before, after, 1, height * width)
            before = after
    yield _linear(before, settings.classes, 1)


def _convolution(inputs: int, outputs: int, side: int, positions: int) -> Iterator[Part]:
    """A square convolution without bias and the batch norm behind it."""
    yield _linear(inputs * side**2, outputs, positions, bias=False)
    yield Part(2 * outputs)
