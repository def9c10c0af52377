import io

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from attnconv.report.attention_maps import LayerMaps, draw_attention_maps, reading_order
from attnconv.report.figure_style import FloatArray
from tests.report.making import outside, overlaps, text_boxes


def layer_of(heads: int, rows: int, columns: int, query: tuple[float, float] = (0.0, 0.0), seed: int = 0) -> LayerMaps:
    maps = np.random.default_rng(seed).random((heads, rows, columns)) ** 8
    return LayerMaps(f"layer {seed}", maps / maps.sum((1, 2), keepdims=True), query)


@pytest.mark.parametrize(
    ("heads", "rows", "columns", "layers"),
    [(1, 1, 1, 1), (9, 16, 16, 6), (16, 4, 32, 2), (3, 32, 4, 2), (40, 8, 8, 1), (16, 64, 64, 2)],
)
def test_texts_neither_meet_nor_leave_the_page(heads: int, rows: int, columns: int, layers: int) -> None:
    maps = [layer_of(heads, rows, columns, seed=seed) for seed in range(layers)]
    figure = draw_attention_maps(maps, title="a run whose name is rather long: attention of the query in row 0")
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_heads_are_sorted_by_the_number_that_is_printed_and_broken_ones_come_last() -> None:
    maps = np.full((5, 2, 2), 0.25)
    maps[1] = [[0.4, 0.4], [0.2, 0.0]]  # lower entropy than the next, but a smaller peak
    maps[2] = [[0.42, 0.2], [0.19, 0.19]]
    maps[3, 0, 0] = np.nan
    maps[4] = [[0.0, 1.0], [0.0, 0.0]]
    assert reading_order(maps) == [4, 2, 1, 0, 3]


def test_the_note_claims_an_order_only_where_there_is_one() -> None:
    layer = layer_of(3, 4, 4)
    order = reading_order(layer.maps)
    for given, claimed in ((None, True), ([order], True), ([order[::-1]], False)):
        texts = " ".join(text for text, _ in text_boxes(draw_attention_maps([layer], title="t", orders=given)))
        assert ("sorted by their largest probability" in " ".join(texts.split())) is claimed


def test_a_nearly_uniform_head_is_dark_and_the_note_says_so() -> None:
    maps = np.full((2, 4, 4), 1 / 16)
    maps[1] = np.eye(16)[5].reshape(4, 4)
    figure = draw_attention_maps([LayerMaps("layer 0", maps, (0.0, 0.0))], title="t")
    sharp, uniform = figure.axes[0].images
    assert sharp.get_clim() == uniform.get_clim() == (1.0, 16.0)  # times uniform
    colours = matplotlib.colormaps["cividis"]
    assert set(map(tuple, uniform.to_rgba(np.asarray(uniform.get_array())).reshape(-1, 4).tolist())) == {colours(0.0)}
    assert set(map(tuple, sharp.to_rgba(np.asarray(sharp.get_array())).reshape(-1, 4).tolist())) == {
        colours(0.0),
        colours(1.0),
    }
    assert "nearly uniform heads are dark" in " ".join(" ".join(t for t, _ in text_boxes(figure)).split())


def test_labels_name_heads_and_peaks() -> None:
    maps = LayerMaps("layer 0", [[[0.5, 0.5]], [[0.96, 0.04]], [[np.nan, 0.0]]], (0.0, 0.0))
    texts = [text for text, _ in text_boxes(draw_attention_maps([maps], title="t"))]
    assert [text for text in texts if text.isdigit() or text.endswith("%") or text == "NaN"] == [
        "1",
        "96%",
        "0",
        "50%",
        "2",
        "NaN",
    ]


def colours_within(figure: Figure, shape: tuple[int, int]) -> FloatArray:
    """Return the bitmap's colours in each pixel of the only map."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=figure.dpi)
    written.seek(0)
    bitmap = np.asarray(matplotlib.image.imread(written))
    axes = figure.axes[0]
    box = axes.patches[0].get_window_extent()
    rows, columns = ((np.arange(count) + 0.3) / count for count in shape)  # off-centre, beyond the query's frame
    y, x = bitmap.shape[0] - box.y1 + rows * box.height, box.x0 + columns * box.width
    return 255.0 * bitmap[y.astype(int)[:, None], x.astype(int), :3]


def test_zoom_centres_on_the_query_and_leaves_the_outside_blank() -> None:
    maps = LayerMaps("layer 0", np.arange(1.0, 37.0).reshape(1, 6, 6) / 36.0, (0.0, 5.0))
    figure = draw_attention_maps([maps], title="t", zoom=3)
    assert figure.axes[0].images[0].get_clim() == (1.0, 36.0)
    grey = np.array(to_rgb("#eef0f2")) * 255
    shades = np.log(np.array([[5, 6], [11, 12]])) / np.log(36)
    colours = matplotlib.colormaps["cividis"](shades)[..., :3] * 255
    expected = np.broadcast_to(grey, (3, 3, 3)).copy()
    expected[1:, :2] = colours
    np.testing.assert_allclose(colours_within(figure, (3, 3)), expected, atol=1.5)


def test_whole_window_outside_the_image_is_blank() -> None:
    far = LayerMaps("layer 0", np.full((1, 2, 2), 0.25), (30.0, 30.0))
    shown = colours_within(draw_attention_maps([far], title="t", zoom=3), (3, 3))
    np.testing.assert_allclose(shown - np.array(to_rgb("#eef0f2")) * 255, 0.0, atol=1.5)


def test_given_orders_are_kept() -> None:
    layer = layer_of(3, 4, 4)
    texts = [text for text, _ in text_boxes(draw_attention_maps([layer], title="t", orders=[[2, 0, 1]]))]
    assert [text for text in texts if text.isdigit()] == ["2", "0", "1"]


def test_a_picture_is_above_its_maps() -> None:
    layers = [LayerMaps("layer 0", np.full((3, 8, 8), 1 / 64), (2.0, 5.0))]
    figure = draw_attention_maps(layers, title="t", picture=np.zeros((16, 16, 3)))
    assert overlaps(figure) == []
    bare = draw_attention_maps(layers, title="t")
    assert figure.get_size_inches()[1] > bare.get_size_inches()[1] + 1


def test_bad_input() -> None:
    layer = layer_of(2, 3, 3)
    with pytest.raises(ValueError, match=r"picture: .* got \(4, 4\)"):
        draw_attention_maps([layer], title="t", picture=np.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"layers: .*got none"):
        draw_attention_maps([], title="t")
    for zoom in (0, 4, -1):
        with pytest.raises(ValueError, match=rf"zoom: .*got {zoom}"):
            draw_attention_maps([layer], title="t", zoom=zoom)
    with pytest.raises(ValueError, match=r"orders: .*got \[\[0, 0\]\]"):
        draw_attention_maps([layer], title="t", orders=[[0, 0]])
    for shape in ((3, 3), (0, 3, 3), (2, 3, 0)):
        with pytest.raises(ValueError, match="maps: must have the shape") as caught:
            LayerMaps("layer 0", np.zeros(shape), (0.0, 0.0))
        assert str(shape) in str(caught.value)
