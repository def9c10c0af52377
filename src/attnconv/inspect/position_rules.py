"""Rules for `token_positions`: the positions of the outputs of an operation, from those of its arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from attnconv.inspect.position_codes import NONE, PositionCodes, Positions, is_even, thinned

aten = torch.ops.aten


@final
@dataclass(frozen=True, eq=False)
class Call:
    """An operation that has been computed, with its arguments and outputs."""

    codes: PositionCodes
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: Sequence[Any]
    known: Sequence[tuple[Tensor, Positions]]  # arguments with positions

    @property
    def first(self) -> Positions | None:
        """Positions of the first argument."""
        return self.known[0][1] if self.known[0][0] is self.args[0] else None

    def named(self) -> dict[str, Any]:
        """Return all arguments by name, with their defaults."""
        schema = self.func._schema.arguments
        found = {each.name: each.default_value for each in schema if each.has_default_value()}
        return {**found, **dict(zip((each.name for each in schema), self.args, strict=False)), **self.kwargs}


Rule: TypeAlias = Callable[[Call], Positions | list[Positions] | None]


def _same(call: Call) -> Positions | None:
    return call.first


def _softmax(call: Call) -> Positions | None:
    found = call.first
    return None if found is None else Positions(found.codes, found.columns, found.summed, softmax=True)


def write_positions(call: Call) -> Positions | None:
    """Write positions in place, as the operation writes values; called before the operation."""
    target, *others = call.args
    positions = {id(each): found for each, found in call.known}
    before = positions.get(id(target))
    if before is not None and before.columns is not None:  # scores whose entries are masked
        return before

    def codes_of(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return NONE if isinstance(value, float) else value
        found = positions.get(id(value))
        return (
            torch.full((), NONE, dtype=torch.float64, device=value.device).expand(value.shape)
            if found is None
            else found.codes
        )

    made = codes_of(target).clone(memory_format=torch.contiguous_format)
    if call.func.overloadpacket in (aten.fill_, aten.zero_):
        made.zero_()
    else:
        call.func(made, *(codes_of(value) for value in others), **call.kwargs)
    return Positions(made)


def _complex(call: Call) -> Positions | None:
    """Pairs of channels as complex numbers, and the reverse."""
    made = call.func.overloadpacket is aten.view_as_complex
    return call.first and call.first.changed(lambda codes: codes[..., 0] if made else codes[..., None])


def _view(call: Call) -> list[Positions] | None:
    """The same view of the positions."""
    if call.first is None:
        return None
    if len(call.outs) == 1:
        return [call.first.changed(lambda codes: _only(call.func(codes, *call.args[1:], **call.kwargs)))]
    made = [
        call.func(codes, *call.args[1:], **call.kwargs)
        for codes in (call.first.codes, call.first.columns)
        if codes is not None
    ]
    return [
        Positions(made[0][i], made[1][i] if len(made) > 1 else None, call.first.summed, call.first.softmax)
        for i in range(len(call.outs))
    ]


def _only(made: Any) -> Tensor:
    found: Tensor = made[0] if isinstance(made, (tuple, list)) else made
    return found


def _reshape(call: Call) -> Positions | None:
    return call.first and call.first.changed(lambda codes: reshaped(codes, tuple(call.outs[0].shape)))


def reshaped(codes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape codes; axes with stride 0 that form new axes only with each other keep it, to save copies."""
    before, small, i, j = tuple(codes.shape), list(shape), 0, 0
    while i < len(before) or j < len(shape):
        begin, start, left, right = i, j, 1, 1
        while (i, j) == (begin, start) or left != right:  # the next groups of axes with the same number of entries
            if (left <= right and i < len(before)) or j >= len(shape):
                left, i = left * before[i], i + 1
            else:
                right, j = right * shape[j], j + 1
        if all(before[axis] == 1 or codes.stride(axis) == 0 for axis in range(begin, i)):
            codes = thinned(codes, *range(begin, i))
            small[start:j] = [1] * (j - start)
    return codes.reshape(small).expand(shape)


def _move(call: Call) -> Positions | None:
    """The same movement of the positions."""
    return call.first and call.first.changed(lambda codes: call.func(codes, *call.args[1:], **call.kwargs))


