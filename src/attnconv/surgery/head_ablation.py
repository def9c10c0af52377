"""Change the attention of single heads while a model runs, to see what they contribute."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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

    "Nearest" means in the Frobenius norm, over all images of a call together. Keys outside the image are ignored, as in
    a convolution with zero padding. For `shift` and `convolution`, class tokens and registers attend as before; the
    attention that they receive is 0 with `shift`, and its mean over queries with `convolution`.

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
        if type(modules[name]).__name__ in ("GPSA", "GatedPositionalAttention"):
            requirement = "must have one attention matrix per head, without gates"
            raise ValueError(bad(f"model.{name}", requirement, type(modules[name]).__name__))
        if isinstance(operator, TokenOperator):
            rows, heads, before = operator.token_rows(), operator.sequence_heads(), operator.prefix
            windows = operator.window is not None
        else:
            rows = operator.to_dense()
            heads, before, windows = torch.arange(operator.heads).repeat(len(rows)), 0, False
        shape, rows = rows.shape, rows.flatten(0, -3)  # one map for each image, window and head
        if windows and not {"shift", "convolution"}.isdisjoint(chosen[name].values()):
            fix = "Change its heads to zero, mean or uniform."
            raise ValueError(bad(f"model.{name}", "must attend to the whole image", "windows", fix))
        pairs = None if windows else _Pairs.of(operator.grid, before, rows.shape[-1])
        for head, kind in chosen[name].items():
            some = (heads == head).nonzero().squeeze(1)
            rows = rows.index_copy(0, some, _changed(rows[some], kind, pairs))
        return rows.reshape(shape)

    with changing_attention(model, change, grid=grid, prefix=prefix, layers=chosen.keys()) if chosen else nullcontext():
        yield


@final
@dataclass(frozen=True, eq=False)
class _Pairs:
    """Classes of pairs of an image token as the query and any token as the key; a convolution has one weight for each.

    The first `shifts` classes are the shifts from query to key. Each key that is not a token of the image is one class.
    """

    classes: Int[Tensor, "q m"]
    shifts: int
    queries: slice  # the tokens of the image

    @staticmethod
    def of(grid: Grid, before: int, keys: int) -> "_Pairs":
        shift, shifts = torch.zeros(1, 1, dtype=torch.int64), 1
        for axis in grid.axes:
            steps = axis.spacing * torch.arange(axis.size) - axis.query_positions()[:, None]
            least, count = int(steps.min()), int(steps.max() - steps.min()) + 1
            # Queries and keys of the axes so far, then of this one.
            shift = (shift[:, None, :, None] * count + (steps - least)[None, :, None, :]).flatten(0, 1).flatten(1)
            shifts *= count
        queries, inside = slice(before, before + len(shift)), slice(before, before + shift.shape[1])
        classes = (shifts + torch.arange(keys)).repeat(len(shift), 1)
        classes[:, inside] = shift
        return _Pairs(classes, shifts, queries)


def _changed(rows: Float[Tensor, "b n m"], kind: HeadChange, pairs: _Pairs | None) -> Float[Tensor, "b n m"]:
    """Return the probabilities of one changed head."""
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "mean":
        return rows.mean(1, keepdim=True).expand_as(rows)
    if kind == "uniform":
        return torch.full_like(rows, 1 / rows.shape[2])
    assert pairs is not None
    classes, image = pairs.classes.to(rows.device), rows[:, pairs.queries]
    counts = len(rows) * classes.flatten().bincount()
    sums = rows.new_zeros(len(counts)).index_add(0, classes.flatten(), image.sum(0).flatten())
    if kind == "convolution":
        image = (sums / counts)[classes].expand_as(image)
    else:  # |P - S|^2 for the matrix S of a shift, without the terms that all shifts have in common
        best = (counts - 2 * sums)[: pairs.shifts].where(counts[: pairs.shifts] > 0, torch.inf).argmin()
        image = (classes == best).to(rows.dtype).expand_as(image)
    return torch.cat((rows[:, : pairs.queries.start], image, rows[:, pairs.queries.stop :]), 1)
