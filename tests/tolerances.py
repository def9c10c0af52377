"""The suite's tolerances, per dtype, in one table.

Relative tolerances are the house's promise for two forms of the same formula (``Kronecker`` against ``Dense``, a fast
path against its obvious form). The absolute ones are the same number: compared quantities are of order one.

    torch.testing.assert_close(fast, slow, **tolerance(torch.float64))
"""

from typing import TypedDict

import torch

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {  # dtype -> (rtol, atol)
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
}


class Tolerance(TypedDict):
    """The two keyword arguments of ``torch.testing.assert_close``."""

    rtol: float
    atol: float


def tolerance(dtype: torch.dtype, *, scale: float = 1.0) -> Tolerance:
    """Keyword arguments for ``assert_close``; ``scale`` widens both, with the reason said at the call."""
    rtol, atol = TOLERANCES[dtype]
    return {"rtol": rtol * scale, "atol": atol * scale}