def _turn(call: Call) -> Positions | None:
    """Roll or flip the positions along axes where they differ."""
    if not call.named()["dims"]:  # roll all entries in order
        return _move(call)
    return call.first and call.first.changed(
        lambda codes: call.func(thinned(codes, *range(codes.dim())), *call.args[1:], **call.kwargs)
    )


def _pad(call: Call) -> Positions | None:
    pad = list(call.named()["pad"])
    dims = {-1 - index // 2 for index, count in enumerate(pad) if count}

    def change(codes: Tensor) -> Tensor:
        others = (axis for axis in range(codes.dim()) if axis - codes.dim() not in dims)
        made: Tensor = aten.constant_pad_nd(thinned(codes, *others), pad, NONE)
        return made

    return call.first and call.first.changed(change)


def _join(call: Call) -> Positions | None:
    """Concatenate or stack the positions."""
    positions, dim, out = {id(each): found for each, found in call.known}, call.named()["dim"], call.outs[0]
    axis, parts = dim % out.dim(), []
    for tensor in call.args[0]:
        if tensor.dim() == 1 and tensor.numel() == 0:  # `cat` ignores it
            continue
        empty = torch.full((), NONE, dtype=torch.float64, device=out.device).expand(tensor.shape)
        found = positions.get(id(tensor), Positions(empty))
        parts.append((found.codes, empty if found.columns is None else found.columns))
    made = []
    for some in zip(*parts, strict=True):
        if call.func.overloadpacket is aten.stack:
            some = tuple(each.unsqueeze(axis) for each in some)
        for other in range(out.dim()):
            if other != axis and all(each.shape[other] == 1 or each.stride(other) == 0 for each in some):
                some = tuple(each.narrow(other, 0, 1) for each in some)
        made.append(torch.cat(some, axis))
    scores = any(found.columns is not None for found in positions.values())
    return Positions(made[0], made[1] if scores else None)


def _combine(call: Call) -> Positions:
    """Entry by entry: the positions on which all arguments agree."""
    shape = tuple(call.outs[0].shape)
    for _, positions in call.known:
        if positions.columns is not None or positions.summed:  # scores with a bias, for example
            return positions
    # A smaller argument has no influence, such as one gate for all positions.
    most = max(each.numel() for each, _ in call.known)
    found, *others = (positions.codes.expand(shape) for each, positions in call.known if each.numel() == most)
    for other in others:
        found = call.codes.agreed(found, other)
    return Positions(found)


def _reduce(call: Call) -> Positions | None:
    """The centre of the positions along the axes of a sum, mean or maximum."""
    positions, named = call.first, call.named()
    if positions is None:
        return None
    count, dims = positions.codes.dim(), named.get("dim")
    given = [dims] if isinstance(dims, int) else list(dims or range(count))
    axes = sorted({dim % count for dim in given}, reverse=True)

    def change(codes: Tensor) -> Tensor:
        made = call.codes.centre(codes, *axes)
        return made if named.get("keepdim") else made.squeeze(tuple(axes))

    if positions.columns is None or all(
        is_even(codes, dim) for codes in (positions.codes, positions.columns) for dim in axes
    ):
        return positions.changed(change)
    # The sum of scores over keys has only the positions of queries.
    over_columns = any(not is_even(positions.columns, dim) for dim in axes)
    return Positions(change(positions.codes if over_columns else positions.columns))


def _convolve(call: Call) -> Positions | None:
    """The centres of a convolution's kernels."""
    positions, named, out = call.first, call.named(), call.outs[0]
    if positions is None or named["transposed"]:
        return None
    kernel, moved = named["weight"].shape[2:], out.shape[2:] != call.args[0].shape[2:]
    if positions.columns is not None:  # scores that are mixed over heads
        return None if moved else positions.changed(lambda codes: call.codes.centre(codes, 1))
    places = _window_centres(out.shape[2:], kernel, named)
    return Positions(call.codes.resampled(call.codes.centre(positions.codes, 1), places))


def _pool(call: Call) -> Positions | None:
    """The centres of pooling windows."""
    positions, named, out = call.first, call.named(), call.outs[0]
    if positions is None or positions.columns is not None:
        return None
    if "kernel_size" in named:
        kernel = named["kernel_size"]
        places = _window_centres(out.shape[-len(kernel) :], kernel, {**named, "stride": named["stride"] or kernel})
    else:
        sizes = call.args[0].shape[-len(named["output_size"]) :]
        places = []
        for count, size in zip(out.shape[-len(sizes) :], sizes, strict=True):
            index = torch.arange(count)
            places.append((index * size // count - (-(index + 1) * size // count) - 1) / 2)
    return Positions(call.codes.resampled(positions.codes, places))


def _window_centres(counts: Sequence[int], kernel: Sequence[int], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the centres of windows along each axis."""
    per_axis = [
        list(value) * (len(kernel) if len(value) == 1 else 1)
        for value in (named["stride"], named["padding"], named.get("dilation", [1]))
    ]
    return [
        torch.arange(count) * stride - padding + dilation * (size - 1) / 2
        for count, size, stride, padding, dilation in zip(counts, kernel, *per_axis, strict=True)
    ]


def _scale(call: Call) -> Positions | None:
    """An image that is interpolated to a different size."""
    if call.first is None or call.first.columns is not None:
        return None
    sizes = zip(call.outs[0].shape[2:], call.args[0].shape[2:], strict=True)
    places = [(torch.arange(count) + 0.5) * size / count - 0.5 for count, size in sizes]
    return Positions(call.codes.resampled(call.first.codes, places))


RULES: dict[Any, Rule] = {
    packet: rule
    for rule, packets in {
        _reshape: (aten.view, aten._unsafe_view, aten._reshape_alias),
        _same: (
            aten.clone,
            aten._to_copy,
            aten.detach,
            aten.native_layer_norm,
            aten.native_group_norm,
            aten.native_batch_norm,
            aten._native_batch_norm_legit_no_training,
            aten.native_dropout,
        ),
        _softmax: (aten._softmax, aten._log_softmax, aten._safe_softmax),
        _turn: (aten.roll, aten.flip),
        _pad: (aten.constant_pad_nd,),
        _move: (
            aten.index_select,
            aten.gather,
            aten.index,
            aten.repeat,
            aten.rot90,
            aten.im2col,
            aten.pixel_shuffle,
            aten.pixel_unshuffle,
            aten.reflection_pad2d,
            aten.replication_pad2d,
        ),
        _join: (aten.cat, aten.stack),
        _reduce: (
            aten.mean,
            aten.sum,
            aten.amax,
            aten.amin,
            aten.max,
            aten.var,
            aten.std,
            aten.var_mean,
            aten.linalg_vector_norm,
            aten.norm,
        ),
        _pool: (
            aten.avg_pool2d,
            aten.avg_pool3d,
            aten.max_pool2d_with_indices,
            aten.max_pool3d_with_indices,
            aten._adaptive_avg_pool2d,
            aten._adaptive_avg_pool3d,
        ),
        _scale: (
            aten.upsample_nearest2d,
            aten._upsample_nearest_exact2d,
            aten.upsample_trilinear3d,
            aten.upsample_bilinear2d,
            aten.upsample_bicubic2d,
            aten._upsample_bilinear2d_aa,
            aten._upsample_bicubic2d_aa,
        ),
        _convolve: (aten.convolution,),
        _complex: (aten.view_as_complex, aten.view_as_real),
        write_positions: (
            aten.copy_,
            aten.fill_,
            aten.zero_,
            aten.index_put_,
            aten.index_copy_,
            aten.scatter_,
            aten.masked_scatter_,
        ),
        _combine: (
            aten.hardswish,
            aten.hardswish_,
            aten.hardsigmoid,
            aten.hardtanh,
            aten.hardtanh_,
            aten._prelu_kernel,
        ),
    }.items()
    for packet in packets
}


def writes(func: Any) -> bool:
    """Return whether an operation changes its first argument."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and bool(alias.is_write)


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation; None if its effect on positions is unknown."""
    if func.overloadpacket in RULES:
        return RULES[func.overloadpacket]
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    if alias is not None and not alias.is_write and func.overloadpacket is not aten.as_strided:
        return _view
    return _combine if torch.Tag.pointwise in func.tags else None
