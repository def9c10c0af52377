"""Multi-head self-attention layers with the input and output shapes of nn.Conv1d, nn.Conv2d and nn.Conv3d.

    out_q = sum_h ( sum_k A_h[q, k] x_k ) W_h + b        equations (11) and (12)

Inputs and outputs are (b, c, *sizes). Channels are last internally, so channels-last inputs are not copied.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real, whole
from attnconv.encodings.base import Encoding
from attnconv.encodings.registry import encoding_named
from attnconv.grid import Border, Padding
from attnconv.layers.checks import check_device_dtype, check_loaded, traced_node
from attnconv.layers.planning import Backend, PlannedLayer
from attnconv.operators.base import AttentionOperator
from attnconv.operators.dense import Dense

_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}  # autocast converts these to a common dtype


class SelfAttention(PlannedLayer):
    """Base class of `SelfAttention1d`, `SelfAttention2d` and `SelfAttention3d`: multi-head self-attention over a grid.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        heads: Number of heads, at least 1.
        encoding: An `Encoding`, or the name of one: `quadratic`, `quadratic-generalized`, `learned`, `learned-content`,
            `sinusoidal`, `absolute-sinusoidal`, `absolute-learned`.
        stride: Distance between neighbouring queries, in positions; one number, or one per axis.
        padding: Positions around the image that the softmax includes: one number, one per axis, or (before, after) per
            axis. Without a window, it has no effect under `renormalise`.
        dilation: Kernel dilation, one number or one per axis. It only scales the initial centres of a quadratic
            encoding given by name.
        border: Border rule: `renormalise`, `zero`, `replicate`, `reflect` or `circular`; see `attnconv.grid`.
        window: Kernel extent per axis, dilation * (kernel_size - 1) + 1, in positions; the output then has a
            convolution's size. None for a layer without a kernel, whose output has ceil(size / stride) positions.
        transposed: Act as a transposed convolution: keys are spaced by `stride`, and `padding` is cropped from the
            output. Requires border `zero` and a window.
        output_padding: Positions added at the end of a transposed layer's output; one number, or one per axis.
        bias: Add a learned bias to the output.
        groups: Number of channel groups, as in a grouped convolution; must divide `in_channels` and `out_channels`.
        head_channels: Value channels D_h per head, for factored weights W_h = W_val,h W_out,h; None for merged weights.
        attention_dropout: Dropout rate of attention probabilities, in [0, 1); if above 0, training stores all of them.
            If attention depends only on positions, the images of a batch share the probabilities and their dropout.
        backend: `auto` chooses by predicted cost, `reference` computes the softmax of all scores, `structured` uses the
            operator of the encoding, and `dense` stores the matrix of that operator. `plan` overrides it.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        stride, padding, dilation, window, output_padding: The arguments, with one entry per axis, or None (`window`).
        encoding: The encoding, an `nn.Module`.
        weight: Merged weights (heads, in_channels / groups, out_channels); None if factored.
        value_weight: Factored weights W_val (heads, in_channels, head_channels), with one group; None if merged.
        output_weight: Factored weights W_out (heads, head_channels, out_channels); None if merged.
        bias: Bias (out_channels,), or None.
        called: Name of the layer in a model, used in error messages about the layer's input; set by `recast`.

    Raises:
        TypeError: If `encoding`, `dtype` or a number of channels, heads or groups has the wrong type.
        ValueError: If an argument is out of range, or `encoding` differs from the layer in its number of heads or axes.
    """

    def __init_subclass__(cls) -> None:
        """Append the documentation of the arguments to the docstring of each subclass, for `help` and editors."""
        super().__init_subclass__()
        if cls.__doc__ and SelfAttention.__doc__:
            about, _, example = inspect.cleandoc(cls.__doc__).partition("Example:")
            shared = inspect.cleandoc(SelfAttention.__doc__)
            cls.__doc__ = f"{about}{shared[shared.index('Args:') :]}\n\nExample:{example}"

    def __init__(  # noqa: PLR0913 - the signature mirrors nn.Conv2d
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
        super().__init__(
            stride=stride,
            padding=padding,
            dilation=dilation,
            border=border,
            window=window,
            transposed=transposed,
            output_padding=output_padding,
        )
        self.in_channels, self.heads = whole("in_channels", in_channels, 1), whole("heads", heads, 1)
        self.out_channels, self.groups = whole("out_channels", out_channels, 1), whole("groups", groups, 1)
        check_device_dtype(device, dtype)
        if not (is_real(attention_dropout) and 0 <= attention_dropout < 1):
            raise ValueError(bad("attention_dropout", "must be a number in [0, 1)", repr(attention_dropout)))
        if backend not in get_args(Backend):
            raise ValueError(bad("backend", f"must be one of {', '.join(get_args(Backend))}", repr(backend)))
        self.attention_dropout = attention_dropout
        self.backend: Backend = backend
        with nullcontext() if device is None else torch.device(device):
            self.encoding = self._encoding(encoding)
            self._make_weights(head_channels)
            self.bias = nn.Parameter(torch.empty(self.out_channels)) if bias else None
            self.reset_parameters()
        self.called = ""
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(check_loaded)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(renew_plan)  # type: ignore[no-untyped-call]

    def _make_weights(self, width: int | None) -> None:
        heads, inputs, outputs, groups = self.heads, self.in_channels, self.out_channels, self.groups
        if inputs % groups or outputs % groups:
            got = f"groups={groups} for {inputs} -> {outputs} channels"
            raise ValueError(bad("groups", "must divide in_channels and out_channels", got))
        if width is not None and whole("head_channels", width, 1) and groups > 1:
            got = f"head_channels={width} with groups={groups}"
            raise ValueError(bad("head_channels", "must be None if groups is greater than 1", got))
        self.weight = nn.Parameter(torch.empty(heads, inputs // groups, outputs)) if width is None else None
        self.value_weight = None if width is None else nn.Parameter(torch.empty(heads, inputs, width))
        self.output_weight = None if width is None else nn.Parameter(torch.empty(heads, width, outputs))

    if TYPE_CHECKING:  # nn.Module returns Any

        def __call__(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor: ...  # noqa: A002

    def reset_parameters(self) -> None:
        """Initialise the weights and bias as nn.Linear does; leave the encoding unchanged."""
        width = self.in_channels // self.groups if self.output_weight is None else self.output_weight.shape[1]
        for parameter in (self.weight, self.value_weight, self.output_weight, self.bias):
            if parameter is not None:
                fan_in = self.in_channels if parameter is self.value_weight else self.heads * width
                nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(
        self,
        input: Float[Tensor, "*images"],  # noqa: A002 - named as in nn.Conv*d
        output_size: Sequence[int] | None = None,
    ) -> Float[Tensor, "*outputs"]:
        """Compute the output, (b, out_channels, *output sizes), by equation (12) of the paper.

        Args:
            input: Images, (b, in_channels, *sizes), or a single image, (in_channels, *sizes).
            output_size: Output size of a transposed layer, used instead of `output_padding`: one number per axis, or
                the full output shape, as in nn.ConvTranspose2d.

        Raises:
            ValueError: If the input has the wrong shape or an empty axis, or the output cannot have size `output_size`.
            TypeError: If the input is not a tensor, or its dtype differs from the layer's while autocast is disabled.
        """
        if (node := traced_node(self, input, output_size)) is not None:
            return node
        pixels = self._pixels(input)
        operator = self._operator(pixels, output_size)
        if self.attention_dropout > 0 and self.training:
            operator = Dense(operator.grid, F.dropout(operator.to_dense(), self.attention_dropout))
        if self.value_weight is None or self.output_weight is None:
            assert self.weight is not None
            out = operator.contract(pixels, self.weight, self.groups)
        else:
            values = torch.einsum("b...c,hce->bh...e", pixels, self.value_weight)
            out = torch.einsum("bh...e,hed->b...d", operator.apply(values), self.output_weight)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        out = out.permute(0, -1, *range(1, self.dims + 1))
        return out if input.dim() > self.dims + 1 else out[0]

    @final
    def operator(self, x: Float[Tensor, "*images"]) -> AttentionOperator:
        """Return the attention operator for images (b, in_channels, *sizes), with the errors of `forward`.

        If attention depends only on positions, only the shape of x matters.
        """
        return self._operator(self._pixels(x))

    @final
    def score_terms(self, x: Float[Tensor, "*images"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        """Return the terms of equation (7) or (8) at all lattice points; attention is the softmax of their sum."""
        pixels = self._pixels(x)
        return self.encoding.terms(self.grid(pixels.shape[1:-1]), pixels)

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
            raise ValueError(bad("encoding", f"must have heads={self.heads} and dims={self.dims}", got))
        return encoding

    def _pixels(self, x: object) -> Float[Tensor, "b *sizes c"]:
        """Validate the input and return it channels last; add a batch dimension to a single image."""
        weight = self.weight if self.weight is not None else self.value_weight
        assert weight is not None
        kind, dims, dtype = f"SelfAttention{self.dims}d", self.dims, weight.dtype

        def wrong(requirement: str, got: str, fix: str = "") -> str:
            return bad("input", requirement, got, fix, origin=f"at {self.called}" if self.called else "")

        if not isinstance(x, Tensor):
            raise TypeError(wrong("must be a tensor", type(x).__name__))
        x = x[None] if x.dim() == dims + 1 else x
        if x.dim() != dims + 2:
            sizes = ("length", "height, width", "depth, height, width")[dims - 1]
            raise ValueError(wrong(f"must have shape (batch, channels, {sizes}) for {kind}", f"shape {tuple(x.shape)}"))
        if x.shape[1] != self.in_channels:
            raise ValueError(wrong(f"must have {self.in_channels} channels", f"shape {tuple(x.shape)}"))
        if 0 in x.shape[2:]:
            raise ValueError(wrong("must not have empty axes", f"shape {tuple(x.shape)}"))
        if x.dtype != dtype and not ({x.dtype, dtype} <= _AUTOCAST and torch.is_autocast_enabled(x.device.type)):
            fix = f"Use input.to({dtype})" + (f" or layer.to({x.dtype})." if x.is_floating_point() else ".")
            raise TypeError(wrong(f"must have the layer's dtype {dtype}", str(x.dtype), fix))
        return x.permute(0, *range(2, dims + 2), 1)


@final
class SelfAttention1d(SelfAttention):
    """Multi-head self-attention over sequences: (b, in_channels, length) -> (b, out_channels, length).

    Example:
        >>> SelfAttention1d(2, 3, heads=5)(torch.zeros(1, 2, 10)).shape
        torch.Size([1, 3, 10])
    """

    dims = 1


@final
class SelfAttention2d(SelfAttention):
    """Multi-head self-attention over images: (b, in_channels, height, width) -> (b, out_channels, height, width).

    Example:
        >>> layer, x = SelfAttention2d(3, 8, heads=9, stride=2), torch.zeros(1, 3, 5, 6)
        >>> layer(x).shape, layer.operator(x).rows([0, 4]).shape
        (torch.Size([1, 8, 3, 3]), torch.Size([1, 9, 2, 30]))
    """

    dims = 2


@final
class SelfAttention3d(SelfAttention):
    """Multi-head self-attention over volumes; inputs and outputs are (b, channels, depth, height, width).

    Example:
        >>> SelfAttention3d(1, 2, heads=4)(torch.zeros(1, 1, 3, 4, 5)).shape
        torch.Size([1, 2, 3, 4, 5])
    """

    dims = 3


def renew_plan(layer: nn.Module, _incompatible: object) -> None:
    """Read planned shifts again after a state dict is loaded, and discard other plans."""
    assert isinstance(layer, SelfAttention)
    if layer._plan == "shift":
        layer.renew_shifts()
    else:
        layer.unplan()
