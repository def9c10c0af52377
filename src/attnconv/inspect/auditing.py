"""Measure how convolutional each attention layer of a model is on given images (an audit).

The model runs batch by batch under `visit_attention`, with only one layer's operator in memory at a time.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.processes import group_rank_and_size, in_all_processes
from attnconv._util.value_checks import check_dense, check_module, whole
from attnconv.grid import Grid
from attnconv.inspect.capture import blaming_images, check_images, visit_attention
from attnconv.inspect.chosen_queries import sample_queries
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.expressibility import can_express

KERNEL = 3
QUERIES = 256  # default maximum per image
MOST_POSITIONS = {1: 64, 2: 16, 3: 6}  # per axis, by number of axes; each query needs a QR decomposition


@final
@dataclass(frozen=True, eq=False)
class LayerAudit:
    """Audit of one attention layer.

    Attributes:
        name: The module's name. Later calls of the same module have ` (call 2)`, ` (call 3)`, ... appended.
        kind: Name of the module's class.
        sizes: Number of key positions along each axis; (height, width) for images.
        queries, query_count: Number of sampled queries and total number of queries, both per image.
        position_only: Whether the layer is from this library and its attention does not depend on the image.
        span_residual: Relative error of 3 x 3 kernels (3 taps per axis) away from the border, at the query with the
            largest error, with the value weights that fit all queries best; 0 if the layer can express every such
            convolution, and about 1 if it expresses nothing. None if the layer is not `position_only` or cannot run on
            a small test image.
        statistics: Statistics of the layer and its heads.
        span_unknown: Reason why `span_residual` of a `position_only` layer is None; empty for all other layers.
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
        """Return all attributes and statistics except the profile as JSON values; NaN and infinity become None."""
        values = {**vars(self), **vars(self.statistics)}
        return {name: json_values(value) for name, value in values.items() if name not in ("statistics", "profile")}


