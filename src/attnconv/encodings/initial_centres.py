"""Initialise heads as the taps of a small kernel: one on each of the shifts nearest to the query, and narrow.

Nine heads on an image are the 3 x 3 kernel. Each gives its own shift 62 % of its attention, at spread 1 only 16 %.
"""

import itertools
import math

import torch

from attnconv._util.value_checks import whole
from attnconv.encodings.base import Encoding, gaussians_of

NEIGHBOUR_SPREAD = 2.0


def nearest_shifts(count: int, dims: int) -> list[tuple[int, ...]]:
    """The `count` shifts over `dims` axes that are nearest to 0, shortest first and ties row-major."""
    count, dims = whole("count", count, 1), whole("dims", dims, 1)
    # The ball of this radius holds more than count points, and the box around it holds the ball.
    radius = range(-math.ceil(count ** (1 / dims)), math.ceil(count ** (1 / dims)) + 1)
    box = itertools.product(radius, repeat=dims)
    return sorted(box, key=lambda shift: (sum(step * step for step in shift), shift))[:count]


def start_at_neighbours(encoding: Encoding) -> None:
    """Move Gaussian heads to the nearest shifts, in place, and double their spreads."""
    found = gaussians_of(encoding, "encoding")
    with torch.no_grad():
        found.centres.copy_(torch.tensor(nearest_shifts(encoding.heads, encoding.dims)))
        found.spread.mul_(NEIGHBOUR_SPREAD)
