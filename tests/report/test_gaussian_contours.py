import math

import numpy as np
import pytest

from attnconv.report.gaussian_contours import HeadGaussians, choose_view, contour, percentile_radius, why_hidden

COVARIANCES = {
    "isotropic": [[0.7, 0.0], [0.0, 0.7]],
    "turned": [[2.0, 1.5], [1.5, 1.6]],
    "stripe": [[9.0, 0.0], [0.0, 1e-4]],
}


@pytest.mark.parametrize("mass", [0.5, 0.9])
@pytest.mark.parametrize("covariance", COVARIANCES.values(), ids=COVARIANCES)
def test_contour_holds_its_part_of_the_mass(covariance: list[list[float]], mass: float) -> None:
    centre = np.array([1.5, -2.0])
    samples = np.random.default_rng(0).multivariate_normal(centre, covariance, 200_000)
    major, minor, angle = contour(np.array(covariance), mass)
    along = np.array([math.sin(angle), math.cos(angle)])  # row, column
    across = np.array([along[1], -along[0]])
    shifts = samples - centre
    inside = (shifts @ along / major) ** 2 + (shifts @ across / minor) ** 2 <= 1.0
    assert major >= minor
    np.testing.assert_allclose(inside.mean(), mass, atol=0.004)  # four standard errors


def test_isotropic_contour_is_a_circle_of_the_percentile_radius() -> None:
    np.testing.assert_allclose(contour(np.eye(2) * 4.0, 0.5)[:2], 2.0 * percentile_radius(0.5))


def test_singular_covariance_gives_a_line_and_a_huge_one_is_cut() -> None:
    major, minor, angle = contour(np.array([[1e300, 0.0], [0.0, 0.0]]), 0.9, longest=100.0)
    assert (major, minor) == (100.0, 0.0)
    np.testing.assert_allclose(abs(math.sin(angle)), 1.0)  # the row direction


def seen(heads: HeadGaussians, view: float) -> list[str]:
    return [why_hidden(*head, view) for head in zip(heads.centres, heads.covariances, strict=True)]


def test_hidden_heads() -> None:
    heads = HeadGaussians.of(
        [[0, 0], [0, -9], [1, 1], [0, 0], [math.nan, 0], [0, 0], [0, math.inf], [2, 0]],
        [
            np.eye(2),
            np.eye(2),
            1e12 * np.eye(2),
            [[math.inf, 0], [0, math.inf]],
            np.eye(2),
            [[math.nan, 0], [0, 1]],
            np.eye(2),
            [[1e9, 0], [0, 1e-9]],
        ],
    )
    expected = [
        "",
        "outside the view",
        "wider than the view",
        "wider than the view",
        "not a number",
        "not a number",
        "not a number",
        "",
    ]
    assert seen(heads, 5.5) == expected


def test_none_counts_as_not_a_number() -> None:
    assert seen(HeadGaussians.of([[None, 0.0]], [np.eye(2)]), 3.0) == ["not a number"]


def test_view_shows_nearly_all_heads_within_its_limits() -> None:
    near = HeadGaussians.of([[1, 0], [0, -1]], [np.eye(2) * 0.01] * 2)
    far = HeadGaussians.of([[6, 0], [0, -6]], [np.eye(2) * 0.01] * 2)
    assert choose_view([near], limit=15.5) == 2.5
    assert choose_view([near, far], limit=15.5) == 7.5
    assert choose_view([near, far], limit=3.5) == 3.5
    assert choose_view([HeadGaussians.of([[math.nan, 0]], [np.eye(2)])], limit=15.5) == 7.5
    assert choose_view([HeadGaussians.of(np.zeros((0, 2)), np.zeros((0, 2, 2)))], limit=15.5) == 7.5


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"centres: .*got \(4, 1\)"):
        HeadGaussians.of(np.zeros((4, 1)), np.zeros((4, 2, 2)))
    with pytest.raises(ValueError, match=r"covariances: .*got \(3, 2, 2\)"):
        HeadGaussians.of(np.zeros((4, 2)), np.zeros((3, 2, 2)))