@final
@dataclass(frozen=True, eq=False)
class Audit:
    """Audit of a model; `print` displays it as a table.

    Attributes:
        layers: The layers, in the order in which they run.
        images: Number of images.
        left_out: Reason why the attention of a module could not be read, by module name.
    """

    layers: tuple[LayerAudit, ...]
    images: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerAudit:
        return {layer.name: layer for layer in self.layers}[name]

    def numbers(self) -> dict[str, Any]:
        """Return the whole audit as JSON values."""
        layers = [layer.numbers() for layer in self.layers]
        return {"images": self.images, "layers": layers, "left_out": dict(self.left_out)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per head, for `pandas.DataFrame`; each includes the statistics of its layer.

        Heads are numbered from 0. Vectors are split into components: `best_shift_0` is the row shift, for example.
        """
        rows = []
        for layer in self.layers:
            numbers = {**layer.numbers(), "sizes": " x ".join(map(str, layer.sizes))}
            for head in range(len(layer.statistics.entropy)):
                values = {name: value[head] if isinstance(value, list) else value for name, value in numbers.items()}
                rows.append({"layer": values.pop("name"), "head": head, **_flat(values)})
        return rows

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':<{width}}  heads  score  coverage  redundancy  constancy"]
        for layer in self.layers:
            found = layer.statistics
            lines.append(
                f"{layer.name:<{width}}  {len(found.entropy):5d}  {found.convolution_score:5.3f}  "
                f"{found.coverage:8.3f}  {found.redundancy:10.3f}  {float(found.constancy.nanmean()):9.3f}"
            )
        return "\n".join([*lines, *omissions(self.left_out)])


def audit(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    queries: int = QUERIES,
    batch: int = 8,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    layers: Collection[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Audit:
    """Measure how closely each attention layer of a model resembles a convolution on the given images.

    Attention that cannot be read is listed in `Audit.left_out`, with a warning. If a module runs several times, its
    later calls are separate layers, named `NAME (call 2)` and so on.

    In an initialised `torch.distributed` group, all processes must call this function with the same model and images.
    Each measures every n-th batch, with n the number of processes, and all return the audit of all images.

    Args:
        model: Any module that `visit_attention` can read. It runs in evaluation mode and without gradients.
        images: Input of the model, normalised as in training: a batch, usually (b, c, height, width), or an iterable
            of batches. All images must have the same size.
        queries: Maximum number of queries per image, spread evenly. With fewer than 100, noise increases the scores.
        batch: Batch size, at least 1. `content_share` compares the images of a batch and requires at least 2.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.
        layers: Names of the attention modules to measure; None for all.
        options: Additional keyword arguments for the model's forward pass.

    Raises:
        TypeError: If `images` does not consist of floating-point tensors, or `queries` or `batch` is not an integer.
        ValueError: If there are no images; if an image is constant or not finite; if image sizes differ, or images
            differ between processes; if the model is sharded, rejects the images or `options`, or has no attention; or
            if attention contains NaN, or no attention or not all of the `layers` can be read.

    Example:
        >>> from attnconv.convert import from_conv
        >>> model = nn.Sequential(from_conv(nn.Conv2d(3, 4, 3, padding=1)), nn.ReLU())
        >>> layer = audit(model, torch.randn(2, 3, 8, 8))["0"]
        >>> round(layer.statistics.convolution_score, 6), round(layer.span_residual, 6)
        (1.0, 0.0)
    """
    check_module(model)
    if sharded := [name for name, value in model.named_parameters() if hasattr(value, "full_tensor")]:  # a DTensor
        fix = "Load its full state dict into a model that is not sharded."
        raise ValueError(bad("model", "must not have sharded parameters", sharded[0], fix))
    queries, batch = whole("queries", queries, 1), whole("batch", batch, 1)
    rank, processes = group_rank_and_size()

    def measure() -> _RunningAudit:
        """Measure the batches of this process, which are distributed in turn; all processes validate all images."""
        running, shape = _RunningAudit(), None
        unreadable = running.left_out.setdefault
        for number, some in enumerate(image_batches(images, batch)):
            check_images(some, before=running.images, shape=shape)
            running.images, shape = running.images + len(some), tuple(some.shape[1:])
            if processes > 1:
                running.digest = hash((running.digest, int(some.contiguous().view(torch.uint8).sum())))
            if number % processes != rank:
                continue
            with blaming_images(model, some, options):
                visit = _adding_to(running.layers, some, queries)
                visit_attention(
                    model, some, visit, grid=grid, prefix=prefix, layers=layers, options=options, unreadable=unreadable
                )
        return running

    device = next(model.parameters(), torch.empty(0)).device
    running, *others = in_all_processes(measure, device)
    for other in others:
        running.merge(other)
    if not running.images:
        raise ValueError(bad("images", "must contain at least one image", 0))
    for name in running.left_out:
        if name in running.layers:
            running.left_out[name] += " (in one of its calls; the others were measured)"
    check_read("audit", running.layers, running.left_out, stacklevel=3)
    found = tuple(layer.result(name, model) for name, layer in running.layers.items())
    return Audit(found, running.images, running.left_out)


def check_read(function: str, layers: Collection[str], left_out: Mapping[str, str], *, stacklevel: int) -> None:
    """Raise an error if no layer could be read, and warn about those that were left out; called by `function`."""
    if not layers:
        named = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise ValueError(bad("model", "must contain at least one attention layer that can be read", named))
    if left_out:
        names = ", ".join(name or "the model itself" for name in left_out)
        warnings.warn(f"{function}: attention that could not be read was left out: {names}", stacklevel=stacklevel)


def omissions(left_out: Mapping[str, str]) -> list[str]:
    """Return one sentence for each module that was left out."""
    return [f"Left out {name or 'the model itself'}: {reason}." for name, reason in left_out.items()]


@final
@dataclass(frozen=True, eq=False)
class _RunningLayer:
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
            span = kernel_span(module, sizes) if module.operator(two).batch == 1 else None  # 1: shared
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


@final
@dataclass(eq=False)
class _RunningAudit:
    """Audit of the batches of one process, with the number and a digest of all images."""

    layers: dict[str, _RunningLayer] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    images: int = 0
    digest: int = 0

    def merge(self, other: "_RunningAudit") -> None:
        """Add the batches of another process."""
        if (self.images, self.digest) != (other.images, other.digest):
            requirement = "must be the same in all processes, which divide them among themselves"
            got = f"{self.images} and {other.images} images that differ"
            raise ValueError(bad("images", requirement, got, "Pass all images, in the same order, to every process."))
        for name, layer in other.layers.items():
            if name in self.layers:
                self.layers[name].statistics.merge(layer.statistics)
            else:
                self.layers[name] = layer
        for name, reason in other.left_out.items():
            self.left_out.setdefault(name, reason)


def _adding_to(
    running: dict[str, _RunningLayer], images: Tensor, queries: int
) -> Callable[[str, AttentionOperator], None]:
    """Return a visitor that adds one batch to the layers; each later call of a module counts as a separate layer."""
    calls: Counter[str] = Counter()

    def visit(name: str, operator: AttentionOperator) -> None:
        if images.dim() == 3 and isinstance(operator, TokenOperator) and operator.batch != len(images):
            got = f"shape {tuple(images.shape)}, for which {name!r} attends in {operator.batch} sequences"
            fix = "Wrap the model in a module that transposes its input."
            raise ValueError(bad("images", "must have the batch axis first", got, fix))
        calls[name] += 1
        key = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        if key not in running:
            chosen = sample_queries(operator.grid, queries, device=operator.device)
            running[key] = _RunningLayer(name, operator.grid, chosen, RunningStatistics())
        layer = running[key]
        # With None (all queries), moments of products over axes are computed without rows over the whole image.
        everything = len(layer.queries) == layer.grid.query_count
        layer.statistics.add(operator, queries=None if everything else layer.queries)

    return visit


@final
@dataclass(frozen=True)
class KernelSpan:
    """How closely a layer can express all 3 x 3 convolutions."""

    missed: float | None  # `LayerAudit.span_residual`
    expresses: bool  # whether `missed` is 0 up to rounding
    sizes: tuple[int, ...]  # positions per axis of the test grid
    reason: str  # why `missed` is None; otherwise empty


def kernel_span(layer: SelfAttention, sizes: Sequence[int]) -> KernelSpan:
    """Measure a layer whose attention depends only on positions, on a grid of at most `MOST_POSITIONS` per axis."""
    few = tuple(min(size, MOST_POSITIONS[len(sizes)]) for size in sizes)
    try:
        found = can_express(layer, KERNEL, sizes=few)
    # A custom encoding may raise any of these errors for images of a different size.
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        words = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return KernelSpan(None, False, few, f"on {' x '.join(map(str, few))} positions the layer raised: {words}")
    return KernelSpan(found.missed, found.missed <= found.tolerance, few, "")


def image_batches(images: Tensor | Iterable[Tensor], batch: int) -> Iterator[Tensor]:
    """Yield batches of at most the given size; raise `TypeError` for anything but floating-point tensors."""
    for some in (images,) if isinstance(images, Tensor) or not isinstance(images, Iterable) else images:
        if not isinstance(some, Tensor):
            fix = "For a loader of images and labels, pass (images for images, labels in loader)."
            raise TypeError(bad("images", "must be a tensor or an iterable of tensors", type(some).__name__, fix))
        check_dense(some)
        if len(some) > 0:
            yield from some.split(batch)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Split nested lists into their entries, with the indices (from 0) appended to the names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat({f"{name}_{i}": part for i, part in enumerate(value)}) if type(value) is list else {name: value}
    return flat


def json_values(value: Any) -> Any:
    """Replace tensors and tuples with lists, and NaN and infinity with None."""
    if isinstance(value, Tensor):
        return json_values(value.tolist())
    if isinstance(value, Mapping):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
