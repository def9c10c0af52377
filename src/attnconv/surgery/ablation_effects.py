"""Effect of every single head on the output and the accuracy of a model.

    output change = |f_h(images) - f(images)| / |f(images)|        (Euclidean norms over all images together)

where f is the model, and f_h the same model with the attention of head h changed by `ablated`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module, whole
from attnconv.inspect.auditing import check_read, image_batches, omissions
from attnconv.inspect.capture import blaming_images, check_images, checked_options, visit_attention
from attnconv.operators.base import AttentionOperator
from attnconv.surgery.head_ablation import GATED, HeadChange, ablated, check_change
from attnconv.surgery.head_replacement import nonzero_output, output_of


@final
@dataclass(frozen=True)
class HeadEffect:
    """Effect of changing one head, and no other.

    Attributes:
        layer: Name of the attention module.
        head: Index of the head in the module, from 0.
        output_change: Relative change of the model's output, at least 0.
        accuracy: Accuracy with this head changed, 0 to 1; None without labels.
    """

    layer: str
    head: int
    output_change: float
    accuracy: float | None


@final
@dataclass(frozen=True)
class HeadEffects:
    """Effects of the heads of a model; `print` displays them as a table.

    Attributes:
        heads: One entry per head, in the order in which the layers first run.
        to: How each head was changed, as in `ablated`.
        images: Number of images.
        accuracy: Accuracy of the unchanged model, 0 to 1; None without labels.
        left_out: Reason why the heads of a module could not be changed, by module name.
    """

    heads: tuple[HeadEffect, ...]
    to: HeadChange
    images: int
    accuracy: float | None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per head, for `pandas.DataFrame`."""
        return [asdict(effect) for effect in self.heads]

    def __str__(self) -> str:
        width = max(len("layer"), *(len(effect.layer) for effect in self.heads))
        lines = [f"{'layer':<{width}}  head  output change" + ("" if self.accuracy is None else "  accuracy")]
        for each in self.heads:
            accuracy = "" if each.accuracy is None else f"  {each.accuracy:8.4f}"
            lines.append(f"{each.layer:<{width}}  {each.head:4d}  {each.output_change:13.4f}{accuracy}")
        if self.accuracy is not None:
            lines.append(f"Accuracy without changes: {self.accuracy:.4f}")
        return "\n".join([*lines, *omissions(self.left_out)])


@torch.inference_mode(False)
@torch.no_grad()
def head_effects(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    labels: Int64[Tensor, "n"] | None = None,
    to: HeadChange = "zero",
    batch: int = 32,
    layers: Collection[str] | None = None,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    options: Mapping[str, object] | None = None,
) -> HeadEffects:
    """Change every head of a model, one at a time, and measure how the output and the accuracy change.

    The model runs once per head for every batch. Attention that cannot be changed is listed in `HeadEffects.left_out`,
    with a warning.

    Args:
        model: Any module that `visit_attention` can read. It runs in evaluation mode; its mode is restored.
        images: Input of the model, normalised as in training: a batch, usually (b, c, height, width), or an iterable
            of batches. All images must have the same size.
        labels: Class index of each image, (n,) int64 for n images in total; the model must then return logits,
            (b, classes). None measures only the output.
        to: How each head is changed, as in `ablated`. `shift` and `convolution` are computed from the images of one
            batch.
        batch: Batch size, at least 1.
        layers: Names of the attention modules whose heads are changed; None for all.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.
        options: Additional keyword arguments for the model's forward pass.

    Raises:
        TypeError: If `model` is not a module, `images` does not consist of floating-point tensors, `labels` is not an
            int64 tensor, or `batch` is not an integer.
        ValueError: If there are no images; if an image is constant, not finite or rejected by the model; if `to` is
            unknown; if no attention or not all of the `layers` can be read; if the output is not finite or is zero for
            an image; or if `labels` do not match the images or the logits.

    Example:
        >>> from attnconv.models import build
        >>> model, images = build("quadratic-digits", layers=1, heads=2), torch.rand(4, 1, 8, 8)
        >>> found = head_effects(model, images, labels=torch.tensor([0, 1, 2, 3]))
        >>> [(effect.layer, effect.head, effect.output_change > 0) for effect in found.heads]
        [('blocks.0.attention', 0, True), ('blocks.0.attention', 1, True)]
    """
    check_module(model)
    check_change(to)
    if labels is not None:
        _check_labels(labels, len(images) if isinstance(images, Tensor) else None)
    counts: dict[str, int] = {}  # numbers of heads by layer
    sums: dict[tuple[str, int], list[float]] = {}  # squared change and number of correct predictions by head
    left_out: dict[str, str] = {}
    size, right, done, shape = 0.0, 0, 0, None

    def visit(name: str, operator: AttentionOperator) -> None:
        if type(model.get_submodule(name)).__name__ in GATED:
            left_out[name] = "its attention is the sum of two maps, with gates"
        else:
            counts.setdefault(name, operator.heads)

    for some in image_batches(images, whole("batch", batch, 1)):
        check_images(some, before=done, shape=shape)
        known = None if labels is None else labels[done : done + len(some)]
        done, shape, call = done + len(some), tuple(some.shape[1:]), checked_options(model, some, options)
        with blaming_images(model, some, options):
            if done == len(some):
                visit_attention(
                    model,
                    some,
                    visit,
                    grid=grid,
                    prefix=prefix,
                    layers=layers,
                    options=options,
                    unreadable=left_out.setdefault,
                )
                counts = {name: count for name, count in counts.items() if name not in left_out}
                check_read("head_effects", counts, left_out, stacklevel=5)  # beyond the two decorators
            before = nonzero_output(model, some, call)
        size, right = size + _square(before), right + _correct(before, known)
        for name, count in counts.items():
            for head in range(count):
                with ablated(model, {name: [head]}, to=to, grid=grid, prefix=prefix):
                    after = output_of(model, some, call)
                total = sums.setdefault((name, head), [0.0, 0])
                total[0] += _square(after - before)
                total[1] += _correct(after, known)
    if done == 0:
        raise ValueError(bad("images", "must contain at least one image", 0))
    if labels is not None:
        _check_labels(labels, done)
    effects = (
        HeadEffect(name, head, math.sqrt(change / size), None if labels is None else correct / done)
        for (name, head), (change, correct) in sums.items()
    )
    return HeadEffects(tuple(effects), to, done, None if labels is None else right / done, left_out)


def _check_labels(labels: object, images: int | None) -> None:
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.dtype != torch.int64:
        got = f"{tuple(labels.shape)} {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(bad("labels", "must be an int64 tensor of class indices, (n,)", got))
    if images is not None and len(labels) != images:
        raise ValueError(bad("labels", f"must contain one label per image ({images})", len(labels)))


def _square(values: Tensor) -> float:
    """Return the sum of squares, computed in float32 or higher precision."""
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))) ** 2


def _correct(output: Tensor, labels: Tensor | None) -> int:
    """Return the number of correct predictions; 0 without labels."""
    if labels is None:
        return 0
    if output.dim() != 2 or len(labels) != len(output) or not bool(((labels >= 0) & (labels < output.shape[1])).all()):
        requirement = f"must be one class index per image, for an output of shape {tuple(output.shape)}"
        raise ValueError(bad("labels", requirement, labels.tolist()))
    return int((output.argmax(1) == labels.to(output.device)).sum())
