"""The weights with which soft heads come nearest to a convolution, W_h = sum_j Phi[j, h] W_j, away from the border.

There all queries have the same Phi of Lemma 3: a small least-squares problem over the shifts that heads and taps reach.
"""

import math
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.conv_taps import Convolution, head_weights, taps
from attnconv.theory.lemma3_phi import matrices, rank_tolerance, solve

_FARTHEST = 32  # pixels beyond the taps at most, however blunt the heads


def nearest_weights(layer: SelfAttention, conv: Convolution) -> Float[Tensor, "h i d"]:
    """W_h = sum_j Phi[j, h] W_j with the best Phi far from the border, for Gaussian heads of the same geometry."""
    shifts = taps(conv)
    encoding = layer.encoding
    heads = encoding.gaussians()
    assert heads is not None
    with torch.no_grad():
        blunt = float(torch.linalg.eigvalsh(heads.precision).min()) / 2
        beyond = min(math.ceil(math.sqrt(-math.log(1e-8) / blunt)), _FARTHEST)
        sizes = [_size(layer, dim, max(abs(shift[dim]) for shift in shifts) + beyond) for dim in range(layer.dims)]
        grid = layer.grid(sizes)
        pixels = next(layer.parameters()).new_zeros(1, *sizes, layer.in_channels)
        operator = encoding.operator(grid, pixels)
        stack = matrices(operator, shifts, "zeros", _central(grid)).flatten(0, 2)
        phi, _ = solve(stack, layer.heads, rank_tolerance(operator))
        weight = torch.einsum("jh,jid->hid", phi, head_weights(conv).to(phi))
        return weight.to(conv.weight)


def _size(layer: SelfAttention, dim: int, reach: int) -> int:
    """Keys along an axis so that the central queries see `reach` positions on either side."""
    spacing = layer.stride[dim] if layer.transposed else 1
    return 2 * -(-reach // spacing) + 2 * layer.stride[dim] + 1


def _central(grid: Grid) -> Int[Tensor, "r"]:
    """The query in the middle of the keys, and those before it until the gaps between keys repeat; row-major."""
    chosen = []
    for axis in grid.axes:
        distance = (axis.query_positions() - axis.spacing * (axis.size - 1) // 2).abs()
        middle = int(distance.argmin())
        chosen.append(range(middle - axis.spacing + 1, middle + 1))
    flat = torch.arange(grid.query_count).reshape(grid.query_sizes)
    return torch.stack([flat[place] for place in product(*chosen)])
