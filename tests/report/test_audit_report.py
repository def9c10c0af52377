"""The audit report: its files, its text, and figures without overlapping texts."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attnconv import SelfAttention1d, SelfAttention2d, SelfAttention3d, from_conv
from attnconv.inspect import Audit, LayerAudit, audit
from attnconv.report import draw_profiles, draw_scores, write_audit
from experiments.small_vit import PoolingViT
from tests.report.making import outside, overlaps


@pytest.fixture(scope="module")
def found() -> Audit:
    torch.manual_seed(0)
    layers = [from_conv(nn.Conv2d(3, 6, 3, padding=1)), *(SelfAttention2d(6, 6, heads=heads) for heads in (9, 1, 4, 2))]
    return audit(nn.Sequential(*layers), torch.randn(2, 3, 17, 12))


def of_axes(layer: nn.Module, *sizes: int) -> Audit:
    return audit(layer, torch.randn(2, 3, *sizes, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def folder(found: Audit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "new"
    page = write_audit(found, folder, title="five <layers>", about="Of noise.", command="attnconv audit x", notes=["!"])
    assert page == folder / "index.html"
    return folder


class TestPage:
    def test_every_figure_is_there_twice(self, folder: Path) -> None:
        stems = [*(f"heads-0{layer}-{layer}" for layer in range(5)), "scores"]
        files = sorted(path.name for path in (folder / "figures").iterdir())
        assert files == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]

    def test_a_size_stands_in_one_line(self, folder: Path) -> None:
        page = (folder / "index.html").read_text(encoding="utf-8")
        assert page.count('<td class="words line">17 x 12</td>') == 5
        assert '<td class="words line">(-1, -1)</td>' in page
        assert ".wide .line { white-space: nowrap; }" in page

    def test_says_what_was_left_out(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="attn_pool"):
            found = audit(PoolingViT(), torch.randn(2, 3, 32, 32))
        page = write_audit(found, tmp_path, title="pooled").read_text(encoding="utf-8")
        assert '<p class="note">Left out attn_pool: ' in page
        assert json.loads((tmp_path / "audit.json").read_text())["left_out"] == dict(found.left_out)

    def test_needs_nothing_else(self, folder: Path) -> None:
        page = (folder / "index.html").read_text(encoding="utf-8")
        assert re.findall(r"https?:", page) == []
        assert "<script" not in page
        links = [link for link in re.findall(r'(?:href|src)="([^"]+)"', page) if not link.startswith("data:")]
        assert len(links) == 12
        assert [link for link in links if not (folder / link).is_file()] == []

    def test_says_the_numbers(self, folder: Path, found: Audit) -> None:
        page = (folder / "index.html").read_text(encoding="utf-8")
        assert "five &lt;layers&gt;" in page
        assert '<p class="note">!</p>' in page
        for layer in found.layers:
            assert f">{layer.statistics.convolution_score:.3f}</td>" in page
            assert f"Heads of {layer.name}" in page
        assert re.search(r">\(-1, -1\)</td><td[^>]*>1.000</td>", page)
        assert page.count('<div class="wide"') == 1 + len(found.layers)
        assert "<h2>Settings</h2>" not in page

    def test_numbers_as_json(self, folder: Path, found: Audit) -> None:
        numbers = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        assert numbers == json.loads(json.dumps({"title": "five <layers>", **found.numbers()}))

    def test_rows_as_csv(self, folder: Path, found: Audit) -> None:
        with (folder / "audit.csv").open(encoding="utf-8", newline="") as file:
            written = list(csv.DictReader(file))
        rows = found.rows()
        assert [(row["layer"], row["head"]) for row in written[:7]] == [("0", str(head)) for head in range(7)]
        assert len(written) == len(rows) == sum(len(layer.statistics.entropy) for layer in found.layers)
        first, statistics = written[2], found.layers[0].statistics
        assert float(first["shift_mass"]) == float(statistics.shift_mass[2])
        assert [int(first[f"best_shift_{axis}"]) for axis in (0, 1)] == statistics.best_shift[2].tolist()
        assert float(first["covariance_0_1"]) == float(statistics.covariance[2, 0, 1])
        assert (float(first["convolution_score"]), first["sizes"]) == (statistics.convolution_score, "17 x 12")

    def test_publication(self, found: Audit, tmp_path: Path) -> None:
        page = write_audit(Audit(found.layers[:1], 2), tmp_path, title="one", publication=True).read_text("utf-8")
        assert (tmp_path / "figures" / "heads-00-0.pdf").is_file()
        assert 'href="figures/scores.pdf">PDF</a>' in page

    def test_nearly_uniform_heads_are_named(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        tokens = torch.randn(2, 30, 8)
        found = audit(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), 0.1 * tokens, grid=(6, 5))
        page = write_audit(found, tmp_path, title="uniform").read_text(encoding="utf-8")
        assert "Nearly uniform heads (less than 2/30 at every shift): 0, 1." in page

    def test_three_axes_are_named_and_not_drawn(self, tmp_path: Path) -> None:
        write_audit(of_axes(SelfAttention3d(3, 3, heads=2), 4, 5, 6), tmp_path, title="three")
        page = (tmp_path / "index.html").read_text(encoding="utf-8")
        assert "SelfAttention3d has three axes and is not drawn" in page
        assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["scores.png", "scores.svg"]

    def test_figures_of_a_larger_audit_are_removed_and_nothing_else(self, found: Audit, tmp_path: Path) -> None:
        write_audit(found, tmp_path, title="five")
        mine = tmp_path / "figures" / "heads-of-mine.png"
        mine.write_bytes(b"")
        write_audit(Audit(found.layers[1:2], found.images), tmp_path, title="one")
        assert sorted(path.name for path in mine.parent.iterdir()) == [
            "heads-00-1.png",
            "heads-00-1.svg",
            "heads-of-mine.png",
            "scores.png",
            "scores.svg",
        ]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "audit.csv",
            "audit.json",
            "figures",
            "index.html",
        ]


class TestFigures:
    def test_no_text_of_the_heads_meets_another(self, found: Audit) -> None:
        for layer in found.layers:
            figure = draw_profiles(layer, title=f"{layer.name}: score {layer.statistics.convolution_score:.2f}")
            assert (overlaps(figure), outside(figure)) == ([], [])

    def test_one_axis_is_a_line(self) -> None:
        (layer,) = of_axes(SelfAttention1d(3, 3, heads=3), 30).layers
        figure = draw_profiles(layer, title="one axis")
        assert (overlaps(figure), outside(figure)) == ([], [])
        assert len(figure.axes) == 3 + 1  # and the legend

    def test_three_axes_are_refused(self) -> None:
        (layer,) = of_axes(SelfAttention3d(3, 3, heads=2), 4, 5, 6).layers
        with pytest.raises(ValueError, match=r"layer: .*got 3"):
            draw_profiles(layer, title="three axes")

    @pytest.mark.parametrize("count", [1, 24])
    def test_no_text_of_the_scores_meets_another(self, count: int) -> None:
        names = [f"encoder.layers.{'very.' * 9}long.{index}.attention" for index in range(count)]
        figure = draw_scores(names, [index / max(1, count - 1) for index in range(count)], title="scores")
        assert (overlaps(figure), outside(figure)) == ([], [])

    @pytest.mark.parametrize(("names", "scores"), [([], []), (["a"], [0.5, 0.5])])
    def test_scores_without_names(self, names: list[str], scores: list[float]) -> None:
        with pytest.raises(ValueError, match=rf"scores: .*got {len(scores)}"):
            draw_scores(names, scores, title="none")


class TestReach:
    def limits(self, layer: LayerAudit) -> set[tuple[tuple[float, float], tuple[float, float]]]:
        return {(axes.get_xlim(), axes.get_ylim()) for axes in draw_profiles(layer, title="reach").axes[:-1]}

    def test_shows_the_taps_of_a_convolution_without_padding(self) -> None:
        model = nn.Sequential(from_conv(nn.Conv2d(3, 4, 9)))
        (layer,) = audit(model, torch.randn(1, 3, 14, 14)).layers
        # from the smallest shift of the profile to at most 7
        assert self.limits(layer) == {((-3.5, 7.5), (7.5, -3.5))}

    @pytest.mark.parametrize(("best", "rows", "columns"), [((0, 0), 3, 3), ((0, 5), 5, 5), ((-8, 6), 7, 6)])
    def test_reaches_the_best_shifts(self, found: Audit, best: tuple[int, int], rows: int, columns: int) -> None:
        layer = found.layers[1]
        shifts = torch.zeros_like(layer.statistics.best_shift)
        shifts[2] = torch.tensor(best)
        layer = replace(layer, statistics=replace(layer.statistics, best_shift=shifts))
        assert self.limits(layer) == {((-columns - 0.5, columns + 0.5), (rows + 0.5, -rows - 0.5))}

    def test_a_panel_shows_the_profile_of_its_head(self, found: Audit) -> None:
        layer = found.layers[1]
        shown = {axes.get_title(): axes.images[0] for axes in draw_profiles(layer, title="profiles").axes[:-1]}
        for head, mass in enumerate(layer.statistics.profile.mass.numpy()):
            image = shown[f"head {head}"]
            np.testing.assert_array_equal(np.asarray(image.get_array()), 204 * mass)
            assert image.get_clim() == (1, 204)
            assert tuple(image.get_extent()) == (-6.5, 6.5, 8.5, -8.5)  # 17 x 12 tokens
