"""Time and memory of ConViT's gated positional attention.

Forward and backward pass of one layer, including the gradients of input and parameters. All contenders compute the same
result from the same tensors:

    per image       two materialised softmaxes, with the position softmax computed for every image as in timm
    materialised    two materialised softmaxes, with the position softmax computed once for all images
    fused           `GatedPositionalAttention`

    python -m benchmarks gated
"""

import torch
from torch import Tensor

from attnconv.layers.gated_positional import GatedPositionalAttention
from benchmarks.compare import Step, compare
from benchmarks.results import Results, Row

CONTENDERS = ("per image", "materialised", "fused")
QUICK = {"cases": ((1, 6), (2, 8)), "heads": 2, "channels": 8, "repeats": 2}


def run(
    *,
    cases: tuple[tuple[int, int], ...] = ((16, 14), (8, 24), (4, 32), (1, 48)),  # batch and side of the images
    heads: int = 4,
    channels: int = 48,
    repeats: int = 7,
) -> Results:
    """Measure time, peak memory and differences for all sizes."""
    rows: list[Row] = []
    for batch, side in cases:
        rows += compare(
            prepare,
            {"batch": batch, "side": side, "heads": heads, "channels": channels},
            CONTENDERS,
            case=f"{batch} x {heads} heads of {channels}, {side} x {side}",
            repeats=repeats,
            memory=side > 8,
        )
    return Results("gated", "speedup over two softmaxes for every image", tuple(rows))


def prepare(*, batch: int, side: int, heads: int, channels: int, contender: str) -> Step:
    """Return a step that computes the output and the gradients; all contenders use the same tensors.

    The bias of the position scores is not compared, because it does not change the softmax.
    """
    torch.manual_seed(0)
    layer = GatedPositionalAttention(heads * channels, heads)
    x = torch.randn(batch, side**2, heads * channels, requires_grad=True)
    weights = torch.randn_like(x)
    inputs = [x, *(parameter for name, parameter in layer.named_parameters() if name != "pos_proj.bias")]
    features = None if contender == "fused" else _features(side)  # cached between steps, as in timm

    def step() -> list[Tensor]:
        out = layer(x) if features is None else _materialised(layer, x, features, per_image=contender == "per image")
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]

    return step


def _features(side: int) -> Tensor:
    """Compute (dx, dy, dx^2 + dy^2) of all pairs of tokens, key minus query, (1, n, n, 3)."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    down, across = (places[None] - places[:, None]).unbind(-1)
    return torch.stack((across, down, across**2 + down**2), -1)[None]


def _materialised(layer: GatedPositionalAttention, x: Tensor, features: Tensor, *, per_image: bool) -> Tensor:
    """Compute both softmaxes and their mixture, and normalise its rows."""
    queries, keys = layer.qk(x).unflatten(-1, (2, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    values = layer.v(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    scores = layer.pos_proj(features.expand(x.shape[0] if per_image else 1, -1, -1, -1)).permute(0, 3, 1, 2)
    content = (queries @ keys.mT * layer.scale).softmax(-1)
    gate = torch.sigmoid(layer.gating_param)[:, None, None]
    attention = (1 - gate) * content + gate * scores.softmax(-1)
    attention /= attention.sum(-1, keepdim=True)
    out: Tensor = layer.proj((attention @ values).transpose(1, 2).flatten(2))
    return out
