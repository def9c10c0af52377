"""Convolutions as attention, compared with PyTorch for random hyper-parameters; and back, exact or least squares."""

import json
import random
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from attnconv import SelfAttention1d, SelfAttention2d
from attnconv.convert import SOFT_ALPHA, conversion_error, equation_9, from_conv, to_conv
from attnconv.convert.verify_conversions import Way, draw_convolution, perform, prove
from attnconv.encodings.content import Relative
from attnconv.grid import Border
from tests.tolerances import tolerance


@given(st.integers(0, 10**9), st.sampled_from(["dense", "kronecker", "shift"]))
def test_attention_equals_the_convolution(seed: int, way: Way) -> None:
    conv, x = draw_convolution(random.Random(seed), torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(perform(from_conv(conv), x, way), conv(x), **tolerance(torch.float64, scale=10))


def test_between_proofs_gradients_are_recorded() -> None:
    assert [torch.is_grad_enabled() for _ in prove(1)] == [True] * 3


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


def test_heads_to_be_trained_are_the_softest_that_begin_near_the_network() -> None:
    """Measured: softer heads lose more than two percentage points of accuracy, and sharper heads move less."""
    measured = Path(__file__).parents[2] / "results" / "recast-finetune" / "results.json"
    cnn, *others = json.loads(measured.read_text(encoding="utf-8"))["results"]
    begin = {float(row["network"].removeprefix("alpha ")): row["held_out_before"] for row in others}
    farthest = {float(row["network"].removeprefix("alpha ")): row["farthest"] for row in others}
    assert min(alpha for alpha, right in begin.items() if right > cnn["held_out_before"] - 0.02) == SOFT_ALPHA
    assert farthest[SOFT_ALPHA] == max(far for alpha, far in farthest.items() if alpha >= SOFT_ALPHA)


def test_what_is_no_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha: .*got -1\.0"):
        from_conv(nn.Conv1d(1, 1, 1), alpha=-1.0)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Linear(1, 1), TypeError, r"conv: .*got torch.nn.modules.linear.Linear"),
        (nn.LazyConv2d(3, 3), TypeError, r"conv: .*got an uninitialised LazyConv2d"),
        (nn.Conv1d(1, 1, 1, dtype=torch.complex64), TypeError, r"conv: .*got torch.complex64"),
        (
            nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
            ValueError,
            r"conv: .*got ParametrizedConv2d",
        ),
    ],
)
def test_other_modules_are_refused(module: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_conv(module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unhooked")
def test_quantised_weights_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these classes are deprecated
        conv = torch.ao.nn.quantized.Conv2d(2, 2, 3)
    with pytest.raises(TypeError, match=r"conv: .* got .*quantized.*Conv2d"):
        from_conv(conv)  # type: ignore[arg-type]


def test_a_convolution_with_a_forward_pass_of_its_own_is_refused() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    with pytest.raises(TypeError, match=r"conv: .*got Standardised with a custom forward"):
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
@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect", "circular"])
def test_equation_9_in_the_layer_of_equation_8(dims: int, mode: str) -> None:
    kind, sizes = ((nn.Conv1d, (9,)), (nn.Conv2d, (6, 7)))[dims - 1]
    conv = kind(3, 4, 3, padding="same", padding_mode=mode).double()  # type: ignore[arg-type]
    layer, x = equation_9(conv), torch.randn(2, 3, *sizes, dtype=torch.float64)
    assert isinstance(layer.encoding, Relative)
    assert layer.encoding.features.channels == dims + 1
    terms = layer.score_terms(x)
    assert set(terms) == {"content-content", "content-position", "position-content", "position-position"}
    assert all(float(term.detach().abs().max()) == 0 for name, term in terms.items() if name != "position-position")
    torch.testing.assert_close(layer(x), conv(x), **tolerance(torch.float64, scale=100))


@pytest.mark.usefixtures("unhooked")
def test_equation_9_refuses_what_it_does_not_state() -> None:
    with pytest.raises(TypeError, match=r"conv: .*got ConvTranspose2d"):
        equation_9(nn.ConvTranspose2d(1, 1, 3))  # type: ignore[arg-type]
    for dtype, apart in ((torch.bfloat16, 301), (torch.float16, 713)):
        with pytest.raises(ValueError, match=f"conv: must have a dtype that can represent .* got {dtype}"):
            equation_9(nn.Conv1d(1, 1, 3, padding=apart, dilation=apart, dtype=dtype))


def test_the_slides_form_of_the_encoding_does_not_single_out_a_shift() -> None:
    """With |delta| instead of |delta|^2 and without the factor 2, a head for shift (1, 0) has no unique maximum."""
    shifts = torch.cartesian_prod(torch.arange(-3, 4), torch.arange(-3, 4)).double()
    centre = torch.tensor([1.0, 0.0], dtype=torch.float64)
    slides = -46 * (shifts.norm(dim=1) - shifts @ centre)
    paper = -46 * (shifts.square().sum(1) - 2 * shifts @ centre)
    best = [shifts[score >= score.max() - 1e-9].tolist() for score in (slides, paper)]
    assert best[0] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert best[1] == [[1, 0]]


@given(st.integers(0, 10**9), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_every_convolution_comes_back_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    conv, x = draw_convolution(random.Random(seed), dtype)
    back = to_conv(from_conv(conv))
    assert type(back) is type(conv)
    assert torch.equal(back.weight, conv.weight)
    assert (conv.bias is None) == (back.bias is None)
    # In bfloat16, oneDNN's AMX kernels read memory outside the image for some strides and dilations.
    torch.testing.assert_close(back.double()(x.double()), conv.double()(x.double()), rtol=0, atol=0)


def hard(layer: SelfAttention2d, shifts: list[list[int]]) -> SelfAttention2d:
    with torch.no_grad():
        layer.encoding.get_parameter("centres").copy_(torch.tensor(shifts))
        layer.encoding.get_parameter("spread").fill_(12.0)
    return layer.double()


@pytest.mark.parametrize(
    ("border", "padding", "mode"),
    [
        ("renormalise", 0, "replicate"),
        ("zero", 3, "zeros"),
        ("zero", 1, "zeros"),  # for heads further out, the nearest lattice point is also padding
        ("zero", 0, "replicate"),  # without padding, it is a pixel
        ("replicate", 1, "replicate"),
        ("reflect", 3, "reflect"),
        ("circular", 3, "circular"),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_hard_heads_anywhere_are_one_convolution(border: Border, padding: int, mode: str, stride: int) -> None:
    layer = SelfAttention2d(3, 2, 4, border=border, padding=padding, stride=stride)
    conv = to_conv(hard(layer, [[2, -2], [0, 0], [2, -2], [-2, 0]]))
    assert (conv.padding_mode, conv.kernel_size, conv.dilation) == (mode, (3, 3), (2, 2))
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(conv(x), layer(x), **tolerance(torch.float64))
    assert conversion_error(layer, conv, x).everywhere < 1e-12


def test_what_no_convolution_continues_is_refused() -> None:
    layer = hard(SelfAttention2d(1, 1, 1, border="reflect", padding=1), [[2, 0]])
    with pytest.raises(ValueError, match=r"layer: .*got heads up to 2 positions outside"):
        to_conv(layer)
    with pytest.raises(ValueError, match=r"layer: .*got soft heads"):
        to_conv(SelfAttention2d(1, 1, 1))
    moved = from_conv(nn.Conv2d(1, 1, 3))
    with torch.no_grad():
        moved.encoding.get_parameter("centres")[0] = 7
    with pytest.raises(ValueError, match=r"layer: .*got heads at \[\(7, 7\)\]"):
        to_conv(moved)
    with pytest.raises(ValueError, match=r"x: .*got None"):
        to_conv(SelfAttention2d(1, 1, 1), 3)
    with pytest.raises(ValueError, match=r"kernel_size: .*got \(2, 2\)"):
        to_conv(SelfAttention2d(1, 1, 1), 2, x=torch.zeros(1, 1, 4, 4))


def test_soft_heads_have_a_nearest_convolution_that_grows_nearer_with_the_kernel() -> None:
    layer, x = SelfAttention2d(2, 3, 5).double(), torch.zeros(1, 2, 11, 12, dtype=torch.float64)
    errors = [conversion_error(layer, to_conv(layer, size, x=x), x).everywhere for size in (1, 3, 5, 7, 9)]
    assert errors == sorted(errors, reverse=True)


def matrix(module: nn.Module, x: Tensor) -> Tensor:
    """Return the matrix of a module from all inputs to all outputs, without its bias."""
    basis = torch.eye(x[0].numel(), dtype=x.dtype).reshape(-1, *x.shape[1:])
    with torch.no_grad():
        return (module(basis) - module(torch.zeros_like(x[:1]))).flatten(1)


@pytest.mark.parametrize("border", ["renormalise", "zero", "reflect"])
def test_nearest_and_its_error_are_those_of_the_whole_matrices(border: Border) -> None:
    layer = SelfAttention1d(2, 1, 3, border=border, padding=2, encoding="learned").double()
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    conv = to_conv(layer, 3, x=x)
    target = matrix(layer, x)
    kernels = []
    for index in range(conv.weight.numel()):  # convolutions with one nonzero weight span all convolutions
        with torch.no_grad():
            single = nn.Conv1d(2, 1, 3, padding=1, padding_mode=conv.padding_mode, bias=False, dtype=x.dtype)
            single.weight.copy_(torch.eye(conv.weight.numel(), dtype=x.dtype)[index].reshape(conv.weight.shape))
        kernels.append(matrix(single, x).flatten())
    best = torch.linalg.lstsq(torch.stack(kernels, 1), target.flatten()[:, None]).solution[:, 0]
    torch.testing.assert_close(conv.weight.flatten(), best, **tolerance(torch.float64, scale=100))
    error = conversion_error(layer, conv, x)
    apart = (matrix(conv, x) - target).square().sum(0)
    whole = target.square().sum(0)
    for found, queries in ((error.everywhere, slice(None)), (error.inside, slice(1, -1)), (error.border, [0, -1])):
        torch.testing.assert_close(found, float((apart[queries].sum() / whole[queries].sum()).sqrt()))


def test_content_counts_through_its_mean_over_images() -> None:
    layer = SelfAttention1d(4, 2, 2, encoding="learned-content").double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    conv = to_conv(layer, 3, x=x)
    best = conversion_error(layer, conv, x).everywhere
    with torch.no_grad():
        conv.weight.mul_(1.01)
    assert best < conversion_error(layer, conv, x).everywhere


def test_a_grouped_convolution_is_compared_as_the_dense_one_that_it_equals() -> None:
    layer, x = SelfAttention2d(2, 2, 4).double(), torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    grouped = nn.Conv2d(2, 2, 3, padding=1, groups=2, dtype=torch.float64)
    dense = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.zero_()
        dense.weight[0, 0], dense.weight[1, 1] = grouped.weight[:, 0]
    found, expected = (conversion_error(layer, conv, x).everywhere for conv in (grouped, dense))
    assert found == pytest.approx(expected)


def test_error_between_layers_that_do_not_match_is_refused() -> None:
    layer, x = SelfAttention2d(2, 3, 4), torch.zeros(1, 2, 5, 5)
    with pytest.raises(ValueError, match=r"conv: .*got \(3, 3\)"):
        conversion_error(layer, nn.Conv2d(2, 3, 3), x)


def test_a_layer_without_weights_is_nothing_to_be_far_from() -> None:
    layer = SelfAttention2d(1, 1, 1, bias=False)
    with torch.no_grad():
        layer.get_parameter("weight").zero_()
    conv, x = nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 3, 3)
    error = conversion_error(layer, conv, x)
    assert (error.inside, error.border) == (float("inf"), None)
