import math

import pytest

from attnconv.report.accuracy_curves import Curve, draw_accuracy
from tests.report.making import outside, overlaps, text_boxes


def test_one_run_has_a_line_per_split_and_its_last_value() -> None:
    curves = [Curve("a", "train", [1, 2], [0.5, 0.75]), Curve("a", "validation", [1, 2], [0.4, None])]
    figure = draw_accuracy(curves, title="a: accuracy")
    train, validation = figure.axes[0].lines
    assert train.get_linestyle() != validation.get_linestyle()
    assert train.get_color() != validation.get_color()
    texts = [text for text, _ in text_boxes(figure)]
    assert "train: 75.0% at the end" in texts
    assert "validation: 40.0% at the end" in texts  # the missing value is skipped


def test_many_runs_differ_in_colour_and_mark() -> None:
    curves = [Curve(f"run {i}", "test", [1, 2, 3], [0.1 * i, 0.2, 0.3]) for i in range(12)]
    figure = draw_accuracy(curves, title="accuracy")
    assert len({(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}) == 12
    assert overlaps(figure) == []
    assert outside(figure) == []


@pytest.mark.parametrize("accuracy", [[0.1], [0.1001, 0.1002, 0.1003], [math.nan, math.nan], [0.0, 1.0]])
def test_odd_curves_can_be_drawn(accuracy: list[float]) -> None:
    figure = draw_accuracy([Curve("_a$b", "test", range(len(accuracy)), accuracy)], title="$x_1$ <&> \u6f22\n漢")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == len(set(labels))
    texts = [text for text, _ in text_boxes(figure)]
    assert "$x_1$ <&> ? ?" in texts


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"curves: .*got none"):
        draw_accuracy([], title="t")
    with pytest.raises(ValueError, match=r"split: .*got 'dev'"):
        Curve("a", "dev", [1], [0.5])
    with pytest.raises(ValueError, match=r"epochs, accuracy: .*got shapes \(1,\) and \(2,\)"):
        Curve("a", "test", [1], [0.5, 0.6])
    with pytest.raises(ValueError, match=r"epochs, accuracy: .* got shapes \(0,\) and \(0,\)"):
        Curve("a", "test", [], [])
