"""Parameters and operations of a model, computed exactly from its settings and without torch.

An operation is one addition or multiplication, for one image. The paper counts linear and convolution modules only.
Counting everything adds the products q.k and attention x values of dense attention, but no norms, softmax or GELU.
"""

from collections.abc import Iterator
from typing import NamedTuple

from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings


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
    return sum(part.parameters for part in _parts(model))


def flops_paper(model: ModelSettings | str) -> int:
    """Operations for one image of the settings' size as the paper counts them: linear maps and convolutions only.

    Example:
        >>> flops_paper("quadratic")
        6175956800
    """
    return 2 * sum(part.linear for part in _parts(model))


def flops_all(model: ModelSettings | str) -> int:
    """Operations for one image of the settings' size, including the products of attention in its dense form.

    Example:
        >>> flops_all("quadratic")
        9007112000
    """
    return 2 * sum(part.linear + part.products for part in _parts(model))


def _parts(model: ModelSettings | str) -> Iterator[Part]:
    settings = preset_settings(model) if isinstance(model, str) else model
    return _classifier_parts(settings) if isinstance(settings, AttentionSettings) else _resnet_parts(settings)


def _linear(inputs: int, outputs: int, times: int, *, bias: bool = True) -> Part:
    """A linear map that is applied to `times` vectors."""
    return Part(inputs * outputs + outputs * bias, times * inputs * outputs)


def _classifier_parts(settings: AttentionSettings) -> Iterator[Part]:
    side, hidden = settings.image_size // settings.downsampling, settings.width
    positions, norm = side**2, Part(2 * hidden)
    yield _linear(settings.image_channels * settings.downsampling**2, hidden, positions)
    for heads in settings.heads_per_layer:
        yield _encoding_part(settings, heads, side)
        channels = settings.head_channels or hidden
        if settings.head_channels is not None:  # values of their own: W_val and W_out of equation (11) are not merged
            yield _linear(hidden, heads * channels, positions, bias=False)
        yield Part(0, products=heads * positions**2 * channels)  # the weighted sums of values
        yield _linear(heads * channels, hidden, positions)
        yield _linear(hidden, hidden, positions)
        yield norm
        yield _linear(hidden, settings.mlp_width, positions)
        yield _linear(settings.mlp_width, hidden, positions)
        yield norm
    if settings.norm == "pre":
        yield norm
    yield _linear(hidden, settings.classes, 1)


def _encoding_part(settings: AttentionSettings, heads: int, side: int) -> Part:
    """Parameters and linear maps of an encoding, and its products q.k and q.r.

    Scores that do not depend on the image are computed once for all images and count as nothing. The learned encoding
    is an exception: the authors' code applies its linear maps to each pair of a query's and a key's row or column.
    """
    positions, width = side**2, settings.width
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
            return Part(2 * table * width + 2 * width * heads, linear=2 * positions * width * heads)
        case "learned-content":
            learned = 2 * (projection + heads * key) + 2 * table * (key // 2)
            relative = heads * positions * 2 * side * (key // 2)  # q.r: half of q meets each table
            return Part(learned, linear=2 * positions * projection, products=content + relative)
        case "sinusoidal":
            # Equation (8): W^_key meets the query once, and the product meets the sinusoids of each row and column
            # shift. The term without content does the same with v, for every pair of rows and of columns.
            relative = heads * positions * 2 * side * width + positions * projection
            without_content = heads * 2 * positions * width + projection
            learned = 3 * projection + 2 * heads * key
            return Part(learned, linear=2 * positions * projection, products=content + relative + without_content)
        case "absolute-sinusoidal":
            return Part(2 * projection, linear=2 * positions * projection, products=content)
        case "absolute-learned":
            return Part(2 * projection + positions * width, linear=2 * positions * projection, products=content)


def _resnet_parts(settings: ResNetSettings) -> Iterator[Part]:
    side, before = settings.image_size, settings.widths[0]
    yield _convolution(settings.image_channels, before, 3, side)
    for stage, (after, blocks) in enumerate(zip(settings.widths, settings.blocks, strict=True)):
        for block in range(blocks):
            halves = stage > 0 and block == 0
            if halves:
                side = -(-side // 2)
            yield _convolution(before, after, 3, side)
            yield _convolution(after, after, 3, side)
            if halves or before != after:
                yield _convolution(before, after, 1, side)
            before = after
    yield _linear(before, settings.classes, 1)


def _convolution(inputs: int, outputs: int, kernel: int, side: int) -> Part:
    """A convolution without bias on an image of `side` x `side` pixels, and its batch norm."""
    weights = inputs * kernel**2 * outputs
    return Part(weights + 2 * outputs, side**2 * weights)
