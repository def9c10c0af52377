"""How convolutional each attention of a model is on given images.

The model runs batch by batch under `visit_attention`, and every layer adds its operator to its own `RunningStatistics`,
so that the memory of one layer is enough.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_dense, whole
from attnconv.grid import Grid
from attnconv.inspect.capture import blaming_images, check_images, visit_attention
from attnconv.inspect.chosen_queries import sample_queries
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.expressibility import can_express

KERNEL = 3
MOST_POSITIONS = {1: 64, 2: 16, 3: 6}  # per axis, by number of axes: each query takes a QR decomposition


@final
@dataclass(frozen=True, eq=False)
class LayerAudit:
    """One attention of a model.

    Attributes:
        name: Its module's name, with the number of the call where a module attends more than once.
        kind: Its module's class.
        sizes: Keys of the image per axis.
        queries, query_count: Number of queries measured in every image, and of all.
        position_only: Whether it is a layer of this library whose attention does not depend on the image.
        span_residual: The relative part of 3 x 3 kernels (3 per axis) that no weights of the layer reach, away from the
            border: 0 where it can be every such convolution. None where attention depends on the image, the layer is
            not this library's, or it is not known.
        statistics: Statistics of the layer and its heads.
        span_unknown: Why the residual of a layer with `position_only` is not known; else empty.
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
        """Everything except the profile as JSON values; NaN is null."""
        values = {**vars(self), **vars(self.statistics)}
        return {name: json_values(value) for name, value in values.items() if name not in ("statistics", "profile")}


@final
@dataclass(frozen=True, eq=False)
class Audit:
    """How convolutional the attentions of a model are; printed, a table.

    Attributes:
        layers: In the order in which they run.
        images: Number of images.
        left_out: Name of each module whose attention could not be read -> the reason. Empty unless `skip_unreadable`.
    """

    layers: tuple[LayerAudit, ...]
    images: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerAudit:
        """The layer with a name; raises a KeyError if there is none."""
        return {layer.name: layer for layer in self.layers}[name]

    def numbers(self) -> dict[str, Any]:
        """Everything as JSON values."""
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
    """Measure how much of a convolution every attention of a model is, on some images.

    Args:
        model: Any module that `visit_attention` reads. It runs in evaluation mode and without gradients.
        images: Input of the model, normalised as in training, usually (b, c, height, width), the batch first; or an
            iterable of such batches. All of one size.
        queries: Upper limit of queries per image, spread evenly, at least 1. With fewer than about a hundred, chance is
            no longer small.
        batch: Images at a time, at least 1. `content_share` compares the images of a batch, so take at least 2.
        grid: As for `visit_attention`, and so are the next three, the same for every batch.
        prefix: Tokens before the image's.
        layers: Names of the modules to read; None for all.
        options: Further keyword arguments of the model's forward pass.
        skip_unreadable: Leave out attention that cannot be read, such as that of a pooling head with one query, and
            name it in `left_out`. Ignored with `layers`.

    Raises:
        TypeError: `images` holds other things than floating point tensors; or `queries` or `batch` is no whole number.
        ValueError: There are no images; an image is constant or holds NaN or infinity; images differ in size; the model
            does not accept them or `options`, or returns NaN; or an attention cannot be read, or there is none.

    Example:
        >>> from attnconv.convert import from_conv
        >>> model = nn.Sequential(from_conv(nn.Conv2d(3, 4, 3, padding=1)), nn.ReLU())
        >>> layer = audit(model, torch.randn(2, 3, 8, 8))["0"]
        >>> round(layer.statistics.convolution_score, 6), round(layer.span_residual, 6)
        (1.0, 0.0)
    """
    queries, batch = whole("queries", queries, 1), whole("batch", batch, 1)
    running: dict[str, _RunningLayer] = {}
    left_out: dict[str, str] = {}
    unreadable = left_out.setdefault if skip_unreadable else None
    count, shape = 0, None
    for some in _batches(images, batch):
        check_images(some, before=count, shape=shape)
        count, shape = count + len(some), tuple(some.shape[1:])
        with blaming_images(model, some, options):
            visit = _adding_to(running, some, queries)
            visit_attention(
                model, some, visit, grid=grid, prefix=prefix, layers=layers, options=options, unreadable=unreadable
            )
    if shape is None:
        raise ValueError(bad("images", "must hold at least one image", 0))
    if not running:
        named = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise ValueError(bad("model", "must have an attention that can be read", named))
    return Audit(tuple(layer.result(name, model) for name, layer in running.items()), count, left_out)


