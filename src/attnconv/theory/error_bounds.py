"""Error bounds for soft heads that approximate a convolution, and the alpha that achieves a given error.

Let t_h(q) be the key nearest to the centre of head h for query q, and eps_h an upper bound on the attention that falls
on other keys (`mass_off_nearest`). The errors of a head and of the output, relative to the layer with hard heads (which
is equivalent to the convolution that was converted), are

    (A_h x)_q - x_{t_h(q)} = sum_{k != t_h} A_h[q, k] (x_k - x_{t_h}),          |.| <= eps_h (max x - min x)

    |out_q - conv(x)_q|_d  <=  sum_h eps_h sum_c |W_h[c, d]| (max x_c - min x_c)  +  rounding

where x_c includes the zeros of zero padding. The bound depends on the image only through its range.

Rounding: with unit roundoff u, the error of an addition is at most u times the sum, and at most its smaller term. The
number of operations that matter is therefore the number m of keys with weights above u, (2 sqrt(-log u / alpha) + 2)
per axis, plus the operations of each score and the terms of the projection's sum, here and in the convolution:

    rounding  =  u (m + 16 dims + 2 heads c / groups + 8) (sum_h sum_c |W_h[c, d]| max|x_c| + |b_d|).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.encodings.base import mass_off_nearest
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.kernels.contractions import project


def mass_off(alpha: float, dims: int = 2) -> float:
    """Return an upper bound on the attention of a head with an integer centre to keys other than the one at its centre.

    The bound is 1 - S^-dims, where S is the sum of exp(-alpha k^2) over all integers k. For large alpha it is
    approximately 2 dims exp(-alpha), as in Lemma 2 of the paper.

    Args:
        alpha: Sharpness in 1 / position^2, positive.
        dims: Number of axes, at least 1.

    Raises:
        ValueError: If `alpha` is not positive and finite, or `dims` is below 1.

    Example:
        >>> f"{mass_off(46.0):.1e}"
        '4.2e-20'
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(bad("alpha", "must be positive and finite", alpha))
    along = torch.full((whole("dims", dims, 1),), alpha, dtype=torch.float64)
    return float(mass_off_nearest(along, torch.zeros_like(along)))


def alpha_for(mass: float, dims: int = 2) -> float:
    """Return the smallest alpha, in 1 / position^2, for which `mass_off(alpha, dims)` is at most `mass`.

    Args:
        mass: Bound on a head's attention to keys other than the one at its centre, above 0 and below 1. For an output
            error of at most e, pass e / max_d `sum_h sum_c |W_h[c, d]| (max x_c - min x_c)` (input c, output d).
        dims: Number of axes, at least 1.

    Raises:
        ValueError: If `mass` is not above 0 and below 1, or `dims` is below 1.

    Example:
        >>> import torch
        >>> [round(alpha_for(torch.finfo(dtype).eps / 2), 1) for dtype in (torch.bfloat16, torch.float32)]
        [6.9, 18.0]
    """
    if not 0 < mass < 1:
        raise ValueError(bad("mass", "must be above 0 and below 1", mass))
    low = 1e-12
    if mass_off(low, dims) <= mass:  # wider than any useful head
        return low
    high = 2 * (math.log(4 * dims) - math.log(mass)) + 2
    while low < (middle := math.sqrt(low * high)) < high:  # until the two are adjacent floats, about 60 steps
        low, high = (middle, high) if mass_off(middle, dims) > mass else (low, middle)
    return high


def error_bound(
    layer: SelfAttention, low: float | Float[Tensor, "c"], high: float | Float[Tensor, "c"]
) -> Float[Tensor, "d"]:
    """Return an upper bound on each output channel's difference from the same layer with hard heads, in float64.

    It includes rounding. For a layer from `from_conv` with `slices`, hard heads compute exactly the convolution.

    Args:
        layer: A layer with axis-aligned Gaussian heads, such as those of `Quadratic`.
        low: Smallest input value, one number or one per channel.
        high: Largest input value, one number or one per channel.

    Raises:
        ValueError: If the heads are not axis-aligned Gaussians, or `low` exceeds `high`.
    """
    encoding = layer.encoding
    heads, off = encoding.gaussians(), encoding.mass_off()
    alpha = None if heads is None else heads.alpha
    if alpha is None or off is None:
        requirement = "must have axis-aligned Gaussian heads, such as those of Quadratic"
        raise ValueError(bad("layer", requirement, type(encoding).__name__))
    with torch.no_grad():
        weight = merged_weight(layer).double().abs()
        # Pass the dtype explicitly; by default, torch would round Python floats, and thus the bound, to float32.
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
    """Return W_h of a layer: its `weight`, or the product W_val,h W_out,h of factored weights."""
    if layer.value_weight is None or layer.output_weight is None:
        assert layer.weight is not None
        return layer.weight
    return layer.value_weight @ layer.output_weight
