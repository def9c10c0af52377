"""Gated positional self-attention (d'Ascoli et al., 2021), computed exactly without storing n x n probabilities.

    out_q = sum_h ( (1 - g_h) softmax_k(q_q . k_k / sqrt(e)) v_k + g_h softmax_k(p_h(k - q)) v_k ) W_out,h + b
    p_h(dx, dy) = ( w_2 dy + w_3 dy^2 ) + ( w_1 dx + w_3 dx^2 ) + b_h,        g_h = sigmoid(gamma_h)

The content part uses `scaled_dot_product_attention`. The softmax of p_h is a Kronecker product, because p_h is a sum
over axes. Rows of the mixture sum to 1, so dividing them by their sum, as timm does, would only affect rounding.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module, is_real, whole
from attnconv.grid import Grid, per_axis
from attnconv.layers.checks import check_device_dtype, check_loaded, traced_node
from attnconv.operators.base import full_precision, score_dtype
from attnconv.operators.kronecker import Kronecker


@final
class GatedPositionalAttention(nn.Module):
    """Gated positional self-attention over the tokens of an image, (b, height * width, c) -> (b, height * width, c).

    Parameters have the same names as in timm's `GPSA`, so its state dicts can be loaded. As in the ConViT paper, new
    layers are initialised as convolutions: heads attend to neighbouring positions, and `v` is the identity.

    Args:
        channels: Number of input and output channels c.
        heads: Number of heads h; must divide `channels`.
        qkv_bias: Add learned biases to queries, keys and values.
        output_dropout: Dropout probability of the output.
        locality_strength: Sharpness alpha of initial position scores, `-alpha |shift - centre|^2`, in 1 / position^2.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        qk: Linear map to queries and keys, c to 2 c.
        v: Linear map to values, c to c.
        pos_proj: Linear map from (dx, dy, dx^2 + dy^2) to position scores, 3 to h; (dx, dy) is key minus query, in
            positions. Its bias has no effect, because it adds the same constant to all scores of a query.
        gating_param: gamma, (h,); sigmoid(gamma) is the weight of position attention.
        proj: Linear map to the output, c to c.
        scale: Factor by which the products of queries and keys are multiplied, 1 / sqrt(c / h).

    Raises:
        ValueError: If `heads` does not divide `channels`, or an argument is out of range.

    Example:
        >>> layer = GatedPositionalAttention(8, 4)
        >>> layer(torch.zeros(1, 9, 8)).shape, layer(torch.zeros(1, 10, 8), sizes=(2, 5)).shape
        (torch.Size([1, 9, 8]), torch.Size([1, 10, 8]))
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        qkv_bias: bool = False,
        output_dropout: float = 0.0,
        locality_strength: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.heads = whole("channels", channels, 1), whole("heads", heads, 1)
        if self.channels % self.heads:
            raise ValueError(bad("heads", f"must divide the number of channels ({self.channels})", self.heads))
        if not (is_real(output_dropout) and 0 <= output_dropout < 1):
            raise ValueError(bad("output_dropout", "must be a number in [0, 1)", repr(output_dropout)))
        if not (is_real(locality_strength) and locality_strength > 0):
            raise ValueError(bad("locality_strength", "must be a positive number", repr(locality_strength)))
        check_device_dtype(device, dtype)
        self.locality_strength = locality_strength
        self.scale = (self.channels // self.heads) ** -0.5
        self.qk = nn.Linear(channels, 2 * channels, bias=qkv_bias, device=device, dtype=dtype)
        self.v = nn.Linear(channels, channels, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(channels, channels, device=device, dtype=dtype)
        self.pos_proj = nn.Linear(3, heads, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(output_dropout)
        self.gating_param = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(check_loaded)  # type: ignore[no-untyped-call]

    if TYPE_CHECKING:  # nn.Module returns Any

        def __call__(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor: ...

    @staticmethod
    def from_timm(module: nn.Module) -> "GatedPositionalAttention":
        """Convert a `timm.models.convit.GPSA`; the new layer shares the module's parameters but not its hooks.

        Raises:
            TypeError: If the module is not a timm `GPSA`.
            ValueError: If the module uses attention dropout, which is not supported.
        """
        if not _is_gpsa(module):
            raise TypeError(bad("module", "must be a timm.models.convit.GPSA", type(module).__name__))
        old: Any = module  # a class of another library
        if old.attn_drop.p > 0:
            fix = "Set module.attn_drop.p = 0, or do not convert this layer."
            raise ValueError(bad("attn_drop", "must be 0, because probabilities are not stored", old.attn_drop.p, fix))
        made = GatedPositionalAttention(old.dim, old.num_heads, device="meta")  # no memory for replaced parameters
        made.scale, made.locality_strength, made.training = old.scale, old.locality_strength, old.training
        made.qk, made.v, made.proj, made.pos_proj = old.qk, old.v, old.proj, old.pos_proj
        made.proj_drop, made.gating_param = old.proj_drop, old.gating_param
        return made

    def reset_parameters(self) -> None:
        """Initialise as a k x k convolution, k = floor(sqrt(h)): each of the first k^2 heads attends to one tap.

        Other heads attend to the query's position. `v` is the identity, and position attention has weight sigmoid(1).
        """
        self.qk.reset_parameters()
        self.proj.reset_parameters()
        nn.init.eye_(self.v.weight)
        nn.init.ones_(self.gating_param)
        for bias in (self.v.bias, self.pos_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        side = math.isqrt(self.heads)
        weight = torch.zeros(self.heads, 3)
        weight[:, 2] = -1.0  # -|delta - Delta|^2 = -|delta|^2 + 2 delta . Delta - constant
        for head in range(side**2):
            weight[head, 0] = 2 * (head // side) - (side - 1)
            weight[head, 1] = 2 * (head % side) - (side - 1)
        with torch.no_grad():
            self.pos_proj.weight.copy_(self.locality_strength * weight)

    def forward(self, x: Float[Tensor, "b n c"], sizes: Sequence[int] | None = None) -> Float[Tensor, "b n c"]:
        """Compute the gated mixture of content and position attention, and apply the output projection.

        Args:
            x: Tokens in row-major order, (b, n, c).
            sizes: Height and width of the image in tokens, height * width = n; None for a square image.

        Raises:
            ValueError: If `x` has the wrong shape; or n is not height * width, or not a square if `sizes` is None.
        """
        if (node := traced_node(self, x, sizes)) is not None:
            return node
        sizes = self._sizes(x, sizes)
        heads = (self.heads, self.channels // self.heads)
        queries, keys = self.qk(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)  # (b, h, n, e) each
        values = self.v(x).unflatten(-1, heads).transpose(1, 2)  # (b, h, n, e)
        content = F.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        position = self.position_operator(sizes).apply(values.unflatten(2, sizes)).flatten(2, 3)
        gate = self.gating_param.to(score_dtype(self.gating_param.dtype))[:, None, None]
        # 1 - sigmoid(gamma) = sigmoid(-gamma), without cancellation if gamma is large
        out = torch.sigmoid(-gate) * content + torch.sigmoid(gate) * position
        out = self.proj(out.to(values.dtype).transpose(1, 2).flatten(2))  # (b, n, c)
        return self.proj_drop(out)

    def position_operator(self, sizes: Sequence[int]) -> Kronecker:
        """Return the operator of the position part, softmax_k p_h(k - q), for an image of height and width `sizes`."""
        grid = Grid.make(per_axis("sizes", sizes, 2, least=1))
        weight, bias = self.pos_proj.weight, self.pos_proj.bias
        dtype = score_dtype(weight.dtype)
        with full_precision(weight.device):
            across, down, square = weight.to(dtype)[:, :, None, None].unbind(1)  # (h, 1, 1) each
            rows, columns = (axis.shifts(weight.device).to(dtype) for axis in grid.axes)
            scores = down * rows + square * rows**2 + bias.to(dtype)[:, None, None]  # add the bias to one axis only
            return Kronecker.from_scores(grid, [scores, across * columns + square * columns**2])

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}"

    def _sizes(self, x: Tensor, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """Return height and width, validated against the number of tokens."""
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(bad("x", f"must be of shape (batch, tokens, {self.channels})", f"shape {tuple(x.shape)}"))
        if sizes is None:
            side = round(int(x.shape[1]) ** 0.5)  # a tensor under torch.jit.trace
            if side < 1 or side**2 != x.shape[1]:
                fix = "Pass sizes=(height, width)."
                raise ValueError(bad("x", "must form a square image if sizes is None", f"{x.shape[1]} tokens", fix))
            return side, side
        height, width = per_axis("sizes", sizes, 2, least=1)
        if height * width != x.shape[1]:
            raise ValueError(bad("sizes", f"must satisfy height * width = {x.shape[1]} tokens", (height, width)))
        return height, width


def fuse_convit(model: nn.Module) -> int:
    """Replace each `GPSA` in a timm ConViT with a `GatedPositionalAttention`, in place; return how many were replaced.

    The model's outputs stay the same up to rounding, and its parameters stay the same tensors with the same names.

    Args:
        model: A timm ConViT, or any other module that contains `timm.models.convit.GPSA` layers.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the model has no such layer, or one uses attention dropout; then no layer is replaced.
    """
    check_module(model)
    places = {name: found for name, found in model.named_modules(remove_duplicate=False) if name and _is_gpsa(found)}
    if not places:
        fix = "Pass a timm ConViT, or convert a single layer with GatedPositionalAttention.from_timm."
        raise ValueError(bad("model", "must contain timm.models.convit.GPSA layers", type(model).__name__, fix))
    made = {found: GatedPositionalAttention.from_timm(found) for found in places.values()}
    for name, found in places.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made[found])
    return len(made)


def _is_gpsa(module: object) -> bool:
    """Return whether a module is a timm `GPSA`, from its class name, so that timm need not be installed."""
    return (type(module).__module__, type(module).__name__) == ("timm.models.convit", "GPSA")
