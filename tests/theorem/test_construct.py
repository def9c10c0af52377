"""Convolutions as attention, held against PyTorch's convolutions on drawn hyper-parameters."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attnconv.theorem import from_conv, hard_alpha
from tests.tolerances import tolerance

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    mode = draw(st.sampled_from(["zeros", "replicate", "reflect", "circular"]))
    kernel, dilation = each(1, 3), each(1, 2)
    padding: Any = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1,) * dims if padding == "same" else each(1, 2)
    if padding == "numbers":
        padding = each(0, 2)
    conv = CONVOLUTIONS[dims](
        2 * groups,
        3 * groups,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        draw(st.booleans()),
        mode,
        dtype=torch.float64,
    )
    return conv, tuple(draw(st.integers(5, 7)) for _ in range(dims))


@given(convolutions(), st.sampled_from(["auto", "reference", "structured"]))
def test_attention_equals_the_convolution(drawn: tuple[Any, tuple[int, ...]], backend: str) -> None:
    conv, sizes = drawn
    x = torch.randn(2, conv.in_channels, *sizes, dtype=torch.float64)
    layer = from_conv(conv)
    layer.backend = backend  # type: ignore[assignment]
    torch.testing.assert_close(layer(x), conv(x), **tolerance(torch.float64, scale=10))
    assert layer.plan(sizes) == "shift"
    torch.testing.assert_close(layer(x), conv(x), **tolerance(torch.float64, scale=10))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=dtype)
    x = torch.randn(2, 3, 6, 5, dtype=dtype)
    torch.testing.assert_close(from_conv(conv)(x), conv(x), **tolerance(dtype))
    assert hard_alpha(dtype) > 30


def test_soft_heads_approach_the_convolution_as_alpha_grows() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    errors = [
        float((from_conv(conv, alpha=alpha)(x) - conv(x)).abs().max().detach()) for alpha in (1.0, 2.0, 4.0, 8.0, 16.0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[0]


def test_what_is_no_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha: must be positive and finite, got -1\.0"):
        from_conv(nn.Conv1d(1, 1, 1), alpha=-1.0)


@pytest.mark.usefixtures("unhooked")
def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"conv: must be an nn.Conv1d, nn.Conv2d or nn.Conv3d, got Linear"):
        from_conv(nn.Linear(1, 1))  # type: ignore[arg-type]
