"""Gated positional self-attention, exact and without an n x n tensor of either softmax (d'Ascoli et al., 2021).

    out_q = sum_h ( (1 - g_h) softmax_k(q_q . k_k / sqrt(e)) v_k + g_h softmax_k(p_h(k - q)) v_k ) W_out,h + b
    p_h(dx, dy) = ( w_2 dy + w_3 dy^2 ) + ( w_1 dx + w_3 dx^2 ) + b_h,        g_h = sigmoid(gamma_h)

Content is `scaled_dot_product_attention`; the softmax of p_h, a sum over axes, is a Kronecker product. Rows of the
mixture sum to 1, so dividing by their sum, as is usual, would change rounding only.
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
    """Gated positional self-attention over the tokens of an image: (b, height * width, c) to the same shape.

    Parameters have the names of timm's `GPSA`, so its state dict loads. A new layer is initialised as a convolution, as
    in the paper: heads attend to neighbouring pixels, values are the inputs.

    Args:
        channels: Channels c in and out.
        heads: Number of heads h, which divides the channels.
        qkv_bias: Add learned vectors to queries, keys and values.
        output_dropout: Dropout probability of the output.
        locality_strength: Initial alpha in `-alpha |delta - Delta_h|^2`, in 1 / pixel^2.
        device: Where the parameters live.
        dtype: Their dtype.

    Attributes:
        qk: Queries and keys, c to 2 c.
        v: Values, c to c.
        pos_proj: The position score, (dx, dy, dx^2 + dy^2) to h; shifts are key minus query in pixels. Its bias has no
            effect, since it is equal in all scores of a row.
        gating_param: gamma, (h,).
        proj: The output, c to c.
        scale: Factor on the products of queries and keys, 1 / sqrt(c / h).

    Raises:
        ValueError: An argument is out of range.

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
            raise ValueError(bad("heads", f"must divide the {self.channels} channels", self.heads))
        if not (is_real(output_dropout) and 0 <= output_dropout < 1):
            raise ValueError(bad("output_dropout", "must be a number of at least 0 and below 1", repr(output_dropout)))
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

    if TYPE_CHECKING:  # nn.Module says Any

        def __call__(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor: ...

    @staticmethod
    def from_timm(module: nn.Module) -> "GatedPositionalAttention":
        """The same layer as a `timm.models.convit.GPSA`, sharing its parameters; hooks of the old one are not kept.

        Raises:
            TypeError: The module is no `GPSA` of timm.
            ValueError: It drops attention probabilities, which this layer never holds.
        """
        if not _is_gpsa(module):
            raise TypeError(bad("module", "must be a GPSA of timm.models.convit", type(module).__name__))
        old: Any = module  # the attributes of another library's class
        if old.attn_drop.p > 0:
            fix = "Set module.attn_drop.p = 0 or leave this layer as it is."
            raise ValueError(bad("attn_drop", "must be 0: probabilities are never held", old.attn_drop.p, fix))
        made = GatedPositionalAttention(old.dim, old.num_heads, device="meta")  # no memory for what is replaced
        made.scale, made.locality_strength, made.training = old.scale, old.locality_strength, old.training
        made.qk, made.v, made.proj, made.pos_proj = old.qk, old.v, old.proj, old.pos_proj
        made.proj_drop, made.gating_param = old.proj_drop, old.gating_param
        return made

    def reset_parameters(self) -> None:
        """Initialise as a convolution: the first k^2 heads, k = floor(sqrt(h)), at the pixels of a k x k kernel.

        Further heads attend to the query's own pixel. Values are the inputs, gates are sigmoid(1).
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
        weight[:, 2] = -1.0  # -|delta - Delta|^2 = -|delta|^2 + 2 delta . Delta, less a constant
        for head in range(side**2):
            weight[head, 0] = 2 * (head // side) - (side - 1)
            weight[head, 1] = 2 * (head % side) - (side - 1)
        with torch.no_grad():
            self.pos_proj.weight.copy_(self.locality_strength * weight)

    def forward(self, x: Float[Tensor, "b n c"], sizes: Sequence[int] | None = None) -> Float[Tensor, "b n c"]:
        """The gated mixture of both attentions, projected.

        Args:
            x: Tokens, row-major.
            sizes: Height and width of the image in tokens, height * width = n; None for a square image.

        Raises:
            ValueError: Wrong rank or channels, or a number of tokens that does not fit the sizes.
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
        # 1 - sigmoid(gamma) = sigmoid(-gamma), without the cancellation where a gate is nearly closed
        out = torch.sigmoid(-gate) * content + torch.sigmoid(gate) * position
        out = self.proj(out.to(values.dtype).transpose(1, 2).flatten(2))  # (b, n, c)
        return self.proj_drop(out)

    def position_operator(self, sizes: Sequence[int]) -> Kronecker:
        """The positional part, softmax_k p_h(k - q), over an image of height and width `sizes`."""
        grid = Grid.make(per_axis("sizes", sizes, 2, least=1))
        weight, bias = self.pos_proj.weight, self.pos_proj.bias
        dtype = score_dtype(weight.dtype)
        with full_precision(weight.device):
            across, down, square = weight.to(dtype)[:, :, None, None].unbind(1)  # (h, 1, 1) each
            rows, columns = (axis.shifts(weight.device).to(dtype) for axis in grid.axes)
            scores = down * rows + square * rows**2 + bias.to(dtype)[:, None, None]  # the bias enters a score once
            return Kronecker.from_scores(grid, [scores, across * columns + square * columns**2])

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}"

    def _sizes(self, x: Tensor, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """Height and width, checked against the tokens."""
        if x.dim() != 3 or x.shape[2] != self.channels:
            requirement = f"must be (batch, tokens, {self.channels} channels)"
            raise ValueError(bad("x", requirement, f"shape {tuple(x.shape)}"))
        if sizes is None:
            side = round(int(x.shape[1]) ** 0.5)  # a tensor under torch.jit.trace
            if side < 1 or side**2 != x.shape[1]:
                fix = "Pass sizes=(height, width)."
                raise ValueError(bad("x", "must hold the tokens of a square image", f"{x.shape[1]} tokens", fix))
            return side, side
        height, width = per_axis("sizes", sizes, 2, least=1)
        if height * width != x.shape[1]:
            raise ValueError(bad("sizes", f"must make up the {x.shape[1]} tokens of x", (height, width)))
        return height, width


def fuse_convit(model: nn.Module) -> int:
    """Replace every `GPSA` of a ConViT of timm by a `GatedPositionalAttention`, in place; return their number.

    The model computes the same, to rounding. Its parameters stay the same tensors under the same names.

    Args:
        model: A ConViT of timm, or any module that holds `timm.models.convit.GPSA` layers.

    Raises:
        TypeError: `model` is no module.
        ValueError: There is no such layer in the model, or one drops attention probabilities; nothing was replaced.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> fuse_convit(timm.create_model("convit_tiny"))  # doctest: +SKIP
        10
    """
    check_module(model)
    places = {name: found for name, found in model.named_modules(remove_duplicate=False) if name and _is_gpsa(found)}
    if not places:
        fix = "Pass a ConViT of timm; a single layer goes to GatedPositionalAttention.from_timm."
        raise ValueError(bad("model", "must hold GPSA layers of timm.models.convit", type(model).__name__, fix))
    made = {found: GatedPositionalAttention.from_timm(found) for found in places.values()}
    for name, found in places.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made[found])
    return len(made)


def _is_gpsa(module: object) -> bool:
    """Recognised by name, so that timm need not be installed."""
    return (type(module).__module__, type(module).__name__) == ("timm.models.convit", "GPSA")
