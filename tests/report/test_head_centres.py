import math

import numpy as np
import pytest
from matplotlib.patches import Ellipse

from attnconv.report.figure_style import colour_of, shape_of
from attnconv.report.head_centres import (
    HeadGaussians,
    choose_view,
    contour,
    draw_centres,
    draw_centres_over_training,
    percentile_radius,
    why_hidden,
)
from tests.report.making import outside, overlaps

COVARIANCES = {
    "isotropic": [[0.7, 0.0], [0.0, 0.7]],
    "turned": [[2.0, 1.5], [1.5, 1.6]],
    "stripe": [[9.0, 0.0], [0.0, 1e-4]],
}


def heads_of(count: int, *, seed: int = 0, broken: bool = False) -> HeadGaussians:
    generator = np.random.default_rng(seed)
    roots = generator.normal(0.0, 1.0, (count, 2, 2))
    centres, covariances = generator.normal(0.0, 2.0, (count, 2)), roots @ roots.transpose(0, 2, 1)
    if broken:
        centres[0], covariances[1], centres[2, 0] = (400.0, -3.0), 1e12 * np.eye(2), math.nan
        covariances[3], covariances[4], covariances[5] = [[1e9, 0], [0, 1e-9]], 0.0, 1e300
    return HeadGaussians(centres, covariances)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 16), (4, 9), (6, 9), (7, 3), (12, 17), (1, 40)])
def test_texts_neither_meet_nor_leave_the_page(layers: int, heads: int) -> None:
    figure = draw_centres(
        [heads_of(heads, seed=seed, broken=heads >= 9) for seed in range(layers)],
        title="a run whose name is long, as names of runs are when they say what was changed: heads after epoch 300",
        sizes=(16, 16),
    )
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_a_panel_holds_two_ellipses_and_one_mark_per_head() -> None:
    heads = HeadGaussians([[1, 2], [-1, 0]], [np.diag([4.0, 1.0])] * 2)
    (panel,) = draw_centres([heads], title="t", sizes=(16, 16)).axes
    ellipses = [patch for patch in panel.patches if isinstance(patch, Ellipse)]
    assert [ellipse.get_linestyle() for ellipse in ellipses] == ["-", ":", "-", ":"]
    np.testing.assert_allclose(ellipses[0].center, (2, 1))  # column, row
    np.testing.assert_allclose([ellipses[0].width, ellipses[0].height], [4 * 1.17741, 2 * 1.17741], rtol=1e-5)
    np.testing.assert_allclose(abs(ellipses[0].angle) % 180, 90)  # the long axis runs along the rows
    assert [line.get_marker() for line in panel.lines] == [shape_of(0), shape_of(1)]
    assert panel.get_ylim()[0] > panel.get_ylim()[1]  # rows grow downwards


def test_heads_that_cannot_be_drawn_are_counted() -> None:
    figure = draw_centres([heads_of(9, broken=True)], title="t", sizes=(16, 16))
    (panel,) = figure.axes
    hidden = "1 head nearly uniform\n1 head not a number\n1 head outside the view\n"
    assert panel.get_xlabel() == f"{hidden}column shift (positions)"
    (panel,) = draw_centres([heads_of(2)], title="t").axes
    assert panel.get_xlabel() == "column shift (positions)"


def test_layers_without_heads_can_be_drawn() -> None:
    empty = HeadGaussians(np.zeros((0, 2)), np.zeros((0, 2, 2)))
    assert overlaps(draw_centres([empty, heads_of(3)], title="pruned")) == []
    assert overlaps(draw_centres([empty], title="pruned")) == []


def test_over_training_shows_first_and_last_epoch() -> None:
    history = [(epoch, heads_of(9, seed=epoch)) for epoch in range(61)]
    figure = draw_centres_over_training(history, title="t", sizes=(8, 8))
    titles = [axes.get_title() for axes in figure.axes]
    assert (titles[0], titles[-1], len(titles)) == ("epoch 0", "epoch 60", 6)
    assert overlaps(figure) == []


def test_marks_repeat_late() -> None:
    assert len({(colour_of(i), shape_of(i)) for i in range(72)}) == 72


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"layers: .*got none"):
        draw_centres([], title="t")
    with pytest.raises(ValueError, match=r"history: .*got \[\]"):
        draw_centres_over_training([], title="t")
    with pytest.raises(ValueError, match=r"history: .* got \[1, 1\]"):
        draw_centres_over_training([(1, heads_of(1)), (1, heads_of(1))], title="t")


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
    return [why_hidden(*head, view, (16, 16)) for head in zip(heads.centres, heads.covariances, strict=True)]


def test_hidden_heads() -> None:
    heads = HeadGaussians(
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
        "nearly uniform",
        "nearly uniform",
        "not a number",
        "not a number",
        "not a number",
        "",
    ]
    assert seen(heads, 5.5) == expected


def test_none_counts_as_not_a_number() -> None:
    assert seen(HeadGaussians([[None, 0.0]], [np.eye(2)]), 3.0) == ["not a number"]


def test_view_shows_nearly_all_heads_within_its_limits() -> None:
    near = HeadGaussians([[1, 0], [0, -1]], [np.eye(2) * 0.01] * 2)
    far = HeadGaussians([[6, 0], [0, -6]], [np.eye(2) * 0.01] * 2)
    assert choose_view([near], limit=15.5) == 2.5
    assert choose_view([near, far], limit=15.5) == 7.5
    assert choose_view([near, far], limit=3.5) == 3.5
    assert choose_view([HeadGaussians([[math.nan, 0]], [np.eye(2)])], limit=15.5) == 7.5
    assert choose_view([HeadGaussians(np.zeros((0, 2)), np.zeros((0, 2, 2)))], limit=15.5) == 7.5


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"centres: .*got \(4, 1\)"):
        HeadGaussians(np.zeros((4, 1)), np.zeros((4, 2, 2)))
    with pytest.raises(ValueError, match=r"covariances: .*got \(3, 2, 2\)"):
        HeadGaussians(np.zeros((4, 2)), np.zeros((3, 2, 2)))
