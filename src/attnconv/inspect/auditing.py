"""How convolutional each attention of a model is, on given images: one call for all layers and heads.

The model runs batch by batch under `visit_attention`; every layer adds its operator to its own `RunningStatistics`, at
most `queries` rows per image and head, so that the memory needed is that of one layer. Layers of this library that look
at positions alone are also asked what `can_express` says of 3 x 3 kernels; attention that depends on the image has one
Phi per image or none, and no such number.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_dense
from attnconv._util.value_checks import whole
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.image_checks import blaming_images, check_images
from attnconv.inspect.kernel_expressibility import kernel_span
from attnconv.inspect.moments import sample_queries
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator


@final
@dataclass(frozen=True, eq=False)
class LayerAudit:
    """One attention of a model.

    Attributes:
        name: Its module's name; with the number of the call behind it where a module attends more than once.
        kind: Its module's class.
        sizes: Keys of the image per axis.
        queries: Queries looked at, of every image.
        query_count: Queries there are.
        position_only: Whether it is a layer of this library that looks at positions and never at the image.
        span_residual: The relative part of 3 x 3 kernels (3 per axis) that no weights of the layer reach, away from the
            border of at most `MOST_POSITIONS` positions per axis: 0 where it can be every such convolution. None
            where attention depends on the image, the layer is not this library's, or it is not known.
        statistics: The numbers of the layer and its heads.
        span_unknown: Why the residual of a layer that looks at positions alone is not known; else empty.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    queries: int
    query_count: int
    position_only: bool
    span_residual: float | None
    statistics: LayerStatistics
    span_unknown: str = ""

    def numbers(self) -> dict[str, Any]:
        """All numbers as JSON holds them; what is not a number (NaN) is null. The profile is left out."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "statistics"}
        statistics = {
            entry.name: getattr(self.statistics, entry.name)
            for entry in fields(self.statistics)
            if entry.name != "profile"
        }
        return {name: _plain(value) for name, value in {**plain, **statistics}.items()}


@final
@dataclass(frozen=True, eq=False)
class Audit:
    """How convolutional the attentions of a model are. Printed, a table.

    Attributes:
        layers: In the order in which they run.
        images: Images looked at.
        left_out: Name of each module whose attention could not be read -> why. Empty unless `skip_unreadable`.
    """

    layers: tuple[LayerAudit, ...]
    images: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerAudit:
        """The layer of a name.

        Raises:
            KeyError: There is none.
        """
        return {layer.name: layer for layer in self.layers}[name]

    def numbers(self) -> dict[str, Any]:
        """All numbers as JSON holds them."""
        layers = [layer.numbers() for layer in self.layers]
        return {"images": self.images, "layers": layers, "left_out": dict(self.left_out)}

    def omissions(self) -> list[str]:
        """A sentence for each attention that was left out."""
        return [f"Left out {name or 'the model itself'}: {reason}." for name, reason in self.left_out.items()]

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':<{width}}  heads  score  coverage  redundancy  constancy"]
        for layer in self.layers:
            found = layer.statistics
            lines.append(
                f"{layer.name:<{width}}  {len(found.entropy):5d}  {found.convolution_score:5.3f}  "
                f"{found.coverage:8.3f}  {found.redundancy:10.3f}  {float(found.constancy.nanmean()):9.3f}"
            )
        return "\n".join([*lines, *self.omissions()])


def audit(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    queries: int = 256,
    batch: int = 8,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    layers: Collection[str] | None = None,
    options: Mapping[str, object] | None = None,
    skip_unreadable: bool = False,
) -> Audit:
    """Read every attention of a model on some images and say in numbers how much of a convolution it is.

    Args:
        model: Any module that `visit_attention` reads. It runs in evaluation mode and without gradients.
        images: What the model's forward pass takes, normalised as in training, usually (b, c, height, width), the batch
            first; or an iterable of such batches. All of one size.
        queries: At most how many queries of each image to look at, spread evenly, at least 1. Under about a hundred,
            chance is no longer small.
        batch: Images at a time, at least 1. `content_share` compares the images of a batch, so take at least 2.
        grid: Tokens of the image, (height, width), for models that do not say it and for inputs that are no images.
        prefix: Class tokens and registers before the image's tokens, for models that do not say it. With `grid`,
            what is neither stands after them.
        layers: Names of the modules to read; None for all.
        options: Further arguments of the model's forward pass by name, the same for every batch.
        skip_unreadable: Whether attention that cannot be read, as that of a pooling head with one query, is left out
            and named in `left_out`. Layers that are named by `layers` are never left out.

    Returns:
        The layers in the order in which they run.

    Raises:
        TypeError: `images` holds something else than tensors of a floating dtype; or `queries` or `batch` is no whole
            number.
        ValueError: There are no images; an image is constant or holds NaN or infinity; images differ in size, or are
            not what the model takes (its own words are passed on); the model takes other arguments than `options`, or
            gives NaN; an attention cannot be read and is not to be left out, or there is none to read.

    Example:
        >>> from attnconv.convert import from_conv
        >>> layer = from_conv(nn.Conv2d(3, 4, 3, padding=1))
        >>> found = audit(nn.Sequential(layer, nn.ReLU()), torch.randn(2, 3, 8, 8))
        >>> (layer,) = found.layers
        >>> layer.name, round(layer.statistics.convolution_score, 6), round(layer.span_residual, 6)
        ('0', 1.0, 0.0)
    """
    queries, batch = whole("queries", queries, 1), whole("batch", batch, 1)
    gathered: dict[str, _Layer] = {}
    left_out: dict[str, str] = {}
    reading: dict[str, Any] = {"grid": grid, "prefix": prefix, "layers": layers, "options": options}
    reading["unreadable"] = left_out.setdefault if skip_unreadable else None
    count, shape = 0, None
    for some in _batches(images, batch):
        check_images(some, before=count, shape=shape)
        shape = tuple(some.shape[1:])
        calls: dict[str, int] = {}

        def look(name: str, operator: AttentionOperator, calls: dict[str, int] = calls, some: Tensor = some) -> None:
            _check_batch_first(name, operator, some)
            calls[name] = calls.get(name, 0) + 1
            key = name if calls[name] == 1 else f"{name} (call {calls[name]})"
            gathered.setdefault(key, _Layer(name, operator, queries)).add(operator)

        with blaming_images(model, some, options):
            visit_attention(model, some, look, **reading)
        count += len(some)
    if shape is None:
        raise ValueError(bad("images", "must hold at least one image", 0))
    if not gathered:
        named = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise ValueError(bad("model", "must have an attention that can be read", named))
    return Audit(tuple(layer.result(key, model) for key, layer in gathered.items()), count, left_out)


@final
class _Layer:
    """What is gathered of one attention."""

    def __init__(self, module: str, operator: AttentionOperator, queries: int) -> None:
        self._module, self._grid, self._statistics = module, operator.grid, RunningStatistics()
        self._queries = sample_queries(operator.grid, queries, device=operator.device)

    def add(self, operator: AttentionOperator) -> None:
        # All queries are asked for as such: products over axes are then summed without a single row.
        everything = len(self._queries) == self._grid.query_count
        self._statistics.add(operator, queries=None if everything else self._queries)

    def result(self, key: str, model: nn.Module) -> LayerAudit:
        module = model.get_submodule(self._module)
        sizes = self._grid.sizes
        try:
            statistics = self._statistics.result()
        except ValueError as error:
            raise ValueError(f"model.{key}: {error}") from error
        own = module if isinstance(module, SelfAttention) and looks_at_positions_alone(module, sizes) else None
        span = None if own is None else kernel_span(own, sizes)
        return LayerAudit(
            name=key or type(module).__name__,
            kind=type(module).__name__,
            sizes=self._grid.sizes,
            queries=len(self._queries),
            query_count=self._grid.query_count,
            position_only=own is not None,
            span_residual=None if span is None else span.missed,
            statistics=statistics,
            span_unknown="" if span is None else span.reason,
        )


@torch.no_grad()
def looks_at_positions_alone(layer: SelfAttention, sizes: Sequence[int]) -> bool:
    """Whether two images share one operator."""
    some = next(layer.parameters())
    return layer.operator(some.new_zeros(2, layer.in_channels, *sizes)).batch == 1


def _batches(images: Tensor | Iterable[Tensor], batch: int) -> Iterator[Tensor]:
    for some in (images,) if isinstance(images, Tensor) or not isinstance(images, Iterable) else images:
        if not isinstance(some, Tensor):
            fix = "Of a loader that gives images and labels, pass (images for images, labels in loader)."
            raise TypeError(bad("images", "must be a tensor or batches that are tensors", type(some).__name__, fix))
        check_dense(some)
        if len(some) > 0:
            yield from some.split(batch)


def _check_batch_first(name: str, operator: AttentionOperator, images: Tensor) -> None:
    """Refuse tokens that stand before the batch: they would be split and counted as if they were images."""
    if images.dim() == 3 and isinstance(operator, TokenOperator) and operator.batch != len(images):
        requirement = "must have the batch axis first"
        got = f"{tuple(images.shape)}, of which {name!r} attends in {operator.batch} sequences"
        raise ValueError(bad("images", requirement, got, "Wrap the model in one that transposes them."))


def _plain(value: Any) -> Any:
    """A tensor or number as JSON holds it."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
