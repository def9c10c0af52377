"""Follow the positions of an image's tokens through a running model.

Beside each tensor that depends on the images, a tensor of the same shape holds the position that each entry comes from.
Operations that only move entries (views, permutations, padding, windows, concatenation) move the positions in the same
way. Operations on channels (linear maps, normalisation) keep them. Where entries of several positions are combined, the
result is at their centre: the centre of a convolution's kernel, a pooling window, a patch, or an averaged axis.

The product of two such tensors along their channels contains scores: each entry has the positions of its row and of its
column. The product of scores, usually after a softmax, with a further tensor along the positions of the columns is
attention.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from attnconv.grid import Grid
from attnconv.inspect.position_codes import NONE, SEVERAL, PositionCodes, Positions, are_equal, is_even
from attnconv.inspect.position_rules import Call, rule_of, write_positions, writes

# Priority of the number of channels in finding the channel axis of a video, lowest first. Latents have 4 or 16.
CHANNEL_RANKS = {3: 0, 1: 1, 4: 2, 16: 2}
CHANNELS = "it attends to channels instead of tokens"
LINEAR = "it sums over tokens before it combines them with queries, so it has no attention map"

aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # index of the first factor


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

        Images have the shape (b, c, *sizes). Videos may also have the shape (b, frames, c, *sizes); the channels are
        recognised by their number (`CHANNEL_RANKS`).
        """
        if sizes:
            self.codes = PositionCodes(sizes)
            codes = self.codes.of_tokens(len(images), images.shape[1], before, images.device)[..., None]
        else:
            channels = min(
                (1, 2) if images.dim() == 5 else (1,), key=lambda axis: CHANNEL_RANKS.get(images.shape[axis], 3)
            )
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
        if bool((made == NONE).all()) and not is_even(
            found.codes, -1
        ):  # rows that extend over the whole image: channels
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
        rule = rule_of(func)
        if rule is None and func.overloadpacket not in PRODUCTS:  # operations are not decomposed in inference mode
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        with self.pause():
            if func.overloadpacket in PRODUCTS:
                return self._product(func, args, kwargs)
            if rule is write_positions:  # positions are written before the values
                found: Any = write_positions(Call(self.codes, func, args, kwargs, args[:1], known))
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
            if "out" in kwargs or writes(func):
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
        if all(each is written for each in shares) or (old and now and are_equal(old.codes, now.codes)):
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
            over_heads = factors[1 - side] is None and is_even(factor.codes, dim) and is_even(factor.columns, dim)
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
        if not is_even(first.codes, -1) and not is_even(second.codes, -2):
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
        queries, keys = (one, two) if not is_even(two, -1) or is_even(one, -1) else (two, one)
        whole = [each.reshape(-1, *maps.shape[-2:]) for each in (maps, queries, keys)]
        other = self._attention(whole[0], whole[1][..., 0], whole[2][:, 0], "")
        if other is not None:
            other = other.reshape(maps.shape).to(maps.dtype)
            args = (*args[:at], other.mT if transposed else other, *args[at + 1 :])
        out = func(*args, **kwargs)
        self.put(out, Positions(queries[..., :1].mT if transposed else queries[..., :1]))
        return out


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
