"""Change the attention of single heads while a model runs, to see what they contribute."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module, indices
from attnconv.grid import Grid
from attnconv.inspect.capture import changing_attention
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator

HeadChange: TypeAlias = Literal["zero", "mean", "uniform", "shift", "convolution"]
HEAD_CHANGES: tuple[HeadChange, ...] = get_args(HeadChange)
MASKED = 1e-20  # if the sum of the probabilities over heads is smaller, the key is masked
GATED = ("GPSA", "GatedPositionalAttention")  # classes whose attention is not one matrix per head
_CHANGED: set[nn.Module] = set()  # modules that running blocks of `ablated` change


@contextmanager
def ablated(
    model: nn.Module,
    heads: Mapping[str, Iterable[int] | Mapping[int, HeadChange]],
    *,
    to: HeadChange = "zero",
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
) -> Iterator[None]:
    """Change the attention of some heads of a model while the `with` block runs; the model itself is not changed.

    The attention matrix P of each of these heads, one row per query, is replaced with

        zero           0: the head is switched off
        mean           the mean row of P, so that the head's output is the same for all tokens of an image or window
        uniform        1 / n for n keys: mean pooling
        shift          1 at one shift from every query: the shift with the largest mean attention
        convolution    the mean of P over all pairs of query and key with the same shift: the nearest matrix that
                       depends only on the shift, in the Frobenius norm

    The means for `shift` and `convolution` are over all images and windows of a call together. Shifts that are
    available to less than 2^-d times as many queries as the most available one, on d axes, are not considered for
    `shift`. Keys outside the image or the window are ignored, as in a convolution with zero padding. Class tokens,
    registers and padding tokens attend as before; the attention that they receive is 0 with `shift`, and its mean over
    queries with `convolution`. Masked keys still receive no attention: a key counts as masked for a query if the
    probabilities of all heads of the layer add up to less than 1e-20.

    All calls of a module are changed. Inside the block, `audit` and `visit_attention` read the attention of these
    modules before it is changed.

    Args:
        model: Any module that `visit_attention` can read. Use evaluation mode: attention with dropout may not be
            readable, and dropout of the changed layers' attention is not applied.
        heads: Indices of heads, from 0, by name of the attention module; or a mapping from indices to changes.
        to: Change of the heads that are given as indices.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If a change, a module or a head does not exist, or if the attention of a module cannot be changed or
            is already changed by an enclosing block.

    Example:
        >>> from attnconv.models import build
        >>> model, image = build("quadratic-digits").eval(), torch.rand(1, 1, 8, 8)
        >>> before = model(image)
        >>> with ablated(model, {"blocks.0.attention": [0, 3]}):
        ...     after = model(image)
        >>> bool((after != before).any()), bool((model(image) == before).all())
        (True, True)
    """
    check_module(model)
    modules = dict(model.named_modules())
    _check_heads(heads)
    chosen: dict[str, Mapping[int, HeadChange]] = {}
    for name, some in heads.items():
        chosen[name] = some if isinstance(some, Mapping) else dict.fromkeys(some, to)
        if name not in modules:
            raise ValueError(bad("heads", "must contain only names of the model's modules", repr(name)))
        if modules[name] in _CHANGED:
            requirement = "must contain all heads of a module in one call of `ablated`"
            raise ValueError(bad("heads", requirement, f"{name!r} inside a block that changes it"))
        for kind in chosen[name].values():
            check_change(kind)

    def change(name: str, operator: AttentionOperator) -> Tensor:
        indices(f"heads[{name!r}]", chosen[name], operator.heads)
        if (kind := type(modules[name]).__name__) in GATED:
            raise ValueError(bad(f"model.{name}", "must have one attention matrix per head, without gates", kind))
        if isinstance(operator, TokenOperator):
            rows, (queries, keys) = operator.token_rows(), operator.token_indices()
            heads, first = operator.sequence_heads()
            totals = torch.zeros_like(rows).index_add_(0, first, rows.detach())
            allowed = (totals > MASKED)[first]
        else:
            rows = operator.to_dense()
            heads = torch.arange(operator.heads, device=rows.device).repeat(len(rows))
            queries, keys = (torch.arange(n, device=rows.device).expand(len(heads), n) for n in rows.shape[-2:])
            allowed = torch.ones_like(rows, dtype=torch.bool).flatten(0, -3)
        shape, rows = rows.shape, rows.flatten(0, -3)  # one map for each image, window and head
        for head, kind in chosen[name].items():
            some = (heads == head).nonzero().squeeze(1)
            pairs = partial(_Pairs.of, operator.grid, queries[some], keys[some])
            rows = rows.index_copy(0, some, _changed(rows[some], allowed[some], kind, pairs))
        return rows.reshape(shape)

    if not chosen:
        yield
        return
    changed = {modules[name] for name in chosen}
    _CHANGED.update(changed)
    try:
        with changing_attention(model, change, grid=grid, prefix=prefix, layers=chosen.keys()):
            yield
    finally:
        _CHANGED.difference_update(changed)


def _check_heads(heads: object) -> None:
    if not isinstance(heads, Mapping) or not all(isinstance(some, Iterable) for some in heads.values()):
        raise ValueError(bad("heads", "must map names of attention modules to lists of head indices", repr(heads)))


def check_change(to: object) -> None:
    """Raise an error unless `to` is the name of a change."""
    if to not in HEAD_CHANGES:
        raise ValueError(bad("to", f"must be one of {', '.join(HEAD_CHANGES)}", repr(to)))


@final
@dataclass(frozen=True, eq=False)
class _Pairs:
    """Classes of pairs of query and key; a convolution has one weight for each class.

    The first `shifts` classes are the shifts from query to key. Then each key that is not a token of the image has one
    class. The last class contains the pairs whose query is not a token of the image, which keep their attention.

    Sequences with the same tokens, such as the same window of all images, share one layout.
    """

    classes: Int[Tensor, "w q m"]  # of each layout
    shifts: int
    layouts: Int[Tensor, "s"]  # index of the layout of each sequence
    rare: float  # shifts are rare if they have fewer pairs than this share of the most frequent one

    @staticmethod
    def of(grid: Grid, queries: Int[Tensor, "s q"], keys: Int[Tensor, "s m"]) -> "_Pairs":
        """Classify the pairs of sequences, given the index in the grid of each token, or -1 for other tokens."""
        tokens, layouts = torch.cat((queries, keys), 1).unique(dim=0, return_inverse=True)
        query, key = tokens[:, : queries.shape[1], None], tokens[:, None, queries.shape[1] :]
        others = torch.arange(keys.shape[1], device=keys.device)
        inside, shown, classes, shifts = query >= 0, key >= 0, torch.zeros_like(query), 1
        for axis in reversed(grid.axes):
            positions = axis.query_positions(keys.device)
            first, last = int(positions[0]), int(positions[-1])
            shift = axis.spacing * (key % axis.size) - positions[query % axis.queries]
            classes = classes + shifts * (shift + last)
            shifts *= axis.spacing * (axis.size - 1) + 1 + last - first
            query, key = query // axis.queries, key // axis.size
        classes = classes.where(shown, shifts + others).where(inside, shifts + len(others))
        return _Pairs(classes, shifts, layouts, rare=0.5 ** len(grid.axes))


def _changed(
    rows: Float[Tensor, "s q m"], allowed: Bool[Tensor, "s q m"], kind: HeadChange, pairs: Callable[[], _Pairs]
) -> Float[Tensor, "s q m"]:
    """Return the probabilities of one changed head; those of keys that are not allowed are 0."""
    shares = allowed.to(rows.dtype)
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "mean":
        return (rows * shares).sum(1, keepdim=True) / shares.sum(1, keepdim=True).clamp_min(1) * shares
    if kind == "uniform":
        return shares / shares.sum(2, keepdim=True).clamp_min(1)
    found = pairs()
    classes, layouts, count = found.classes, found.layouts, found.shifts + rows.shape[2]
    sums, numbers = (
        rows.new_zeros(count + 1).index_add(
            0, classes.flatten(), rows.new_zeros(classes.shape).index_add(0, layouts, values).flatten()
        )
        for values in (rows * shares, shares)
    )
    values = sums / numbers.clamp_min(1)
    if kind == "shift":
        frequent = numbers[: found.shifts] >= found.rare * numbers[: found.shifts].max()
        best = values[: found.shifts].where(frequent, -1.0).argmax()
        values = torch.zeros_like(values).index_fill(0, best, 1.0)
    return (values[classes][layouts] * shares).where((classes < count)[layouts], rows)
