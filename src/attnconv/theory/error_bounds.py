"""Bounds on the distance of soft heads from a convolution, and the alpha for a wanted error.

Let t_h(q) be the key nearest to head h's centre from query q, and eps_h the most mass off it (`mass_off_nearest`).
Against the hard layer, and so against the convolution that the layer was converted from,

    (A_h x)_q - x_{t_h(q)} = sum_{k != t_h} A_h[q, k] (x_k - x_{t_h}),          |.| <= eps_h (max x - min x)

    |out_q - conv(x)_q|_d  <=  sum_h eps_h sum_c |W_h[c, d]| (max x_c - min x_c)  +  rounding

with zeros among the x_c where the border rule pads with them. Only the image's range enters.

Rounding. With unit roundoff u each addition errs by at most u times the sum, and by no more than its smaller term. So
the terms are the number m of keys with weights above u, (2 sqrt(-log u / alpha) + 2) per axis, the operations of each
score, and the length of the projection's sum, here and in the convolution:

    rounding  =  u (m + 16 dims + 2 heads c / groups + 8) (sum_h sum_c |W_h[c, d]| max|x_c| + |b_d|).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.encodings.base import mass_off_nearest
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.kernels.contractions import project


def mass_off(alpha: float, dims: int = 2) -> float:
    """Upper bound of the attention of a head with a whole-number centre off its target: 1 - S^-dims.

    S = sum over whole numbers of exp(-alpha k^2); 2 dims exp(-alpha) for large alpha, Lemma 2's limit.

    Args:
        alpha: Sharpness in 1 / pixel^2, positive.
        dims: Number of axes.

    Raises:
        ValueError: alpha is not positive and finite.

    Example:
        >>> f"{mass_off(46.0):.1e}"
        '4.2e-20'
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(bad("alpha", "must be positive and finite", alpha))
    along = torch.full((dims,), alpha, dtype=torch.float64)
    return float(mass_off_nearest(along, torch.zeros_like(along)))


def alpha_for(mass: float, dims: int = 2) -> float:
    """The smallest alpha with at most `mass` off the head's target: the inverse of `mass_off`.

    Args:
        mass: Wanted bound, between 0 and 1. For a wanted output error e of a layer divide it by
            ``sum_h sum_c |W_h[c, d]| (max x_c - min x_c)``, its largest over d.
        dims: Number of axes.

    Raises:
        ValueError: mass is not between 0 and 1.

    Example:
        >>> import torch
        >>> [round(alpha_for(torch.finfo(dtype).eps / 2), 1) for dtype in (torch.bfloat16, torch.float32)]
        [6.9, 18.0]
    """
    if not 0 < mass < 1:
        raise ValueError(bad("mass", "must lie between 0 and 1", mass))
    low, high = 1e-12, 2 * math.log(4 * dims / mass) + 2
    if mass_off(low, dims) <= mass:  # blunter than any useful head
        return low
    while low < (middle := math.sqrt(low * high)) < high:  # until no number lies between, in about 60 steps
        low, high = (middle, high) if mass_off(middle, dims) > mass else (low, middle)
    return high


def error_bound(
    layer: SelfAttention, low: float | Float[Tensor, "c"], high: float | Float[Tensor, "c"]
) -> Float[Tensor, "d"]:
    """Upper bound, in float64, per output channel on the distance of a layer from its heads made hard, with rounding.

    For a layer from `from_conv` that is the distance from the convolution.

    Args:
        layer: A layer of Gaussian heads along the axes, as `Quadratic` has.
        low: Smallest input, for all channels or for each.
        high: Largest input.

    Raises:
        ValueError: Other heads, or low above high.
    """
    encoding = layer.encoding
    heads, off = encoding.gaussians(), encoding.mass_off()
    alpha = None if heads is None else heads.alpha
    if alpha is None or off is None:
        requirement = "must have Gaussian heads along the axes, as Quadratic has"
        raise ValueError(bad("layer", requirement, type(encoding).__name__))
    with torch.no_grad():
        weight = merged_weight(layer).double().abs()
        # In float64 at once: without a dtype torch would round Python's numbers, and so the bound, to float32.
        least, most = (torch.as_tensor(v, dtype=weight.dtype, device=weight.device) for v in (low, high))
        least, most = least.expand(layer.in_channels), most.expand(layer.in_channels)
        if bool((least > most).any()):
            raise ValueError(bad("low", "must not exceed high", f"low={low}, high={high}"))
        if layer.border == "zero":
            least, most = least.clamp_max(0), most.clamp_min(0)
        off = off.to(weight.device)
        moved = project(off[:, None] * (most - least), weight, layer.groups)
        size = project(torch.maximum(most.abs(), least.abs()).expand(layer.heads, -1), weight, layer.groups)
        if layer.bias is not None:
            size = size + layer.bias.double().abs()
        unit = torch.finfo(next(layer.parameters()).dtype).eps / 2
        keys = float((2 * (-math.log(unit) / alpha).sqrt() + 2).prod(-1).max())
        return moved + unit * (keys + 16 * layer.dims + 2 * layer.heads * weight.shape[1] + 8) * size


def merged_weight(layer: SelfAttention) -> Float[Tensor, "h i d"]:
    """W_h of a layer: its own, or W_val,h W_out,h where they are factored."""
    if layer.weight is not None:
        return layer.weight
    assert layer.value_weight is not None
    assert layer.output_weight is not None
    return layer.value_weight @ layer.output_weight
