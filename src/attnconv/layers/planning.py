"""Choice of a layer's operator: that of its encoding, a dense matrix, or shifts for hard heads."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.encodings.base import Encoding
from attnconv.grid import Grid, per_axis
from attnconv.layers.checks import check_finite
from attnconv.layers.geometry import GridLayer
from attnconv.operators.base import AttentionOperator, has_values, product_dtype
from attnconv.operators.dense import Dense
from attnconv.operators.kernels.recompute_in_backward import is_transformed
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.planner import fastest
from attnconv.operators.shift import Shift

Backend: TypeAlias = Literal["auto", "reference", "dense", "structured"]
Plan: TypeAlias = Literal["dense", "structured", "shift"]


class PlannedLayer(GridLayer):
    """Base class of layers that choose their operator at every call, or once in `plan`."""

    in_channels: int
    out_channels: int
    heads: int
    encoding: Encoding
    backend: Backend
    called: str
    _plan: Plan | None = None
    _shifts: tuple[tuple[int, ...], ...] = ()
    _read: tuple[Tensor, ...] = ()  # copies of the tensors from which shifts were read

    @final
    def plan(self, sizes: Sequence[int], *, choose: Literal["auto"] | Plan = "auto") -> Plan:
        """Choose the operator once, for images of about the given size, and return the choice.

        Forward passes, including traced and exported ones, use this operator until `unplan` is called. `shift` follows
        changes of the centres, which every call compares with a copy (on a GPU, the CPU waits for the result), and is
        discarded if heads become soft; loading a state dict discards other plans. Compiled models, CUDA graphs and
        transforms of `torch.func` do not follow changes. Without a plan, `backend` applies: the operator is chosen at
        every call, and is never `shift`.

        Args:
            sizes: Image size per axis, in positions.
            choose: `dense` or `structured`, as in `backend`; `shift`, only for heads with one key per query; or
                `auto`, for `shift` if all heads have one key per query, otherwise the faster of the other two.

        Raises:
            ValueError: If an argument is out of range, a parameter is not finite, or `shift` is chosen for soft heads.
        """
        if choose not in ("auto", *get_args(Plan)):
            raise ValueError(bad("choose", "must be one of auto, dense, structured, shift", repr(choose)))
        check_finite(self.named_parameters())
        sizes = per_axis("sizes", sizes, self.dims, least=1)
        shifts = self.hard_shifts()
        if choose == "shift" and shifts is None:
            fix = "Increase alpha and use integer centres, or choose 'structured'."
            raise ValueError(bad("choose", "must not be 'shift' if heads attend to several keys", "soft heads", fix))
        if choose == "auto":
            choose = self._form(self.grid(sizes), 1, next(self.parameters())) if shifts is None else "shift"
        self._plan, self._shifts, self._read = choose, shifts or (), self._copies()
        return choose

    @final
    def hard_shifts(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the single shift that each head attends to, one tuple per head; None if any head is soft."""
        return self.encoding.hard_shifts()

    @final
    def unplan(self) -> None:
        """Discard the plan, so that the operator is chosen at every call."""
        self._plan, self._shifts = None, ()

    def renew_shifts(self) -> None:
        """Read planned shifts again if tensors of the encoding have changed; discard the plan if heads are soft."""
        tensors = self._tensors()
        if not tensors:  # a replica of nn.DataParallel stores parameters as plain attributes
            return
        captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if captured or is_transformed() or not all(map(has_values, tensors)):
            return
        # Versions of tensors would not do: fused optimisers and writes through `.data` leave them unchanged.
        if len(tensors) == len(self._read) and all(map(_equal, tensors, self._read)):
            return
        shifts = self.hard_shifts()
        if shifts is not None and shifts != self._shifts and self._read and tensors[0].dtype != self._read[0].dtype:
            got, fix = f"different shifts in {tensors[0].dtype}", "Use float32 for this layer."
            raise ValueError(bad(self.called or "layer", "must keep its shifts if its dtype changes", got, fix))
        if shifts is None:
            self.unplan()
        else:
            self._shifts, self._read = shifts, self._copies()

    def _tensors(self) -> list[Tensor]:
        return [*self.encoding.parameters(), *self.encoding.buffers()]

    def _copies(self) -> tuple[Tensor, ...]:
        return tuple(tensor.detach().clone() for tensor in self._tensors())

    def _operator(self, pixels: Tensor, output_size: Sequence[int] | None = None) -> AttentionOperator:
        try:
            grid = self.grid(pixels.shape[1:-1], output_size)
        except ValueError as error:
            raise ValueError(f"{self.called}: {error}" if self.called else str(error)) from error
        if self._plan == "shift" and not torch.compiler.is_compiling():
            self.renew_shifts()
        if self._plan == "shift":
            parameters = list(self.encoding.parameters())
            trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
            # The anchor, which receives zero gradients, is all parameters if any is trained, otherwise any one of them.
            some = parameters[0] if parameters else pixels.new_zeros(())
            anchor = torch.cat([parameter.flatten() for parameter in parameters]) if trained else some
            return Shift(grid, self._shifts, anchor)
        if self._plan is None and self.backend == "reference":
            terms = torch.broadcast_tensors(*self.encoding.terms(grid, pixels).values())
            return Dense.from_scores(grid, torch.stack(terms).sum(0))
        operator = self.encoding.operator(grid, pixels)
        dense = (self._plan or self.backend) == "dense"
        known = not torch.compiler.is_compiling() and pixels.device.type != "meta"
        if self._plan is None and self.backend == "auto" and known and isinstance(operator, Kronecker):
            dense = self._form(grid, pixels.shape[0], pixels) == "dense"
        return Dense.of(operator) if dense else operator

    def _form(self, grid: Grid, batch: int, like: Tensor) -> Literal["dense", "structured"]:
        """Return the form of the operator that is predicted to be faster in the dtype and on the device of `like`."""
        channels, device = min(self.in_channels, self.out_channels), like.device.type
        low = product_dtype(like) in (torch.bfloat16, torch.float16)
        training = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        return fastest(grid, self.heads, channels, batch, low=low, training=training, device=device)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
