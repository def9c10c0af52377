"""Shifts that may be read, against loops; and the ridge of fits, which decides only where values cannot."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnconv.surgery.head_kernel_fit import Taps, _regressors, fit_mixing, mixing_errors
from tests.inspect.sharp_vit import sharp, tokens_of
from tests.tolerances import tolerance

GRID = (3, 4)


def test_without_contrast_the_kernel_is_the_mean_attention() -> None:
    """Every kernel of the same sum does the same to values that are equal: the one nearest to the mean is taken."""
    part = tokens_of(sharp(0))
    flat = replace(part, inputs=part.inputs[:, :1].expand_as(part.inputs).contiguous())
    fitted, mean = fit_mixing(flat, 3), fit_mixing(flat, 3, fit="mean")
    torch.testing.assert_close(fitted.weights[:, :9], mean.weights[:, :9], rtol=0, atol=1e-3)
    missing, given = mixing_errors(flat, fitted)
    assert missing.norm() < 1e-4 * given.norm()


def test_contrast_of_the_size_of_half_precisions_rounding_does_not_move_the_kernel() -> None:
    part = tokens_of(sharp(0))
    flat = part.inputs.mean(1, keepdim=True)
    moved = []
    for contrast in (1e-3, 1e-1):
        low = replace(part, inputs=flat + contrast * (part.inputs - flat))
        fitted, mean = fit_mixing(low, 3), fit_mixing(low, 3, fit="mean")
        moved.append(float((fitted.weights - mean.weights).abs().max()))
    assert moved[0] < 0.02 < 0.1 < moved[1]


def test_with_contrast_the_fit_is_the_least_squares() -> None:
    part = tokens_of(sharp(0))
    fitted, mean = fit_mixing(part, 3), fit_mixing(part, 3, fit="mean")
    with torch.no_grad():
        rows, values = part.maps_and_values()
        regressors = _regressors(values, fitted.profile, part, Taps.of_layer(part, 3))
        regressors = regressors.transpose(0, 1).flatten(1, 3).double()
        target = (rows @ values).transpose(0, 1).flatten(1).double()
        best = torch.linalg.lstsq(regressors, target[..., None]).solution[..., 0]
    given_up = (best - fitted.weights[:, :10]).norm(dim=1) / (best - mean.weights[:, :10]).norm(
        dim=1
    )  # of the way from the mean attention
    assert bool((given_up < 0.02).all())


def regions() -> Tensor:
    """Two sequences of one image: the first is whole, the second holds a left and a right part."""
    part = torch.zeros(2, *GRID)
    part[1, :, 2:] = 1
    label = part.flatten(1)
    return label[:, :, None] == label[:, None]


def neighbour(token: int, down: int, right: int) -> int | None:
    row, column = token // GRID[1] + down, token % GRID[1] + right
    return row * GRID[1] + column if 0 <= row < GRID[0] and 0 <= column < GRID[1] else None


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_columns_are_what_loops_find(size: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    allowed = regions() if masked else torch.ones(1, 12, 12, dtype=torch.bool)
    values = torch.randn(4, 2, 12, 3, generator=generator, dtype=torch.float64)
    profile = torch.rand(2, size, size, generator=generator, dtype=torch.float64)
    taps = Taps.of(GRID, size, values)
    taps = taps.masked(allowed) if masked else taps
    columns = list(taps.columns(values, profile))
    half = size // 2
    shifts = [(down, right) for down in range(-half, half + 1) for right in range(-half, half + 1)]
    expected = torch.zeros(len(shifts) + 1, *values.shape, dtype=torch.float64)
    for sequence in range(4):
        may = allowed[sequence % len(allowed)]
        for query in range(12):
            places = [neighbour(query, *shift) for shift in shifts]
            inside = [place is not None and bool(may[query, place]) for place in places]
            mass = profile.flatten(1)
            ratio = mass.sum(1) / mass[:, torch.tensor(inside)].sum(1)
            for tap, place in enumerate(places):
                if inside[tap]:
                    expected[tap, sequence, :, query] = ratio[:, None].clamp(max=size**2) * values[sequence, :, place]
            expected[-1, sequence, :, query] = values[sequence][:, may[query]].mean(1)
    torch.testing.assert_close(torch.stack(columns), expected, **tolerance(torch.float64))


def test_a_head_without_mass_keeps_its_kernel() -> None:
    assert Taps.of(GRID, 3, torch.zeros(())).ratio(torch.zeros(1, 3, 3)).tolist() == [[[1.0] * 12]]
