import numpy as np
import pytest

from attnconv.report import draw_mixture
from tests.report.making import outside, overlaps


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_every_head_is_named_and_no_texts_meet(heads: int) -> None:
    maps = np.random.default_rng(0).dirichlet(np.ones(49), heads).reshape(heads, 7, 7)
    figure = draw_mixture(maps, (3, 3), centres=[(0.0, -1.0)] * heads, title="a mixture")
    named = {axes.get_ylabel(): axes.get_xlabel() for axes in figure.axes if axes.get_ylabel()}
    assert named == {f"head {head}": "Δ = (0, −1)" for head in range(heads)}
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"maps: .* got \(10, 2, 2\)"):
        draw_mixture(np.ones((10, 2, 2)), (0, 0), centres=[(0.0, 0.0)] * 10, title="")
    with pytest.raises(ValueError, match=r"centres: .* got 1"):
        draw_mixture(np.ones((2, 2, 2)), (0, 0), centres=[(0.0, 0.0)], title="")
