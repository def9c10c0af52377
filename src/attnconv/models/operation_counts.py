"""Exact numbers of parameters and FLOPs of a model, computed from its settings without torch.

FLOPs are additions and multiplications for one image. The paper counts only linear and convolution modules. The total
also includes the products q.k and attention x values of dense attention, but not normalisation, softmax and GELU.
"""

from collections.abc import Iterator
from typing import NamedTuple

from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings, StagedSettings


class Part(NamedTuple):
    """Counts for a part of a model: parameters, and multiply-adds per image of linear maps and of products."""

    parameters: int
    linear: int = 0
    products: int = 0


def parameters(model: ModelSettings | str) -> int:
    """Return the number of parameters of a model, given its settings or the name of a preset.

    Example:
        >>> parameters("quadratic")
        12086844
    """
    return sum(part.parameters for part in _parts(model))


def flops_paper(model: ModelSettings | str) -> int:
    """Return the FLOPs for one image, 2 per multiply-add, as counted in the paper: linear maps and convolutions only.

    Example:
        >>> flops_paper("quadratic")
        6175956800
    """
    return 2 * sum(part.linear for part in _parts(model))


def flops_all(model: ModelSettings | str) -> int:
    """Return the FLOPs for one image, 2 per multiply-add, including the matrix products of dense attention.

    Example:
        >>> flops_all("quadratic")
        9007112000
    """
    return 2 * sum(part.linear + part.products for part in _parts(model))


def _parts(model: ModelSettings | str) -> Iterator[Part]:
    settings = preset_settings(model) if isinstance(model, str) else model
    if isinstance(settings, AttentionSettings):
        return _classifier_parts(settings)
    return _staged_parts(settings) if isinstance(settings, StagedSettings) else _resnet_parts(settings)


def _linear(inputs: int, outputs: int, times: int, *, bias: bool = True) -> Part:
    """Count a linear map that is applied to `times` vectors."""
    return Part(inputs * outputs + outputs * bias, times * inputs * outputs)


def _classifier_parts(settings: AttentionSettings) -> Iterator[Part]:
    side, hidden = settings.image_size // settings.downsampling, settings.width
    positions, norm = side**2, Part(2 * hidden)
    yield _linear(settings.image_channels * settings.downsampling**2, hidden, positions)
    for heads in settings.heads_per_layer:
        yield _encoding_part(settings, heads, side)
        channels = settings.head_channels or hidden
        if settings.head_channels is not None:  # W_val and W_out of equation (11) are not merged
            yield _linear(hidden, heads * channels, positions, bias=False)
        yield Part(0, products=heads * positions**2 * channels)  # weighted sums of values
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
    """Count the parameters, linear maps, and products q.k and q.r of an encoding.

    Scores that do not depend on the image are not counted, since they are computed once for all images. The learned
    encoding is an exception: the authors' code applies its linear maps to every pair of query and key rows or columns.
    """
    positions, width = side**2, settings.width
    table = 2 * settings.max_shift + 1
    key = width if settings.key_channels is None else settings.key_channels
    if settings.encoding == "learned-content":
        key += key % 2  # half for each table
    projection = width * heads * key  # linear map to queries or to keys
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
            relative = heads * positions * 2 * side * (key // 2)  # q.r, with half of q for each table
            return Part(learned, linear=2 * positions * projection, products=content + relative)
        case "sinusoidal":
            # Equation (8): the query is multiplied by W^_key once, and the result by the sinusoids of every row and
            # column shift. The term without content multiplies v instead, for every pair of rows and of columns.
            features = -(-width // 4) * 4
            relative = heads * positions * 2 * side * features + positions * heads * key * features
            without_content = heads * 2 * positions * features + heads * key * features
            learned = 2 * projection + heads * key * features + 2 * heads * key
            return Part(learned, linear=2 * positions * projection, products=content + relative + without_content)
        case "absolute-sinusoidal":
            return Part(2 * projection, linear=2 * positions * projection, products=content)
        case "absolute-learned":
            return Part(2 * projection + positions * width, linear=2 * positions * projection, products=content)


def _staged_parts(settings: StagedSettings) -> Iterator[Part]:
    side, before = settings.image_size // settings.downsampling, settings.widths[0]
    yield _linear(settings.image_channels * settings.downsampling**2, before, side**2, bias=False)
    yield Part(2 * before)
    for stage, (after, layers) in enumerate(zip(settings.widths, settings.layers, strict=True)):
        for layer in range(layers):
            yield Part(settings.heads * 3, products=settings.heads * side**4 * before)  # weighted sums of values
            yield _linear(settings.heads * before, after, side**2, bias=False)
            yield Part(2 * after)
            if stage > 0 and layer == 0:
                side = -(-side // 2)
            before = after
    yield _linear(before, settings.classes, 1)


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
    """Count a convolution without bias on `side` x `side` positions, and its batch norm."""
    weights = inputs * kernel**2 * outputs
    return Part(weights + 2 * outputs, side**2 * weights)
