import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attnconv.report.theory_figures import draw_factorisation, draw_mixture
from attnconv.theory.expressibility import Factorisation, factorise
from tests.report.making import outside, overlaps, text_boxes

LONG = "a run whose name is rather long, as names are when they say what was changed: heads, layer 3, after epoch 300"


def example(heads: int, sizes: tuple[int, ...], kernel: int, *, sharp: float = 4.0) -> Factorisation:
    keys = torch.Size(sizes).numel()
    rows = torch.softmax(sharp * torch.randn(heads, keys, keys), -1)
    return factorise(rows, kernel, query=tuple(size // 2 for size in sizes), sizes=sizes)


def panel(figure: Figure, label: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_label() == label)


def shown(figure: Figure, label: str) -> Tensor:
    (image,) = panel(figure, label).images
    return torch.from_numpy(np.ma.getdata(image.get_array()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "sizes", "kernel"),
    [
        (1, (1,), 1),
        (2, (2,), 1),
        (9, (6, 6), 3),
        (5, (16, 16), 2),
        (1, (3, 12), 5),
        (40, (4, 6, 6), 3),
        (64, (5, 5), 7),
        (16, (40,), 3),
    ],
)
def test_texts_neither_meet_nor_leave_the_page(heads: int, sizes: tuple[int, ...], kernel: int) -> None:
    figure = draw_factorisation(example(heads, sizes, kernel), title=LONG)
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_the_four_matrices_are_those_of_the_query() -> None:
    factors = example(9, (4, 5), 3)
    figure = draw_factorisation(factors, title="t")
    torch.testing.assert_close(shown(figure, "indicators"), factors.indicators)
    torch.testing.assert_close(shown(figure, "phi"), factors.phi)
    torch.testing.assert_close(shown(figure, "rows"), factors.rows)
    torch.testing.assert_close(shown(figure, "difference"), factors.indicators - factors.phi @ factors.rows)
    assert panel(figure, "indicators").images[0].get_clim() == (0.0, 1.0)
    low, high = panel(figure, "phi").images[0].get_clim()
    assert -low == high == pytest.approx(float(factors.phi.abs().max()))
    ticks = [label.get_text() for label in panel(figure, "indicators").get_yticklabels()]
    assert ticks[:2] == ["(-1, -1)", "(-1, 0)"]
    texts = [text for text, _ in text_boxes(figure)]
    assert any(f"|E_q − Φ A_q| / |E_q| = {factors.residual:.2f}" in text for text in texts)
    assert any("Query (2, 2) on 4 x 5 positions" in text for text in texts)


def test_the_sign_says_whether_the_factors_are_equal() -> None:
    one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    for phi, sign in ((None, "="), (half, "≈")):
        figure = draw_factorisation(factorise(one_pixel_each, 1, query=(0,), sizes=(2,), phi=phi), title="t")
        assert [text for text, _ in text_boxes(figure) if text in ("=", "≈")] == [sign]


def test_matrices_stand_side_by_side_with_rows_of_one_height() -> None:
    figure = draw_factorisation(example(5, (4, 4), 3), title="t")
    left, middle, right, below = (
        panel(figure, label).get_position() for label in ("indicators", "phi", "rows", "difference")
    )
    assert left.x1 < middle.x0 < middle.x1 < right.x0
    assert below.y1 < min(left.y0, right.y0)
    assert (below.x0, below.width) == pytest.approx((left.x0, left.width))
    np.testing.assert_allclose([left.height / 9, right.height / 5, below.height / 9], middle.height / 9)


def test_large_or_missing_numbers_can_be_drawn() -> None:
    nothing = factorise(torch.zeros(2, 4, 4), 1, query=(0, 0), sizes=(2, 2))
    huge = factorise(
        torch.softmax(torch.randn(3, 4, 4), -1), 2, query=(1, 1), sizes=(2, 2), phi=torch.full((4, 3), -1e12)
    )
    for factors in (nothing, huge):
        figure = draw_factorisation(factors, title="$x_1$")
        assert overlaps(figure) == []
        assert outside(figure) == []


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_every_head_of_a_mixture_is_named_and_no_texts_meet(heads: int) -> None:
    maps = np.random.default_rng(0).dirichlet(np.ones(49), heads).reshape(heads, 7, 7)
    figure = draw_mixture(maps, (3, 3), centres=[(0.0, -1.0)] * heads, title="a mixture")
    named = {axes.get_ylabel(): axes.get_xlabel() for axes in figure.axes if axes.get_ylabel()}
    assert named == {f"head {head}": "Δ = (0, −1)" for head in range(heads)}
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_bad_input_of_a_mixture() -> None:
    with pytest.raises(ValueError, match=r"maps: .* got \(10, 2, 2\)"):
        draw_mixture(np.ones((10, 2, 2)), (0, 0), centres=[(0.0, 0.0)] * 10, title="")
    with pytest.raises(ValueError, match=r"centres: .* got 1"):
        draw_mixture(np.ones((2, 2, 2)), (0, 0), centres=[(0.0, 0.0)], title="")
