"""Every figure counts layers and heads from 0, and uses positions as the unit of length."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

from attnconv import SelfAttention2d
from attnconv.inspect import audit
from attnconv.inspect.chosen_queries import QueryMaps
from attnconv.paper.figures import FIGURES
from attnconv.report import HeadGaussians, draw_centres, draw_centres_over_training, draw_profiles
from attnconv.report.attention_maps import draw_query

HEADS = HeadGaussians([[0, 1], [2, -1], [1, 1]], [np.eye(2)] * 3)


def query_maps() -> Figure:
    maps = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    return draw_query([QueryMaps("a", ((1.0, 2.0),), maps), QueryMaps("b", ((1.0, 2.0),), maps)], 0, title="t", zoom=5)


def profiles() -> Figure:
    torch.manual_seed(0)
    (layer,) = audit(nn.Sequential(SelfAttention2d(3, 3, heads=3)), torch.randn(2, 3, 6, 6)).layers
    return draw_profiles(layer, title="t")


FIGURE: dict[str, Callable[[], Figure]] = {
    "maps": query_maps,
    "centres": lambda: draw_centres([HEADS, HEADS], title="t"),
    "training": lambda: draw_centres_over_training([(0, HEADS), (3, HEADS)], title="t"),
    "profiles": profiles,
    "mixture": lambda: FIGURES[1].draw("t"),
    "factorisation": lambda: FIGURES[11].draw("t"),
}


@pytest.mark.parametrize("name", FIGURE)
def test_indices_are_from_0_and_lengths_in_positions(name: str) -> None:
    figure = FIGURE[name]()
    figure.draw_without_rendering()
    found: list[Any] = figure.findobj(Text)
    texts = [text.get_text() for text in found]
    for kind in ("layer", "head"):
        named = {int(index) for text in texts for index in re.findall(rf"\b{kind} (\d+)", text)}
        assert not named or min(named) == 0
    digits = {int(text) for axes in figure.axes for text in _indices(axes)}
    assert not digits or digits == set(range(1 + max(digits)))
    assert [text for text in texts if "pixel" in text] == []


def _indices(axes: Axes) -> list[str]:
    """Return labels that are indices of heads: titles of maps, or rows and columns of matrices."""
    texts = [text.get_text() for text in axes.texts]
    if axes.get_label() in ("phi", "rows"):
        labels = axes.get_xticklabels() if axes.get_label() == "phi" else axes.get_yticklabels()
        texts = [label.get_text() for label in labels]
    return [text for text in texts if text.isdigit()]
