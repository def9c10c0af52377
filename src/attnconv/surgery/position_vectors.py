"""phi of one axis: unit vectors by which a transformer that starts as a convolution tells positions apart.

With as many features as positions, an orthonormal basis; with fewer, cosines and sines of low frequencies f,

    phi(i) = (cos(f_1 i), .., sin(f_1 i), ..) / sqrt(number of frequencies),      B phi(i) = phi(i + delta)
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor


def cosines(size: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine basis: row i, frequency f."""
    place = torch.arange(size, dtype=torch.float64)
    table = torch.cos(torch.pi * (place[:, None] + 0.5) * place / size)
    return (table / table.norm(dim=0)).float()


@final
class AxisFeatures:
    """phi of one axis of `size` positions, with at most `room` features (at least 3), for shifts up to `reach`."""

    def __init__(self, size: int, room: int, reach: int) -> None:
        self.size, self.exact = size, room >= size
        # `reach` beyond the end, the last position must be nearer than the first, one period away.
        self.turns = 2 * torch.pi / (size + 2 * reach) * torch.arange(1, (room - 1) // 2 + 1, dtype=torch.float64)

    def at(self, places: Int[Tensor, "n"]) -> Float[Tensor, "n f"]:
        """phi of some positions."""
        if self.exact:
            return cosines(self.size)[places.clamp(0, self.size - 1)]
        angle = places[:, None] * self.turns
        return torch.cat((angle.cos(), angle.sin()), 1).float() / len(self.turns) ** 0.5

    def moved(self, step: int) -> Float[Tensor, "f f"]:
        """B, from its action on all positions: exact, since it maps a basis or rotates planes."""
        places = torch.arange(self.size)
        here, there = self.at(places).double(), self.at(places + step).double()
        return torch.linalg.lstsq(here, there, driver="gelsd").solution.T.float()