@final
@dataclass(frozen=True, eq=False)
class _RunningLayer:
    """What is gathered of one attention."""

    module: str
    grid: Grid
    queries: Int[Tensor, "r"]
    statistics: RunningStatistics

    @torch.no_grad()
    def result(self, name: str, model: nn.Module) -> LayerAudit:
        module, sizes = model.get_submodule(self.module), self.grid.sizes
        try:
            statistics = self.statistics.result()
        except ValueError as error:
            raise ValueError(f"model.{name}: {error}") from error
        span = None
        if isinstance(module, SelfAttention):
            two = next(module.parameters()).new_zeros(2, module.in_channels, *sizes)
            span = kernel_span(module, sizes) if module.operator(two).batch == 1 else None  # they share one operator
        return LayerAudit(
            name=name or type(module).__name__,
            kind=type(module).__name__,
            sizes=sizes,
            queries=len(self.queries),
            query_count=self.grid.query_count,
            position_only=span is not None,
            span_residual=None if span is None else span.missed,
            statistics=statistics,
            span_unknown="" if span is None else span.reason,
        )


def _adding_to(
    running: dict[str, _RunningLayer], images: Tensor, queries: int
) -> Callable[[str, AttentionOperator], None]:
    """Add the attentions of one batch of images to the layers; later calls of a module are layers of their own."""
    calls: Counter[str] = Counter()

    def visit(name: str, operator: AttentionOperator) -> None:
        if images.dim() == 3 and isinstance(operator, TokenOperator) and operator.batch != len(images):
            got = f"{tuple(images.shape)}, of which {name!r} attends in {operator.batch} sequences"
            fix = "Wrap the model in one that transposes them."
            raise ValueError(bad("images", "must have the batch axis first", got, fix))
        calls[name] += 1
        key = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        if key not in running:
            chosen = sample_queries(operator.grid, queries, device=operator.device)
            running[key] = _RunningLayer(name, operator.grid, chosen, RunningStatistics())
        layer = running[key]
        # None asks for all queries: products over axes are then summed without a single row.
        everything = len(layer.queries) == layer.grid.query_count
        layer.statistics.add(operator, queries=None if everything else layer.queries)

    return visit


@final
@dataclass(frozen=True)
class KernelSpan:
    """How near one layer comes to every 3 x 3 convolution."""

    missed: float | None  # relative part of kernels that no weights reach, away from the border
    expresses: bool  # whether that is 0 to rounding
    sizes: tuple[int, ...]  # positions per axis of the image
    reason: str  # why `missed` is None, else empty


def kernel_span(layer: SelfAttention, sizes: Sequence[int]) -> KernelSpan:
    """Measure a layer whose attention depends on positions only, on an image that is just large enough to tell."""
    few = tuple(min(size, MOST_POSITIONS[len(sizes)]) for size in sizes)
    try:
        found = can_express(layer, KERNEL, sizes=few)
    # A custom encoding may raise any of these for an image of another size.
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        words = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return KernelSpan(None, False, few, f"on {' x '.join(map(str, few))} positions it stopped with: {words}")
    return KernelSpan(found.missed, found.missed <= found.tolerance, few, "")


def _batches(images: Tensor | Iterable[Tensor], batch: int) -> Iterator[Tensor]:
    for some in (images,) if isinstance(images, Tensor) or not isinstance(images, Iterable) else images:
        if not isinstance(some, Tensor):
            fix = "Of a loader that gives images and labels, pass (images for images, labels in loader)."
            raise TypeError(bad("images", "must be a tensor or batches that are tensors", type(some).__name__, fix))
        check_dense(some)
        if len(some) > 0:
            yield from some.split(batch)


def json_values(value: Any) -> Any:
    """Lists in place of tensors, and None in place of numbers that JSON does not have."""
    if isinstance(value, Tensor):
        return json_values(value.tolist())
    if isinstance(value, Mapping):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
