"""Tolerances of all tests, by dtype.

Two forms of the same formula (`Kronecker` and `Dense`, a fast path and its plain form) must agree to the relative
tolerance. The absolute tolerance is the same number, because the compared values are of order one.

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
    """Keyword arguments of `torch.testing.assert_close`."""

    rtol: float
    atol: float


def tolerance(dtype: torch.dtype, *, scale: float = 1.0) -> Tolerance:
    """Return the keyword arguments for `assert_close`, multiplied by `scale`; the call states why, unless it is 1."""
    rtol, atol = TOLERANCES[dtype]
    return {"rtol": rtol * scale, "atol": atol * scale}
