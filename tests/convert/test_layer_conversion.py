"""Convolutions as attention, held against PyTorch's convolutions on drawn hyper-parameters."""

import random
import warnings

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from attnconv.convert import equation_9, from_conv
from attnconv.convert.verify_conversions import Way, draw_convolution, perform
from attnconv.encodings.transformer_xl import Relative
from tests.tolerances import tolerance


@given(st.integers(0, 10**9), st.sampled_from(["dense", "kronecker", "shift"]))
def test_attention_equals_the_convolution(seed: int, way: Way) -> None:
    conv, x = draw_convolution(random.Random(seed), torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(perform(from_conv(conv), x, way), conv(x), **tolerance(torch.float64, scale=10))


@pytest.mark.parametrize("made", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moved", [torch.float64, torch.float32])
def test_hard_heads_stay_hard_in_every_dtype(made: torch.dtype, moved: torch.dtype) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=made)
    layer, x = from_conv(conv).to(moved), torch.randn(2, 3, 6, 5, dtype=moved)
    assert layer.hard_shifts() is not None
    torch.testing.assert_close(layer(x), conv.to(moved)(x), **tolerance(moved))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=dtype)
    x = torch.randn(2, 3, 6, 5, dtype=dtype)
    torch.testing.assert_close(from_conv(conv)(x), conv(x), **tolerance(dtype))


def test_soft_heads_approach_the_convolution_as_alpha_grows() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    errors = [
        float((from_conv(conv, alpha=alpha)(x) - conv(x)).abs().max().detach()) for alpha in (1.0, 2.0, 4.0, 8.0, 16.0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[0]


def test_what_is_no_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha: .*got -1\.0"):
        from_conv(nn.Conv1d(1, 1, 1), alpha=-1.0)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Linear(1, 1), TypeError, r"conv: must be an nn.Conv1d, .*transposes, got torch.nn.modules.linear.Linear"),
        (nn.LazyConv2d(3, 3), TypeError, r"conv: must have its weights, got LazyConv2d, not materialised"),
        (nn.Conv1d(1, 1, 1, dtype=torch.complex64), TypeError, r"conv: must have real .* got torch.complex64"),
        (
            nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
            ValueError,
            r"conv: must hold its weight itself, got ParametrizedConv2d",
        ),
    ],
)
def test_other_modules_are_refused(module: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_conv(module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unhooked")
def test_quantised_weights_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch announces the end of these classes
        conv = torch.ao.nn.quantized.Conv2d(2, 2, 3)
    with pytest.raises(TypeError, match=r"conv: .* got .*quantized.*Conv2d"):
        from_conv(conv)  # type: ignore[arg-type]


def test_a_convolution_with_a_forward_pass_of_its_own_is_refused() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    with pytest.raises(TypeError, match=r"conv: .*got Standardised with its own forward"):
        from_conv(Standardised(1, 1, 1))


def test_weights_that_are_no_numbers_are_refused() -> None:
    conv = nn.Conv1d(1, 1, 1)
    with torch.no_grad():
        conv.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"conv: .*got NaN or infinite values"):
        from_conv(conv)


def test_taps_that_bfloat16_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"conv: .*got torch.bfloat16"):
        from_conv(nn.Conv1d(1, 1, 3, dilation=257, dtype=torch.bfloat16))


def test_a_kernel_larger_than_the_padded_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"window: .*got window \(5,\)"):
        from_conv(nn.Conv1d(1, 1, 5))(torch.zeros(1, 1, 4))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_transposed_layer_takes_an_output_size_as_pytorch_does(extra: int) -> None:
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1).double()
    layer, x = from_conv(conv), torch.randn(1, 2, 4, 5, dtype=torch.float64)
    size = [7 + extra, 9 + extra]
    torch.testing.assert_close(layer(x, size), conv(x, size), **tolerance(torch.float64))
    torch.testing.assert_close(layer(x, [1, 3, *size]), conv(x, size), **tolerance(torch.float64))
    with pytest.raises(ValueError, match=r"output_size: .*got \(9, 9\)"):
        layer(x, [9, 9])
    with pytest.raises(ValueError, match=r"output_size: .*got \(4,\)"):
        from_conv(nn.Conv1d(1, 1, 1))(torch.zeros(1, 1, 4), [4])


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("key_channels", [None, 5])
@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect", "circular"])
def test_equation_9_in_the_layer_of_equation_8(dims: int, key_channels: int | None, mode: str) -> None:
    kind, sizes = ((nn.Conv1d, (9,)), (nn.Conv2d, (6, 7)))[dims - 1]
    conv = kind(3, 4, 3, padding="same", padding_mode=mode).double()  # type: ignore[arg-type]
    layer, x = equation_9(conv, key_channels=key_channels), torch.randn(2, 3, *sizes, dtype=torch.float64)
    assert isinstance(layer.encoding, Relative)
    assert layer.encoding.features.channels == dims + 1
    terms = layer.score_terms(x)
    assert set(terms) == {"content-content", "content-position", "position-content", "position-position"}
    assert all(float(term.detach().abs().max()) == 0 for name, term in terms.items() if name != "position-position")
    torch.testing.assert_close(layer(x), conv(x), **tolerance(torch.float64, scale=100))


@pytest.mark.usefixtures("unhooked")
def test_equation_9_refuses_what_it_does_not_state() -> None:
    with pytest.raises(ValueError, match=r"key_channels: .*got 2"):
        equation_9(nn.Conv2d(1, 1, 3), key_channels=2)
    with pytest.raises(TypeError, match=r"conv: .*got ConvTranspose2d"):
        equation_9(nn.ConvTranspose2d(1, 1, 3))  # type: ignore[arg-type]


def test_the_slides_form_of_the_encoding_does_not_single_out_a_shift() -> None:
    """With |delta| for |delta|^2 and no factor 2, a head for the shift (1, 0) likes that one no more than others."""
    shifts = torch.cartesian_prod(torch.arange(-3, 4), torch.arange(-3, 4)).double()
    centre = torch.tensor([1.0, 0.0], dtype=torch.float64)
    slides = -46 * (shifts.norm(dim=1) - shifts @ centre)
    paper = -46 * (shifts.square().sum(1) - 2 * shifts @ centre)
    best = [shifts[score >= score.max() - 1e-9].tolist() for score in (slides, paper)]
    assert best[0] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert best[1] == [[1, 0]]
