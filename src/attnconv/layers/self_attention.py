"""SelfAttention1d/2d/3d: multi-head self-attention over images, a drop-in for nn.Conv1d/2d/3d.

    out_q = sum_h ( sum_k A_h[q, k] x_k ) W_h + b                                        equations (11) and (12)

The encoding gives A, the operator contracts it with the image and with one matrix per head. W_h is one matrix (merged)
or W_val,h W_out,h through `head_channels` numbers (factored). Images are (b, c, *sizes) outside, channels last inside;
a tensor in channels-last memory format passes without a copy.
"""

import abc
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import FLOATING
from attnconv._util.value_checks import is_real, whole
from attnconv.encodings.base import Encoding
from attnconv.encodings.registry import encoding_named
from attnconv.grid import Border, Grid, Padding, check_border, padding_pairs, per_axis
from attnconv.operators.base import AttentionOperator, product_dtype
from attnconv.operators.dense import Dense
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.planner import fastest
from attnconv.operators.shift import Shift

Backend: TypeAlias = Literal["auto", "reference", "dense", "structured"]
BACKENDS: tuple[str, ...] = get_args(Backend)
Plan: TypeAlias = Literal["dense", "structured", "shift"]
AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}  # what autocast brings to one dtype


class SelfAttention(nn.Module, abc.ABC):
    """Multi-head self-attention over a grid; abstract, use `SelfAttention1d`, `SelfAttention2d` or `SelfAttention3d`.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        heads: Number of heads, at least 1.
        encoding: An `Encoding`, or the name of one: `quadratic`, `quadratic-generalized`, `learned`, `learned-content`,
            `sinusoidal`, `absolute-sinusoidal`, `absolute-learned`.
        stride: Distance between queries, in pixels; one number or one per axis. The output has ceil(size / stride).
        padding: Points that the border rule adds around the image: a number, one per axis, or (before, after) per axis.
        dilation: Factor on the centres that an encoding made by name starts from; one number or one per axis. A free
            layer has no kernel, so nothing else depends on it.
        border: `renormalise`, `zero`, `replicate`, `reflect` or `circular`; see `Grid`.
        window: None, or the extent per axis of the convolution whose number of outputs the layer takes over.
        transposed: Stand the keys `stride` apart, as a transposed convolution does; needs border `zero` and a window,
            and `padding` is then what is cut off the output.
        output_padding: Outputs that a transposed layer adds at the end; one number or one per axis.
        bias: Add a learned vector to the output.
        groups: Channel groups, as in a grouped convolution; divides both numbers of channels.
        head_channels: None for merged weights W_h, or the width D_h of factored ones, W_h = W_val,h W_out,h.
        attention_dropout: Probability of dropping an attention probability in training; runs dense.
        backend: `auto` chooses by predicted cost; `reference` is the softmax of all scores, the formula itself;
            `structured` the encoding's own operator; `dense` stores that operator's matrix. See also `plan`.
        device: Where the parameters live.
        dtype: Their dtype.

    Attributes:
        encoding: The encoding, with its parameters.
        weight: Merged weights (heads, in_channels / groups, out_channels); None if factored.
        value_weight, output_weight: Factored weights (heads, in_channels, head_channels) and
            (heads, head_channels, out_channels); None if merged.
        bias: (out_channels,), or None.
        called: The layer's name in a model, quoted in messages about its input; `recast` sets it.

    Raises:
        ValueError: An argument is out of range, or the encoding has another number of heads or axes.
    """

    dims: ClassVar[int]

    def __init__(  # noqa: PLR0913 - the public face mirrors nn.Conv2d's
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        *,
        encoding: Encoding | str = "quadratic",
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        border: Border = "renormalise",
        window: Sequence[int] | None = None,
        bias: bool = True,
        groups: int = 1,
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
        head_channels: int | None = None,
        attention_dropout: float = 0.0,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = (
            whole("in_channels", in_channels, 1),
            whole("out_channels", out_channels, 1),
        )
        self.heads, self.groups = whole("heads", heads, 1), whole("groups", groups, 1)
        _check_groups(self.in_channels, self.out_channels, self.groups, head_channels)
        check_border(border)
        check_device_dtype(device, dtype)
        _check_running(attention_dropout, backend)
        self.stride = per_axis("stride", stride, self.dims, least=1)
        self.padding = padding_pairs(padding, self.dims)
        self.dilation = per_axis("dilation", dilation, self.dims, least=1)
        self.border: Border = border
        self.window = None if window is None else per_axis("window", window, self.dims, least=1)
        self.transposed = transposed
        self.output_padding = per_axis("output_padding", output_padding, self.dims, least=0)
        self._check_transposed()
        self.attention_dropout = attention_dropout
        self.backend: Backend = backend
        self.encoding = self._encoding(encoding)
        self._make_weights(head_channels)
        self.bias = nn.Parameter(torch.empty(self.out_channels)) if bias else None
        self.called = ""
        self._plan: Plan | None = None
        self._shifts: tuple[tuple[int, ...], ...] = ()
        self.reset_parameters()
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(check_loaded)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(discard_plan)  # type: ignore[no-untyped-call]

    def _make_weights(self, head_channels: int | None) -> None:
        """Merged weights, or factored ones."""
        self.weight: nn.Parameter | None = None
        self.value_weight: nn.Parameter | None = None
        self.output_weight: nn.Parameter | None = None
        if head_channels is None:
            self.weight = nn.Parameter(torch.empty(self.heads, self.in_channels // self.groups, self.out_channels))
        else:
            self.value_weight = nn.Parameter(torch.empty(self.heads, self.in_channels, head_channels))
            self.output_weight = nn.Parameter(torch.empty(self.heads, head_channels, self.out_channels))

    @property
    def kernel_size(self) -> tuple[int, ...] | None:
        """Positions per axis of the kernel that the window is the extent of; None for a free layer."""
        if self.window is None:
            return None
        return tuple((extent - 1) // step + 1 for extent, step in zip(self.window, self.dilation, strict=True))

    def reset_parameters(self) -> None:
        """Draw weights and bias as nn.Linear(heads * in_channels, out_channels) does; the encoding keeps its own."""
        if self.weight is not None:
            fan_in = self.heads * (self.in_channels // self.groups)
            nn.init.uniform_(self.weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        if self.value_weight is not None and self.output_weight is not None:
            fan_in = self.heads * self.output_weight.shape[1]
            nn.init.uniform_(self.value_weight, -1 / math.sqrt(self.in_channels), 1 / math.sqrt(self.in_channels))
            nn.init.uniform_(self.output_weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(
        self,
        input: Float[Tensor, "*images"],  # noqa: A002 - the name that nn.Conv*d gives it
        output_size: Sequence[int] | None = None,
    ) -> Float[Tensor, "*outputs"]:
        """The layer's output (b, out_channels, *queries), equation (12).

        Args:
            input: Images of any size, (b, in_channels, *sizes), or one image without b.
            output_size: Of a transposed layer, the size of the output where `output_padding` is not to decide it: per
                axis, or the whole shape, as nn.ConvTranspose2d takes it.

        Raises:
            ValueError: Wrong rank or channels, an axis without a pixel, or an output size that cannot be reached.
            TypeError: The input is no tensor, or has another dtype than the layer and no autocast is on.
        """
        pixels = self._pixels(input)
        operator = self._operator(pixels, output_size)
        if self.attention_dropout > 0 and self.training:
            operator = Dense(operator.grid, F.dropout(operator.to_dense(), self.attention_dropout))
        if self.weight is not None:
            out = operator.contract(pixels, self.weight, self.groups)
        else:
            assert self.value_weight is not None
            assert self.output_weight is not None
            values = torch.einsum("b...c,hce->bh...e", pixels, self.value_weight)
            out = torch.einsum("bh...e,hed->b...d", operator.apply(values), self.output_weight)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        out = out.permute(0, -1, *range(1, self.dims + 1))
        return out if input.dim() > self.dims + 1 else out[0]

    @final
    def operator(self, x: Float[Tensor, "*images"]) -> AttentionOperator:
        """The attention operator that the layer uses on x; a position-only encoding looks at x's shape alone."""
        return self._operator(self._pixels(x))

    @final
    def score_terms(self, x: Float[Tensor, "*images"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        """The terms of equation (7) or (8) apart, each over the lattice; the softmax of their sum is the attention."""
        pixels = self._pixels(x)
        return self.encoding.terms(self.grid(pixels.shape[1:-1]), pixels)

    @final
    def grid(self, sizes: Sequence[int], output_size: Sequence[int] | None = None) -> Grid:
        """The grid of this layer over an image of `sizes`; `output_size` as in `forward`.

        Raises:
            ValueError: The window exceeds the padded image, or the output size cannot be reached.
        """
        if not self.transposed:
            if output_size is not None:
                raise ValueError(bad("output_size", "is for transposed layers only", tuple(output_size)))
            make = Grid.make if torch.compiler.is_compiling() or not _all_plain(sizes) else _known_grid
            return make(tuple(sizes), stride=self.stride, padding=self.padding, border=self.border, window=self.window)
        assert self.window is not None
        extra = self.output_padding
        if output_size is not None:
            least = Grid.transposed(sizes, stride=self.stride, padding=self.padding, window=self.window).query_sizes
            wanted = tuple(output_size)[-self.dims :]
            extra = tuple(want - have for want, have in zip(wanted, least, strict=False))
            reached = all(0 <= more < step for more, step in zip(extra, self.stride, strict=False))
            if len(wanted) < self.dims or not reached:
                most = tuple(have + step - 1 for have, step in zip(least, self.stride, strict=True))
                raise ValueError(bad("output_size", f"must lie between {least} and {most}", tuple(output_size)))
        return Grid.transposed(
            sizes, stride=self.stride, padding=self.padding, output_padding=extra, window=self.window
        )

    @final
    def plan(self, sizes: Sequence[int], *, choose: Literal["auto"] | Plan = "auto") -> Plan:
        """Decide now how the layer runs on images of about `sizes`, and keep to it, also when traced or exported.

        A forward pass never looks at a parameter's value, and under a compiler not at a size; a plan may do both. With
        `auto` hard heads are frozen as shifts, small images run dense and others by structure. Frozen shifts do not
        follow later changes of the centres; `unplan`, or loading a state dict, discards the plan.

        Args:
            sizes: Pixels per axis.
            choose: `auto`, or what to fix: `dense`, `structured`, or `shift`.

        Returns:
            What was chosen.

        Raises:
            ValueError: There is no such choice, `shift` was asked for and some head does not attend a single key, or a
                parameter is NaN or infinite.
        """
        if choose not in ("auto", *get_args(Plan)):
            raise ValueError(bad("choose", "must be one of auto, dense, structured, shift", repr(choose)))
        check_finite(self.named_parameters())
        sizes = per_axis("sizes", sizes, self.dims, least=1)
        shifts = self.hard_shifts()
        if choose == "shift" and shifts is None:
            fix = "Harden the heads (a larger alpha, whole-number centres) or choose 'structured'."
            raise ValueError(bad("choose", "'shift' needs every head to attend a single key", "soft heads", fix))
        if choose == "auto":
            choose = self._form(self.grid(sizes), 1, self._dtype) if shifts is None else "shift"
        self._plan, self._shifts = choose, shifts or ()
        return choose

    @final
    def hard_shifts(self) -> tuple[tuple[int, ...], ...] | None:
        """The shift that each head attends alone, to its dtype's precision; None where a head is soft."""
        return self.encoding.hard_shifts()

    @final
    def unplan(self) -> None:
        """Discard the plan: choose anew at every call."""
        self._plan, self._shifts = None, ()

    def extra_repr(self) -> str:
        text = (
            f"{self.in_channels}, {self.out_channels}, heads={self.heads}, stride={self.stride}, border={self.border}"
        )
        if self.transposed:
            text += f", transposed=True, output_padding={self.output_padding}"
        if any(pad != (0, 0) for pad in self.padding):
            text += f", padding={self.padding}"
        if self.groups > 1:
            text += f", groups={self.groups}"
        if self.output_weight is not None:
            text += f", head_channels={self.output_weight.shape[1]}"
        return text + ("" if self.backend == "auto" else f", backend={self.backend}")

    def _encoding(self, encoding: Encoding | str) -> Encoding:
        if isinstance(encoding, str):
            made = encoding_named(encoding, self.in_channels, self.heads, self.dims)
            if (found := made.gaussians()) is not None:
                with torch.no_grad():
                    found.centres.mul_(torch.tensor(self.dilation))
            return made
        if not isinstance(encoding, Encoding):
            raise TypeError(bad("encoding", "must be an Encoding or the name of one", type(encoding).__name__))
        if (encoding.heads, encoding.dims) != (self.heads, self.dims):
            got = f"heads={encoding.heads}, dims={encoding.dims}"
            raise ValueError(
                bad("encoding", f"must have heads={self.heads} and dims={self.dims} as the layer does", got)
            )
        return encoding

    def _operator(self, pixels: Tensor, output_size: Sequence[int] | None = None) -> AttentionOperator:
        try:
            grid = self.grid(pixels.shape[1:-1], output_size)
        except ValueError as error:
            raise ValueError(f"{self.called}: {error}" if self.called else str(error)) from error
        if self._plan == "shift":
            return Shift(grid, self._shifts, _anchor(self.encoding))
        if self.backend == "reference":
            return Dense.from_scores(grid, torch.stack(torch.broadcast_tensors(*self._terms(grid, pixels))).sum(0))
        operator = self.encoding.operator(grid, pixels)
        if self._plan == "dense" or self.backend == "dense" or self._better_dense(operator, pixels):
            return Dense.of(operator)
        return operator

    def _check_transposed(self) -> None:
        if not self.transposed:
            if any(self.output_padding):
                raise ValueError(bad("output_padding", "is for transposed layers only", self.output_padding))
        elif self.border != "zero" or self.window is None:
            got = f"border={self.border!r}, window={self.window}"
            raise ValueError(bad("transposed", "needs border 'zero' and the window of a kernel", got))

    def _terms(self, grid: Grid, pixels: Tensor) -> list[Tensor]:
        return list(self.encoding.terms(grid, pixels).values())

    def _better_dense(self, operator: AttentionOperator, pixels: Tensor) -> bool:
        """Whether auto prefers the product of small factors as one matrix; no question under a compiler."""
        if self._plan is not None or self.backend != "auto" or torch.compiler.is_compiling():
            return False
        if not isinstance(operator, Kronecker) or pixels.device.type == "meta":
            return False
        return self._form(operator.grid, pixels.shape[0], product_dtype(pixels)) == "dense"

    def _form(self, grid: Grid, batch: int, dtype: torch.dtype) -> Literal["dense", "structured"]:
        """What the planner predicts to be fastest."""
        channels, device = min(self.in_channels, self.out_channels), next(self.parameters()).device.type
        low = dtype in (torch.bfloat16, torch.float16)
        training = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        return fastest(grid, self.heads, channels, batch, low=low, training=training, device=device)

    @property
    def _dtype(self) -> torch.dtype:
        weight = self.weight if self.weight is not None else self.value_weight
        assert weight is not None
        return weight.dtype

    def _pixels(self, x: Any) -> Float[Tensor, "b *sizes c"]:
        """The input, checked, channels last; one image becomes a batch of one."""
        if not isinstance(x, Tensor):
            raise TypeError(self._wrong(f"{self._kind} takes a tensor", type(x).__name__))
        if x.dim() == self.dims + 1:
            x = x[None]
        if x.dim() != self.dims + 2:
            sizes = ("length", "height, width", "depth, height, width")[self.dims - 1]
            raise ValueError(self._wrong(f"{self._kind} takes (batch, channels, {sizes})", f"shape {tuple(x.shape)}"))
        if x.shape[1] != self.in_channels:
            raise ValueError(
                self._wrong(f"{self._kind} was made for {self.in_channels} channels", f"shape {tuple(x.shape)}")
            )
        if 0 in x.shape[2:]:
            raise ValueError(self._wrong("every axis needs at least one pixel", f"shape {tuple(x.shape)}"))
        dtype = self._dtype
        if x.dtype != dtype and not ({x.dtype, dtype} <= AUTOCAST and torch.is_autocast_enabled(x.device.type)):
            fix = f"Convert with x.to({dtype})" + (f" or layer.to({x.dtype})." if x.is_floating_point() else ".")
            raise TypeError(self._wrong(f"must have the layer's dtype {dtype}", str(x.dtype), fix))
        return x.permute(0, *range(2, self.dims + 2), 1)

    def _wrong(self, requirement: str, got: str, fix: str = "") -> str:
        """Words about an input."""
        return bad("input", requirement, got, fix, origin=f"at {self.called}" if self.called else "")

    @property
    def _kind(self) -> str:
        return f"SelfAttention{self.dims}d"


@final
class SelfAttention1d(SelfAttention):
    """Multi-head self-attention over sequences: (b, in_channels, length) -> (b, out_channels, length).

    See `SelfAttention` for the arguments.

    Example:
        >>> import torch
        >>> SelfAttention1d(2, 3, heads=5)(torch.zeros(1, 2, 10)).shape
        torch.Size([1, 3, 10])
    """

    dims = 1


@final
class SelfAttention2d(SelfAttention):
    """Multi-head self-attention over images: (b, in_channels, height, width) -> (b, out_channels, height, width).

    See `SelfAttention` for the arguments.

    Example:
        >>> import torch
        >>> layer = SelfAttention2d(3, 8, heads=9, stride=2)
        >>> layer(torch.zeros(1, 3, 5, 6)).shape
        torch.Size([1, 8, 3, 3])
        >>> layer.operator(torch.zeros(1, 3, 5, 6)).rows(torch.tensor([0, 4])).shape
        torch.Size([1, 9, 2, 30])
    """

    dims = 2


@final
class SelfAttention3d(SelfAttention):
    """Multi-head self-attention over volumes: (b, in, depth, height, width) -> (b, out, depth, height, width).

    See `SelfAttention` for the arguments.

    Example:
        >>> import torch
        >>> SelfAttention3d(1, 2, heads=4)(torch.zeros(1, 1, 3, 4, 5)).shape
        torch.Size([1, 2, 3, 4, 5])
    """

    dims = 3


def _anchor(encoding: Encoding) -> Tensor:
    """What hard heads hang their zero gradients on: every parameter that is trained, else any one."""
    parameters = list(encoding.parameters())
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        return torch.cat([parameter.flatten() for parameter in parameters])
    return parameters[0]


def _all_plain(sizes: Sequence[int]) -> bool:
    return all(type(size) is int for size in sizes)


_known_grid = functools.lru_cache(Grid.make)


def check_device_dtype(device: torch.device | str | None, dtype: object) -> None:
    """Refuse what no layer can compute in: dtypes other than `FLOATING`, and float64 on Apple's MPS."""
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(bad("dtype", f"must be one of {', '.join(map(str, FLOATING))}", repr(dtype)))
    if dtype == torch.float64 and device is not None and torch.device(device).type == "mps":
        raise TypeError(bad("dtype", "Apple's MPS has no float64", str(dtype), "Use torch.float32 there."))


def _check_running(attention_dropout: float, backend: str) -> None:
    if not (is_real(attention_dropout) and 0 <= attention_dropout < 1):
        requirement = "must be a number of at least 0 and below 1"
        raise ValueError(bad("attention_dropout", requirement, repr(attention_dropout)))
    if backend not in BACKENDS:
        raise ValueError(bad("backend", f"must be one of {', '.join(BACKENDS)}", repr(backend)))


def _check_groups(inputs: int, outputs: int, groups: int, head_channels: int | None) -> None:
    if inputs % groups or outputs % groups:
        got = f"groups={groups} for {inputs} -> {outputs} channels"
        raise ValueError(bad("groups", "must divide in_channels and out_channels", got))
    if head_channels is not None and whole("head_channels", head_channels, 1) and groups > 1:
        got = f"head_channels={head_channels} with groups={groups}"
        raise ValueError(bad("head_channels", "factored weights have one group", got))


def check_loaded(layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """What every layer does before loading: values must be numbers, or the layer keeps those that it has.

    Raises:
        ValueError: Some value of the state dict is NaN or infinite.
    """
    loaded = {name: state[prefix + name] for name, _ in layer.named_parameters() if prefix + name in state}
    check_finite(loaded.items(), origin="from the loaded state dict")


def discard_plan(layer: nn.Module, _incompatible: object) -> None:
    """What every layer does after loading: a plan made for other values no longer holds."""
    assert isinstance(layer, SelfAttention)
    layer.unplan()


def check_finite(values: Iterable[tuple[str, object]], *, origin: str = "") -> None:
    """Refuse tensors with NaN or infinity; what is on the meta device has no values.

    Args:
        values: By their names.
        origin: Where they come from.

    Raises:
        ValueError: Some value is NaN or infinite.
    """
    for name, value in values:
        if isinstance(value, Tensor) and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise ValueError(bad(name, "must be finite", "NaN or infinite values", origin=origin))
