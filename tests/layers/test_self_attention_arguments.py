"""Tests of invalid inputs and arguments of layers."""

from typing import Any

import numpy as np
import pytest
import torch

from attnconv import Quadratic, SelfAttention2d
from attnconv.layers.checks import check_device_dtype
from tests.layers.test_self_attention import DOUBLE, images, layer2d


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((12, 4), r"input: .*got shape \(12, 4\)"),
        ((1, 3, 4, 4), r"input: .*12 channels, got shape \(1, 3, 4, 4\)"),
        ((1, 12, 0, 4), r"input: .*got shape \(1, 12, 0, 4\)"),
    ],
)
def test_wrong_images_are_refused(shape: tuple[int, ...], message: str) -> None:
    for call in (layer2d(), layer2d().operator, layer2d().score_terms):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(shape, dtype=DOUBLE))


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"input: .*got torch.float32"):
        layer2d()(torch.zeros(1, 12, 4, 4))
    with pytest.raises(TypeError, match=r"dtype: .*torch.float32, .*got torch.int64"):
        SelfAttention2d(2, 2, 1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"dtype: .*got torch.float64"):
        check_device_dtype("mps", torch.float64)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": 0}, "in_channels: .*got 0"),
        ({"out_channels": -1}, "out_channels: .*got -1"),
        ({"heads": 0}, "heads: .*got 0"),
        ({"groups": 5}, "groups: .*got groups=5 for 4 -> 6"),
        ({"groups": 0}, "groups: .*got 0"),
        ({"head_channels": 0}, "head_channels: .*got 0"),
        ({"head_channels": 2, "groups": 2}, "head_channels: .* got head_channels=2 with groups=2"),
        ({"attention_dropout": 1.0}, "attention_dropout: .*got 1.0"),
        ({"backend": "fast"}, "backend: .*got 'fast'"),
        ({"border": "wrap"}, "border: must be one of .* got 'wrap'"),
        ({"stride": (1, 2, 3)}, r"stride: .*got \(1, 2, 3\)"),
        ({"dilation": 0}, "dilation: .*got 0"),
        (
            {"transposed": True},
            "transposed: .*got border='renormalise', window=None",
        ),
        ({"output_padding": 1}, r"output_padding: .*got \(1, 1\)"),
        ({"window": 0}, "window: .*got 0"),
        ({"encoding": "cubic"}, "encoding: .*got 'cubic'"),
        ({"encoding": Quadratic(4)}, "encoding: .*got heads=4, dims=2"),
        ({"encoding": Quadratic(3, 1)}, "encoding: .*got heads=3, dims=1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfAttention2d(**{"in_channels": 4, "out_channels": 6, "heads": 3, **options})


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 2.5}, "heads: .*got 2.5"),
        ({"heads": True}, "heads: .*got True"),
        ({"in_channels": "4"}, "in_channels: .*got '4'"),
        ({"head_channels": 1.0}, "head_channels: .*got 1.0"),
        ({"stride": 1.5}, "stride: .*got 1.5"),
        ({"padding": 1.5}, "padding: .*got 1.5"),
        ({"padding": ((0, 1), (0, 1.5))}, r"padding: must be .* got \(\(0, 1\), \(0, 1.5\)\)"),
        ({"dilation": "2"}, "dilation: .*got '2'"),
        ({"attention_dropout": "0"}, "attention_dropout: .*got '0'"),
        ({"dtype": "float32"}, "dtype: .*got 'float32'"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: .*got torch.float8_e4m3fn"),
        ({"dtype": torch.complex64}, "dtype: .*got torch.complex64"),
    ],
)
def test_arguments_of_wrong_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SelfAttention2d(**{"in_channels": 4, "out_channels": 6, "heads": 3, **options})


@pytest.mark.usefixtures("unhooked")
def test_numbers_of_numpy_are_whole_numbers() -> None:
    three = np.int64(3)
    layer = SelfAttention2d(three, three, three, stride=three, padding=(three, (three, three)))  # type: ignore[arg-type]
    assert (layer.stride, layer.padding) == ((3, 3), ((3, 3), (3, 3)))
    assert layer(torch.zeros(1, 3, 4, 4)).shape == (1, 3, 2, 2)


@pytest.mark.usefixtures("unhooked")
def test_inputs_of_wrong_types_are_refused() -> None:
    layer = SelfAttention2d(3, 3, 1)
    with pytest.raises(TypeError, match=r"input: .*got list"):
        layer([0.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"input: .*got torch.int64"):
        layer(torch.zeros(1, 3, 2, 2, dtype=torch.int64))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"input: .*got torch.float64"),
    ):
        layer(torch.zeros(1, 3, 2, 2, dtype=DOUBLE))
    with pytest.raises(ValueError, match=r"sizes: .*got \(5,\)"):
        layer.plan((5,))
    with pytest.raises(TypeError, match=r"queries: .* got list"):
        layer.operator(torch.zeros(1, 3, 2, 2)).rows([0, 0.5])  # type: ignore[list-item]


@pytest.mark.usefixtures("unhooked")
def test_an_encoding_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"encoding: .*got int"):
        SelfAttention2d(2, 2, 1, encoding=3)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_refused_on_loading() -> None:
    layer = SelfAttention2d(2, 2, 1)
    state = {name: torch.full_like(value, torch.nan) for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"weight: .*got NaN or infinite values \(from the loaded"):
        layer.load_state_dict(state)
    assert all(torch.isfinite(value).all() for value in layer.state_dict().values())  # the layer is unchanged
    with torch.no_grad():
        layer.encoding.get_parameter("centres").fill_(torch.nan)
    with pytest.raises(ValueError, match=r"encoding.centres: .*got NaN"):
        layer.plan((4, 4))


def test_content_needs_every_query_on_a_pixel() -> None:
    layer = layer2d("learned-content", window=(1, 1), padding=2, border="zero")
    with pytest.raises(ValueError, match=r"encoding: .*got queries from 0 to 7 over 4 keys"):
        layer(images(4, 4))
    with pytest.raises(ValueError, match=r"encoding: .*got queries from 0 to 6 over 4 keys with spacing 2"):
        layer2d("learned-content", window=(1, 1), stride=2, border="zero", transposed=True)(images(4, 4))
