"""Follow the positions of an image's tokens through a running model.

Beside each tensor that depends on the images, a tensor of the same shape holds the position that each entry comes from.
Operations that only move entries (views, permutations, padding, windows, concatenation) move the positions in the same
way. Operations on channels (linear maps, normalisation) keep them. Where entries of several positions are combined, the
result is at their centre: the centre of a convolution's kernel, a pooling window, a patch, or an averaged axis.

The product of two such tensors along their channels contains scores: each entry has the positions of its row and of its
column. The product of scores, usually after a softmax, with a further tensor along the positions of the columns is
attention.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from attnconv.grid import Grid

UNIT = 4  # steps per pixel, since the centres of kernels of even size are between pixels
AROUND = 4  # positions range over this many image sizes, around the image
NONE, SEVERAL = 0.0, -1.0  # codes of entries that are not from the image, and of sums over different positions
COLOURS = (1, 3, 4)  # numbers of channels by which they are recognised in videos
CHANNELS = "it attends to channels instead of tokens"
LINEAR = "it sums over tokens before it combines them with queries, so it has no attention map"

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class PositionCodes:
    """Positions in a batch of images as single numbers, which are exact in float64.

    The code of a position (image, row, column, ...) is its row-major index on a grid of `UNIT` steps per pixel, plus 1.
    """

    sizes: tuple[int, ...]  # of the images in pixels, (height, width)

    @property
    def extents(self) -> tuple[int, ...]:
        """Number of steps along each axis of the grid."""
        return tuple(AROUND * UNIT * size for size in self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Change of a code per step along each axis."""
        return tuple(math.prod(self.extents[axis + 1 :]) for axis in range(len(self.sizes)))

    def of_images(self, count: int, device: torch.device) -> Tensor:
        """Return the codes of all pixels, (images, *sizes)."""
        codes = math.prod(self.extents) * torch.arange(count, dtype=torch.float64, device=device) + 1
        for size, stride in zip(self.sizes, self.strides, strict=True):
            steps = UNIT * (torch.arange(size, dtype=torch.float64, device=device) + AROUND * size // 2)
            codes = codes[..., None] + steps * stride
        return codes

    def of_tokens(self, count: int, tokens: int, before: int, device: torch.device) -> Tensor:
        """Return the codes of tokens, (images, tokens); those of the images follow `before` others."""
        codes = torch.full((count, tokens), NONE, dtype=torch.float64, device=device)
        codes[:, before : before + math.prod(self.sizes)] = self.of_images(count, device).flatten(1)
        return codes

    def read(self, codes: Tensor) -> tuple[Tensor, ...]:
        """Return image, row, column, ... of codes, in steps; each has the shape of `codes`."""
        rest, found = codes - 1, []
        for extent in reversed(self.extents):
            found.append(rest % extent)
            rest = torch.div(rest, extent, rounding_mode="floor")
        return (rest, *reversed(found))

    def write(self, image: Tensor, *parts: Tensor) -> Tensor:
        """Return the codes of positions, rounded to whole steps."""
        codes = 1 + math.prod(self.extents) * image
        for part, stride in zip(parts, self.strides, strict=True):
            codes = codes + (part + 0.5).floor() * stride
        return codes

    def steps(self, codes: Tensor) -> list[float]:
        """Return the smallest distance between different positions along each axis; infinity if there is only one."""
        values = [part[codes > NONE].unique() for part in self.read(codes)[1:]]
        return [float(each.diff().min()) if len(each) > 1 else math.inf for each in values]

    def centre(self, codes: Tensor, *dims: int) -> Tensor:
        """Return the centre of the smallest box that contains all positions along some axes, which get size 1.

        If this is the same position for all entries, the whole image was summed: the result has no position.
        """
        codes = _thin(codes, *dims)
        if all(codes.shape[dim] == 1 for dim in dims):
            return codes
        least = torch.where(codes == NONE, torch.inf, codes).amin(dims, keepdim=True)
        most, several = codes.amax(dims, keepdim=True), (codes == SEVERAL).any(dims, keepdim=True)
        if bool(((least == most) | (most == NONE) | several).all()):
            return torch.where(several, SEVERAL, most)
        inside, ends = codes > NONE, []
        for part in self.read(codes):
            first = part.where(inside, torch.inf).amin(dims, keepdim=True)
            ends.append((first, part.where(inside, -torch.inf).amax(dims, keepdim=True)))
        middle = [(first + last) / 2 for first, last in ends[1:]]
        if all(len(part[most > NONE].unique()) == 1 for part in middle):  # a mean over the whole image is no token
            return torch.where(several, SEVERAL, NONE)
        several |= (ends[0][0] != ends[0][1]) & (most > NONE)  # several images
        return torch.where(several, SEVERAL, torch.where(most == NONE, NONE, self.write(ends[0][0], *middle)))

    def agreed(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the common positions of two tensors of the same shape, such as the terms of a sum.

        Positions less than one token apart count as equal, since kernels of even size have no pixel at their centre.
        Tokens of a coarser grid do not move those of a finer one.
        """
        thin = [axis for axis in range(first.dim()) if first.stride(axis) == 0 and second.stride(axis) == 0]
        one, two = (_thin(each, *thin) for each in (first, second))
        if torch.equal(one, two):
            return first
        differ = (one != two) & (one > NONE) & (two > NONE)
        if bool(differ.any()):
            steps = [self.steps(each) for each in (one, two)]
            if all(a >= 2 * b for a, b in zip(*steps, strict=True)):
                one, two, steps = two, one, steps[::-1]
            if not all(b >= 2 * a for a, b in zip(*steps, strict=True)):
                apart = [(a - b).abs() for a, b in zip(self.read(one), self.read(two), strict=True)]
                far = torch.stack([gap >= step for gap, step in zip(apart, (1.0, *steps[0]), strict=True)]).any(0)
                one = torch.where(differ & far, SEVERAL, one)
        found = torch.where(one == NONE, two, one)
        return torch.where((one == SEVERAL) | (two == SEVERAL), SEVERAL, found).expand(first.shape)

    def resampled(self, codes: Tensor, places: Sequence[Tensor]) -> Tensor:
        """Return codes (..., *sizes) at places between the entries along each of the last axes, or outside.

        Positions must be linear along each axis, up to half a step at the border, where a patch may be partly padding.
        They are continued into padding.
        """
        codes = _thin(codes, *range(codes.dim() - len(places)))
        for dim, place in zip(range(codes.dim() - len(places), codes.dim()), places, strict=True):
            size = codes.shape[dim]
            if torch.equal(place, torch.arange(size, dtype=place.dtype)):
                continue
            if bool(((place >= 0) & (place < size) & (place == place.floor())).all()):
                codes = codes.index_select(dim, place.long().to(codes.device))
                continue
            shown = (codes != NONE).movedim(dim, -1).flatten(0, -2).any(0).nonzero().flatten().tolist() or [0]
            first, size = shown[0], shown[-1] - shown[0] + 1
            inner = codes.narrow(dim, first, size)
            shape = [-1 if axis == dim else 1 for axis in range(codes.dim())]
            place = (place.to(inner) - first).reshape(shape)
            index = torch.arange(size).to(inner).reshape(shape)
            linear, parts = (inner > NONE).all(dim, keepdim=True), []
            for part in self.read(inner):
                start, step = line(part, dim)
                linear &= ((part - start - index * step).abs() <= (step.abs() / 2).clamp_min(1)).all(dim, keepdim=True)
                parts.append(start + place * step)
            empty = (inner == NONE).all(dim, keepdim=True)
            codes = torch.where(empty, NONE, torch.where(linear, self.write(*parts), SEVERAL))
        return codes


@final
@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of the entries of a tensor: codes of its shape, with stride 0 along axes where they are equal."""

    codes: Tensor
    columns: Tensor | None = None  # for scores: positions of the second factor; `codes` are those of the first
    summed: bool = False  # whether this is a product along tokens, which has no positions
    softmax: bool = False  # whether there was a softmax after the product

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Positions":
        """Apply a function to all positions."""
        columns = None if self.columns is None else change(self.columns)
        return Positions(change(self.codes), columns, self.summed, self.softmax)


@final
class TokenPositions(TorchDispatchMode):
    """Dispatch mode that follows positions, see the description of this file.

    `attention` is called before each product of attention maps and values, with the maps, (s, n, m), the codes of the
    queries, (s, n), and of the keys, (s, m), and an empty string; or with `None` and the reason why there are no maps.
    If it returns maps, the model uses them instead.
    """

    def __init__(self, attention: Callable[[Tensor, Tensor | None, Tensor | None, str], Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.codes = PositionCodes(())
        self.paused = 0  # number of open `pause` blocks
        self.lost: dict[str, None] = {}  # operations after which positions are unknown
        self._attention = attention

    def start(self, images: Tensor, sizes: tuple[int, ...] = (), before: int = 0) -> None:
        """Set the positions of images, or of tokens, (b, tokens, c), with given sizes and `before` others first.

        Images have the shape (b, c, *sizes); those of a video may also have the shape (b, frames, c, *sizes).
        """
        if sizes:
            self.codes = PositionCodes(sizes)
            codes = self.codes.of_tokens(len(images), images.shape[1], before, images.device)[..., None]
        else:
            channels = 2 if images.dim() == 5 and images.shape[2] in COLOURS and images.shape[1] not in COLOURS else 1
            self.codes = PositionCodes((*images.shape[1:channels], *images.shape[channels + 1 :]))
            codes = self.codes.of_images(len(images), images.device).unsqueeze(channels)
        self.put(images, Positions(codes))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not follow the operations in a `with` block."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def of(self, tensor: Any) -> Positions | None:
        """Return the positions of a tensor; None if they are unknown."""
        return self.known.get(tensor) if isinstance(tensor, Tensor) else None

    def of_rows(self, tensor: Tensor) -> Tensor | None:
        """Return the codes (..., n) of the rows of a tensor (..., n, c); None if they are unknown."""
        found = self.of(tensor)
        if found is None or found.columns is not None or found.summed:
            return None
        made = self.codes.centre(found.codes, -1)[..., 0]
        if bool((made == NONE).all()) and not _even(found.codes, -1):  # rows that extend over the whole image: channels
            return torch.full_like(made, SEVERAL)
        return made

    def put(self, tensor: Any, positions: Positions) -> None:
        """Set the positions of a tensor; ignored if the shapes do not match."""
        if not isinstance(tensor, Tensor) or tensor.dtype == torch.bool:
            return
        shape, given = tuple(tensor.shape), tuple(positions.codes.shape)
        matches = len(shape) == len(given) and all(b in (1, a) for a, b in zip(shape, given, strict=True))
        if matches and tensor.numel() > 0:
            self.known[tensor] = positions.changed(lambda codes: codes.expand(shape))

    def why(self) -> str:
        """Return the reason why positions are unknown."""
        if self.lost:
            return f"the positions of its tokens are lost in the operation {', '.join(self.lost)}"
        return "its tokens do not come from the images; pass grid=(height, width) if the input consists of tokens"

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler (one second) for this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = [] if self.paused else [(each, self.known[each]) for each in _tensors(args) if each in self.known]
        if not known:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):  # flex_attention, for example
            self.lost.setdefault(str(func))
            return func(*args, **kwargs)
        rule = _rule(func)
        if rule is None and func.overloadpacket not in PRODUCTS:  # operations are not decomposed in inference mode
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        with self.pause():
            if func.overloadpacket in PRODUCTS:
                return self._product(func, args, kwargs)
            if rule is _write:  # positions are written before the values
                found: Any = _write(Call(self.codes, func, args, kwargs, args[:1], known))
                out = func(*args, **kwargs)
                self._overwrite(out, found)
                return out
            out = func(*args, **kwargs)
            outs = out if isinstance(out, (tuple, list)) else (out,)
            if not all(isinstance(each, Tensor) for each in outs):  # such as that of `torch.equal`
                return out
            if rule is None or "out" in kwargs:
                self.lost.setdefault(str(func.overloadpacket).removeprefix("aten."))
                found = None
            else:
                found = rule(Call(self.codes, func, args, kwargs, outs, known))
            if "out" in kwargs or _writes(func):
                self._overwrite(outs[0], found)
                return out
            for each, positions in zip(outs, found if isinstance(found, list) else [found] * len(outs), strict=True):
                if positions is not None:
                    self.put(each, positions)
            return out

    def _overwrite(self, written: Tensor, positions: Positions | None) -> None:
        """Set the positions of a tensor that was changed in place, and of all tensors that share its memory."""
        storage = written.untyped_storage()
        shares = [each for each in self.known if each.untyped_storage()._cdata == storage._cdata]
        base = written._base
        if base is not None and not any(each is base for each in shares):
            shares.append(base)
        old = self.known.pop(written, None)
        if positions is not None:
            self.put(written, positions)
        now = self.of(written)
        if all(each is written for each in shares) or (old and now and _equal(old.codes, now.codes)):
            return
        size = storage.nbytes() // written.element_size()
        for each in shares:
            before = self.known.pop(each, None) if each is not written else None
            if (
                each is written
                or now is None
                or now.columns is not None
                or each.element_size() != written.element_size()
            ):
                continue
            memory = torch.full((size,), NONE, dtype=torch.float64, device=written.device)
            place = (each.size(), each.stride(), each.storage_offset())
            if before is not None:
                memory.as_strided(*place).copy_(before.codes)
            memory.as_strided(written.size(), written.stride(), written.storage_offset()).copy_(now.codes)
            self.put(each, Positions(memory.as_strided(*place).clone()))

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Follow a matrix product: along the last axis of the first factor, and the last but one of the second."""
        at = PRODUCTS[func.overloadpacket]
        factors = [self.of(args[at]), self.of(args[at + 1])]
        if all(factor is not None and factor.columns is not None for factor in factors):  # maps that follow each other
            out = func(*args, **kwargs)
            rows, columns = (self.of(args[at + side]) for side in range(2))
            assert rows is not None
            assert columns is not None
            assert columns.columns is not None
            self.put(
                out, Positions(rows.codes[..., :1].expand(out.shape), columns.columns[..., :1, :].expand(out.shape))
            )
            return out
        for side, (factor, dim) in enumerate(zip(factors, (-1, -2), strict=True)):
            if factor is None or factor.columns is None:
                continue
            over_heads = factors[1 - side] is None and _even(factor.codes, dim) and _even(factor.columns, dim)
            if not over_heads:
                return self._attend(func, args, kwargs, at + side, factor)
        out = func(*args, **kwargs)
        found = self._of_product(out, *factors)
        if found is not None:
            self.put(out, found)
        return out

    def _of_product(self, out: Tensor, first: Positions | None, second: Positions | None) -> Positions | None:
        """Return the positions of a product that is not one of attention maps and values."""
        rows = None if first is None else first.changed(lambda codes: self.codes.centre(codes, -1))
        columns = None if second is None else second.changed(lambda codes: self.codes.centre(codes, -2))
        if first is None or second is None:
            return rows or columns
        if first.summed or second.summed:
            self._attention(out, None, None, CHANNELS if first.softmax or second.softmax else LINEAR)
            return columns if first.summed else rows
        if not _even(first.codes, -1) and not _even(second.codes, -2):
            return Positions(out.new_full((1,) * out.dim(), NONE, dtype=torch.float64), summed=True)
        assert rows is not None
        assert columns is not None
        return Positions(rows.codes.expand(out.shape), columns.codes.expand(out.shape))

    def _attend(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, positions: Positions
    ) -> Any:
        """Report attention maps, the argument with the index `at`, and follow their product with the values."""
        assert positions.columns is not None
        transposed = at > PRODUCTS[func.overloadpacket]
        maps, one, two = (each.mT if transposed else each for each in (args[at], positions.codes, positions.columns))
        # The product is along the keys, the last axis.
        queries, keys = (one, two) if not _even(two, -1) or _even(one, -1) else (two, one)
        whole = [each.reshape(-1, *maps.shape[-2:]) for each in (maps, queries, keys)]
        other = self._attention(whole[0], whole[1][..., 0], whole[2][:, 0], "")
        if other is not None:
            other = other.reshape(maps.shape).to(maps.dtype)
            args = (*args[:at], other.mT if transposed else other, *args[at + 1 :])
        out = func(*args, **kwargs)
        self.put(out, Positions(queries[..., :1].mT if transposed else queries[..., :1]))
        return out


def line(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return start and step of positions along an axis; the ends are not used if there are others."""
    count = positions.shape[dim]
    first = int(count > 3)
    start = positions.narrow(dim, first, 1)
    step = (positions.narrow(dim, count - 1 - first, 1) - start) / max(1, count - 1 - 2 * first)
    return start - first * step, step


def at_queries(codes: PositionCodes, positions: Positions, grid: Grid) -> Positions:
    """Return the positions of the queries of a layer of this library, from those of its input, (b, c, *sizes)."""
    places = [axis.query_positions() / axis.spacing for axis in grid.axes]
    return Positions(codes.resampled(positions.codes[:, :1], places))


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _even(codes: Tensor, dim: int) -> bool:
    """Return whether positions are equal along an axis, except for entries without one."""
    if codes.shape[dim] == 1 or codes.stride(dim) == 0:
        return True
    thin = _thin(codes, *(axis for axis in range(codes.dim()) if axis != dim % codes.dim()))
    return bool(((thin == thin.amax(dim, keepdim=True)) | (thin == NONE)).all())


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(*(_thin(each, *range(each.dim())) for each in (first, second)))


def _thin(codes: Tensor, *dims: int) -> Tensor:
    """Shorten those of the given axes that have stride 0 to size 1."""
    for dim in dims:
        if codes.shape[dim] > 1 and codes.stride(dim) == 0:
            codes = codes.narrow(dim, 0, 1)
    return codes


# Rules: the positions of the outputs of an operation.


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


def _write(call: Call) -> Positions | None:
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
            codes = _thin(codes, *range(begin, i))
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
        lambda codes: call.func(_thin(codes, *range(codes.dim())), *call.args[1:], **call.kwargs)
    )


def _pad(call: Call) -> Positions | None:
    pad = list(call.named()["pad"])
    dims = {-1 - index // 2 for index, count in enumerate(pad) if count}

    def change(codes: Tensor) -> Tensor:
        others = (axis for axis in range(codes.dim()) if axis - codes.dim() not in dims)
        made: Tensor = aten.constant_pad_nd(_thin(codes, *others), pad, NONE)
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
        _even(codes, dim) for codes in (positions.codes, positions.columns) for dim in axes
    ):
        return positions.changed(change)
    # The sum of scores over keys has only the positions of queries.
    over_columns = any(not _even(positions.columns, dim) for dim in axes)
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


PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # index of the first factor
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
        _write: (
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


def _writes(func: Any) -> bool:
    """Return whether an operation changes its first argument."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and bool(alias.is_write)


def _rule(func: Any) -> Rule | None:
    """Return the rule of an operation; None if its effect on positions is unknown."""
    if func.overloadpacket in RULES:
        return RULES[func.overloadpacket]
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    if alias is not None and not alias.is_write and func.overloadpacket is not aten.as_strided:
        return _view
    return _combine if torch.Tag.pointwise in func.tags else None
