"""The ridge of fitted kernels: it decides where values cannot, and is not seen where they can."""

from dataclasses import replace

import torch

from attnconv.surgery.head_kernel_fit import _regressors, fit_mixing, mixing_errors
from tests.inspect.sharp_vit import sharp, tokens_of


def test_without_contrast_the_kernel_is_the_mean_attention() -> None:
    """Every kernel of the same sum does the same to values that are equal: the one nearest to the mean is taken."""
    part = tokens_of(sharp(0))
    flat = replace(part, inputs=part.inputs[:, :1].expand_as(part.inputs).contiguous())
    fitted, mean = fit_mixing(flat, 3), fit_mixing(flat, 3, fit="mean")
    torch.testing.assert_close(fitted.weights[:, :9], mean.weights[:, :9], rtol=0, atol=1e-3)
    missing, given = mixing_errors(flat, fitted)
    assert missing.norm() < 1e-4 * given.norm()


def test_with_contrast_the_fit_is_the_least_squares() -> None:
    part = tokens_of(sharp(0))
    fitted, mean = fit_mixing(part, 3), fit_mixing(part, 3, fit="mean")
    with torch.no_grad():
        rows, values = part.maps_and_values()
        regressors = _regressors(values, fitted.profile, part, part.taps(3)).transpose(0, 1).flatten(1, 3).double()
        target = (rows @ values).transpose(0, 1).flatten(1).double()
        best = torch.linalg.lstsq(regressors, target[..., None]).solution[..., 0]
    given_up = (best - fitted.weights[:, :10]).norm(dim=1) / (best - mean.weights[:, :10]).norm(
        dim=1
    )  # of the way from the mean attention
    assert bool((given_up < 0.02).all())
