"""Parameters and operations of a model, computed exactly from its settings.

    the paper's way     2 x multiply-adds of only the linear and convolution modules. The weighted sum (attention x
                        values) and q.k are products of two activations and are left out.
    everything          those products as well, for the dense form of attention, in which every query meets every key.

An operation is one addition or one multiplication, for one image. Elementwise work (norms, softmax, GELU) is in
neither. The tests compare both with what torch counts in the built model. Nothing here imports torch, so that the
table of presets appears at once.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from attnconv._util.errors import bad
from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings

ImageShape: TypeAlias = tuple[int, int, int]  # channels, height, width


class Part(NamedTuple):
    """A piece of a model: its parameters, and for one image the multiply-adds of linear maps and of products."""

    parameters: int
    linear: int = 0
    products: int = 0


def parameters(model: ModelSettings | str) -> int:
    """Number of parameters of a model, given by its settings or as a preset's name.

    Example:
        >>> parameters("quadratic")
        12086844
    """
    return sum(part.parameters for part in _parts(model, None))


def flops_paper(model: ModelSettings | str, image_shape: ImageShape | None = None) -> int:
    """Operations for one image, counted in the paper's way.

    Args:
        model: Settings, or a preset's name.
        image_shape: (channels, height, width); None for the size in the settings.

    Raises:
        ValueError: The model does not accept such images.

    Example:
        >>> flops_paper("quadratic")
        6175956800
    """
    return 2 * sum(part.linear for part in _parts(model, image_shape))


def flops_all(model: ModelSettings | str, image_shape: ImageShape | None = None) -> int:
    """Operations for one image, all of them, with attention in its dense form; arguments as in `flops_paper`.

    Example:
        >>> flops_all("quadratic")
        9007112000
    """
    return 2 * sum(part.linear + part.products for part in _parts(model, image_shape))


def _parts(model: ModelSettings | str, image_shape: ImageShape | None) -> Iterator[Part]:
    settings = preset_settings(model) if isinstance(model, str) else model
    shape = image_shape or (settings.image_channels, settings.image_size, settings.image_size)
    multiple = settings.downsampling if isinstance(settings, AttentionSettings) else 1
    if shape[0] != settings.image_channels or any(side < 1 or side % multiple for side in shape[1:]):
        sizes = f"height and width at least 1 and divisible by {multiple}"
        raise ValueError(bad("image_shape", f"must be ({settings.image_channels}, height, width), {sizes}", shape))
    if isinstance(settings, AttentionSettings):
        return _classifier_parts(settings, shape)
    return _resnet_parts(settings, shape)


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
    hidden, channels = settings.width, settings.head_channels
    if channels is not None:
        yield _linear(hidden, heads * channels, positions, bias=False)
    channels = channels or hidden
    yield Part(0, products=heads * positions**2 * channels)
    yield _linear(heads * channels, hidden, positions)


def _encoding_part(settings: AttentionSettings, heads: int, rows: int, columns: int) -> Part:
    """Parameters and linear maps of an encoding, and its products q.k and q.r.

    Scores that do not depend on the image are computed once for all images and count as nothing, except in the learned
    encoding: the authors' code applies its two linear maps to every pair of a query's and a key's row, and of their
    columns.
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
    """A square convolution without bias and its batch norm."""
    yield _linear(inputs * side**2, outputs, positions, bias=False)
    yield Part(2 * outputs)
