"""Change the attention of single heads while a model runs, to see what they contribute."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module, indices
from attnconv.grid import Grid
from attnconv.inspect.capture import changing_attention
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator

HeadChange: TypeAlias = Literal["zero", "mean", "uniform", "shift", "convolution"]
HEAD_CHANGES: tuple[HeadChange, ...] = get_args(HeadChange)
GATED = ("GPSA", "GatedPositionalAttention")  # classes whose attention is not one matrix per head


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
        mean           the mean row of P, so that the head's output is the same for all tokens
        uniform        1 / n for n keys: mean pooling
        shift          1 at one shift from every query: the nearest such matrix
        convolution    the mean of P over all pairs of query and key with the same shift: the nearest such matrix

    "Nearest" means in the Frobenius norm, over all images and windows of a call together. Keys outside the image or the
    window are ignored, as in a convolution with zero padding. For `shift` and `convolution`, class tokens and registers
    attend as before; the attention that they receive is 0 with `shift`, and its mean over queries with `convolution`.

    Args:
        model: Any module that `visit_attention` can read. Attention dropout is not applied in the changed layers.
        heads: Indices of heads, from 0, by name of the attention module; or a mapping from indices to changes.
        to: Change of the heads that are given as indices.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If a change, a module or a head does not exist, or if the attention of a module cannot be changed.

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
    chosen: dict[str, Mapping[int, HeadChange]] = {}
    for name, some in heads.items():
        chosen[name] = some if isinstance(some, Mapping) else dict.fromkeys(some, to)
        if name not in modules:
            raise ValueError(bad("heads", "must contain only names of the model's modules", repr(name)))
        if unknown := [kind for kind in chosen[name].values() if kind not in HEAD_CHANGES]:
            raise ValueError(bad("to", f"must be one of {', '.join(HEAD_CHANGES)}", repr(unknown[0])))

    def change(name: str, operator: AttentionOperator) -> Tensor:
        indices(f"heads[{name!r}]", chosen[name], operator.heads)
        if (kind := type(modules[name]).__name__) in GATED:
            raise ValueError(bad(f"model.{name}", "must have one attention matrix per head, without gates", kind))
        if isinstance(operator, TokenOperator):
            rows, heads, (queries, keys) = operator.token_rows(), operator.sequence_heads(), operator.token_indices()
        else:
            rows = operator.to_dense()
            heads = torch.arange(operator.heads, device=rows.device).repeat(len(rows))
            queries, keys = (torch.arange(n, device=rows.device).expand(len(heads), n) for n in rows.shape[-2:])
        shape, rows = rows.shape, rows.flatten(0, -3)  # one map for each image, window and head
        for head, kind in chosen[name].items():
            some = (heads == head).nonzero().squeeze(1)
            pairs = partial(_Pairs.of, operator.grid, queries[some], keys[some])
            rows = rows.index_copy(0, some, _changed(rows[some], kind, pairs))
        return rows.reshape(shape)

    with changing_attention(model, change, grid=grid, prefix=prefix, layers=chosen.keys()) if chosen else nullcontext():
        yield


@final
@dataclass(frozen=True, eq=False)
class _Pairs:
    """Classes of pairs of query and key; a convolution has one weight for each class.

    The first `shifts` classes are the shifts from query to key. Then each key that is not a token of the image has one
    class. The last class contains the pairs whose query is not a token of the image, which keep their attention.

    Sequences with the same tokens, such as the same window of all images, are of the same kind.
    """

    classes: Int[Tensor, "w q m"]  # for each kind
    shifts: int
    kinds: Int[Tensor, "s"]  # of each sequence

    @staticmethod
    def of(grid: Grid, queries: Int[Tensor, "s q"], keys: Int[Tensor, "s m"]) -> "_Pairs":
        """Classify the pairs of sequences, given the index in the grid of each token, or -1 for other tokens."""
        tokens, kinds = torch.cat((queries, keys), 1).unique(dim=0, return_inverse=True)
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
        return _Pairs(classes.where(shown, shifts + others).where(inside, shifts + len(others)), shifts, kinds)


def _changed(rows: Float[Tensor, "s q m"], kind: HeadChange, pairs: Callable[[], _Pairs]) -> Float[Tensor, "s q m"]:
    """Return the probabilities of one changed head."""
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "mean":
        return rows.mean(1, keepdim=True).expand_as(rows)
    if kind == "uniform":
        return torch.full_like(rows, 1 / rows.shape[2])
    made = pairs()
    classes, count = made.classes, made.shifts + rows.shape[2]
    sums = rows.new_zeros(classes.shape).index_add(0, made.kinds, rows)
    sums = rows.new_zeros(count + 1).index_add(0, classes.flatten(), sums.flatten())
    numbers = rows.new_zeros(classes.shape) + made.kinds.bincount()[:, None, None]
    numbers = rows.new_zeros(count + 1).index_add(0, classes.flatten(), numbers.flatten())
    if kind == "convolution":
        values = sums / numbers
    else:  # |P - S|^2 for the matrix S of a shift, without the terms that all shifts have in common
        most = (numbers - 2 * sums)[: made.shifts].where(numbers[: made.shifts] > 0, torch.inf).argmin()
        values = torch.zeros_like(sums).index_fill(0, most, 1.0)
    return values[classes][made.kinds].where((classes < count)[made.kinds], rows)
