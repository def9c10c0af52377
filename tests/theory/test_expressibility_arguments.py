"""Invalid arguments of `can_express` and `factorise`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv import SelfAttention1d, from_conv
from attnconv.theory.expressibility import can_express, factorise


def rows(*shape: int) -> Tensor:
    return torch.full(shape, 0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"x: .*got None"),
        ({"x": torch.zeros(1, 1, 4, 4).double(), "sizes": (4, 4)}, r"sizes: .*got \(4, 4\)"),
        ({"sizes": (4,)}, r"sizes: .*got \(4,\)"),
        ({"sizes": (4, 4), "stride": 2}, r"stride: .*got 2"),
        ({"sizes": (4, 4), "dilation": 0}, r"dilation: .*got 0"),
        ({"sizes": (4, 4), "padding": "full"}, r"padding: .*got 'full'"),
        ({"sizes": (4, 4), "padding_mode": "zero"}, r"padding_mode: .*got 'zero'"),
        ({"sizes": (4, 4), "padding_mode": ["zeros"]}, r"padding_mode: .*got \['zeros'\]"),
        ({"sizes": (4, 4), "tolerance": -1.0}, r"tolerance: .*got -1\.0"),
        ({"sizes": (4, 4), "tolerance": math.nan}, r"tolerance: .*got nan"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        can_express(from_conv(nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)), 3, **options)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (rows(2, 4, 4), {}, r"sizes: .*got None"),
        (rows(2, 4, 4), {"sizes": (2, 2), "x": rows(1, 1, 2, 2)}, r"x: .*got shape \(1, 1, 2, 2\)"),
        (
            rows(2, 5, 5),
            {"sizes": (2, 2)},
            r"attention: must have shape .* heads, 4, 4\).*got shape \(2, 5, 5\).*class tokens",
        ),
        (rows(4, 4), {"sizes": (2, 2)}, r"attention: must have shape .* heads, 4, 4\).*got shape \(4, 4\)"),
        (rows(0, 4, 4), {"sizes": (2, 2)}, r"attention: .*got shape \(0, 4, 4\)"),
        (
            rows(2, 4, 4),
            {"sizes": (2, 2), "stride": 2},
            r"attention: must have shape .* heads, 1, 4\).*got shape \(2, 4, 4\)",
        ),
        (rows(2, 4, 4) / 0, {"sizes": (2, 2)}, r"attention: must have finite rows, got NaN or infinite"),
        (rows(2, 4, 4), {"sizes": (2, 2), "kernel_size": 0}, r"kernel_size: .*got 0"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_bad_rows(attention: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        can_express(attention, **{"kernel_size": 1, **options})


@pytest.mark.usefixtures("unhooked")
def test_what_is_no_attention() -> None:
    with pytest.raises(TypeError, match=r"attention: .*got Conv1d"):
        can_express(nn.Conv1d(1, 1, 1), 1, sizes=(2,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"attention: .*got torch\.bool"):
        can_express(torch.ones(1, 2, 2, dtype=torch.bool), 1, sizes=(2,))


@pytest.mark.usefixtures("unhooked")
def test_queries_and_phi_that_do_not_fit() -> None:
    for place in ((5,), (-1,), (0, 0), (0.5,)):
        with pytest.raises(ValueError, match=r"query: .*got \("):
            factorise(SelfAttention1d(1, 1, heads=2), 3, query=place, sizes=(5,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"phi: .*got \(2, 3\)"):
        factorise(SelfAttention1d(1, 1, heads=2), 3, query=(0,), sizes=(5,), phi=torch.zeros(2, 3))
