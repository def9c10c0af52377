"""Heat map of the effects of heads."""

from pathlib import Path
from typing import Any

import numpy as np

from attnconv.report import draw_effects, save
from attnconv.surgery import HeadEffect, HeadEffects
from tests.report.making import outside, overlaps


def test_every_head_has_its_cell(tmp_path: Path) -> None:
    heads = [("blocks.0.attn", head, 0.1 * head) for head in range(30)] + [("a.long.name" * 9, 0, 7.0)]
    effects = tuple(HeadEffect(layer, head, change, None) for layer, head, change in heads)
    figure = draw_effects(HeadEffects(effects, "zero", 4, None), title="A title of a model " * 9)
    axes = figure.axes[0]
    (image,) = axes.images
    shown: Any = np.ma.filled(image.get_array(), np.nan)  # type: ignore[arg-type]
    np.testing.assert_allclose(shown[0], 0.1 * np.arange(30))
    assert shown[1, 0] == 7.0
    assert np.isnan(shown[1, 1:]).all()
    assert axes.get_yticklabels()[1].get_text().startswith("...")
    assert (overlaps(figure), outside(figure)) == ([], [])
    save(figure, tmp_path / "effects")


def test_a_single_head_leaves_room_for_the_title() -> None:
    effects = (HeadEffect("attention", 0, 0.0, 1.0),)
    figure = draw_effects(HeadEffects(effects, "shift", 1, 1.0), title="Preset quadratic-digits. Each head changed")
    assert (overlaps(figure), outside(figure)) == ([], [])
