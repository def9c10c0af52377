"""What a transformer that starts as a convolution is warned of: too little mass, filters that do not fit."""

import warnings
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.inspect.conv_score import kernel_size as largest_kernel
from attnconv.inspect.module_adapters import AttentionParts

LOST = 0.01  # relative error of the given filters from which on it is warned of


def warn_of_less(reached: Mapping[str, float], mass: float) -> None:
    """Say which layers do not hold the mass that was asked for, in the caller's caller's place.

    Args:
        reached: Name of a layer -> mass that its heads hold in the mean.
        mass: What was asked for.
    """
    less = [f"{held:.3f} in {name}" for name, held in reached.items() if held < mass - 1e-3]
    if less:
        words = f"mass: {mass:g} is not reached at the sharpest scores that are tried, but {', '.join(less)}."
        warnings.warn(f"{words} Give images like the model's own, a smaller kernel_size or less mass.", stacklevel=3)


def warn_of_lost(errors: Mapping[str, float], attention: AttentionParts, filters: Float[Tensor, "d c K K"]) -> None:
    """Say which layers do not hold the given filters, why, and what would fit, in the caller's caller's place.

    Args:
        errors: Name of a layer -> relative error of its filters.
        attention: Parts of one of the layers.
        filters: As they were given.
    """
    lost = [f"{error:.3f} in {name}" for name, error in errors.items() if error > LOST]
    if not lost:
        return
    heads, width, size = attention.heads, attention.head_dim, filters.shape[-1]
    rank = int(torch.linalg.matrix_rank(filters.permute(2, 3, 0, 1)).max())
    room, per_tap = heads // size**2 * width, -(-rank // width)
    words = (
        f"filters: must have rank at most {room} at each tap, for {heads} heads of {width} dimensions on {size**2} "
        f"taps, got rank {rank}; the relative error of the filters is {', '.join(lost)}. Give filters of lower rank"
    )
    if per_tap <= heads:
        side = largest_kernel(heads // per_tap, 2)
        words += f", or {side} x {side} filters, which fit at rank {rank}"
    warnings.warn(f"{words}. given_error says what it does to the output.", stacklevel=3)
