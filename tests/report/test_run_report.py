import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from attnconv.report import write_report
from attnconv.report.run_data import RunData
from attnconv.training.run_folder import RunFolder
from tests.report.making import SMALL, SMALL_RESNET, make_run
from tests.report.test_html_page import read

EXTERNAL = re.compile(r"(?:src|href|url|action|data)\s*[=(]\s*[\"']?\s*(?:https?:)?//|@import|<script|<link|<iframe")


def figures(page: Path) -> list[str]:
    return sorted(path.stem for path in (page.parent / "figures").glob("*.png"))


@pytest.fixture(scope="module")
def quadratic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "a <run> & more").path)


def test_all_figures_of_a_quadratic_model(quadratic: Path) -> None:
    assert figures(quadratic) == [
        "figure-02-accuracy",
        "figure-03-centres-over-training-layer-0",
        "figure-03-centres-over-training-layer-1",
        "figure-04-centres",
        "figure-05-attention",
        "figure-06-attention",
        "figure-07-attention",
    ]
    assert all(path.with_suffix(".svg").is_file() for path in (quadratic.parent / "figures").glob("*.png"))


def test_the_page_needs_nothing_else(quadratic: Path) -> None:
    html = quadratic.read_text(encoding="utf-8")
    assert EXTERNAL.search(html) is None
    reader = read(html)
    images = reader.all("img")
    assert len(images) == 7
    for image in images:
        assert str(image["src"]).startswith("data:image/svg+xml;base64,")
        assert len(str(image["alt"])) > 30
    policy = next(meta["content"] for meta in reader.all("meta") if meta.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    assert "width=device-width" in html
    assert "prefers-color-scheme: dark" in html


def test_links_lead_to_the_files(quadratic: Path) -> None:
    links = [str(anchor["href"]) for anchor in read(quadratic.read_text(encoding="utf-8")).all("a")]
    assert len(links) == 14
    assert all((quadratic.parent / link).is_file() for link in links)


def test_numbers_settings_and_origin_are_told(quadratic: Path) -> None:
    text = read(quadratic.read_text(encoding="utf-8")).text
    for words in (
        "a <run> & more",
        "87.50%",
        "Last epoch: 81.25%",
        "4,321",
        "2:03:05",
        "learning rate",
        "a processor",
    ):
        assert words in text
    assert "Preset quadratic-digits with layers 2, heads 4, width 8" in text
    assert "attnconv train quadratic-digits" in text
    assert "not complete" not in text


def test_alt_texts_tell_what_is_seen(quadratic: Path) -> None:
    alts = [str(image["alt"]) for image in read(quadratic.read_text(encoding="utf-8")).all("img")]
    assert "train 60.0% after epoch 3; validation 75.0% after epoch 3" in alts[0]
    assert all(f"Layer {layer}: 4 heads, centres" in alts[1] for layer in (0, 1))
    assert "largest probabilities" in alts[-1]


def test_a_second_report_is_the_same_and_lies_where_it_is_told(quadratic: Path, tmp_path: Path) -> None:
    again = write_report(quadratic.parent.parent, tmp_path / "elsewhere")
    assert again == tmp_path / "elsewhere" / "index.html"
    assert again.read_bytes() == quadratic.read_bytes()


def test_full_covariances(tmp_path: Path) -> None:
    model = replace(SMALL, encoding="quadratic-generalized", heads=(2, 5))
    page = write_report(make_run(tmp_path / "run", model).path)
    assert len(figures(page)) == 7


def test_learned_positions_have_maps_but_no_centres(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", replace(SMALL, encoding="learned")).path)
    assert figures(page) == ["figure-02-accuracy", *(f"figure-0{n}-attention" for n in (5, 6, 7))]


def test_content_is_averaged_over_the_test_images(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", replace(SMALL, encoding="learned-content")).path)
    assert figures(page) == ["figure-02-accuracy", "figure-06-attention", "figure-07-attention"]
    assert "mean of 100 test images" in read(page.read_text(encoding="utf-8")).text


def test_image_folders_are_read_at_the_size_of_the_model(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "data" / "train" / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (40 * number, 0, 0)).save(path)
    model = replace(SMALL, encoding="learned-content", image_channels=3, image_size=16)
    run = make_run(tmp_path / "run", model)
    record = run.record()
    record["settings"]["data"].update(name="folder", root=str(tmp_path / "data"))
    run.settings_file.write_text(json.dumps(record), encoding="utf-8")
    assert RunData("a", run).images.shape[1:] == (3, 16, 16)


def test_captions_tell_the_size_of_a_position(quadratic: Path, tmp_path: Path) -> None:
    words = "One position is 2 x 2 pixels."
    page = write_report(make_run(tmp_path / "run", replace(SMALL, downsampling=2)).path)
    assert words in read(page.read_text(encoding="utf-8")).text
    assert "One position is" not in read(quadratic.read_text(encoding="utf-8")).text


def test_a_network_without_attention_has_only_curves(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", SMALL_RESNET).path)
    assert figures(page) == ["figure-02-accuracy"]


def test_missing_images_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(SMALL, encoding="learned-content"))
    record = run.record()
    record["settings"]["data"].update(name="cifar10", root=str(tmp_path / "nowhere"), cache="off")
    run.settings_file.write_text(json.dumps(record), encoding="utf-8")
    page = write_report(run.path)
    assert figures(page) == ["figure-02-accuracy"]
    assert "the test images could not be read" in read(page.read_text(encoding="utf-8")).text


def test_a_run_that_is_still_going(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=1, complete=False)
    run.last_weights.unlink()
    page = write_report(run.path)
    text = read(page.read_text(encoding="utf-8")).text
    assert "epoch 1 of 3" in text
    assert "has not written any weights" in text
    assert "25.00%" in text


def test_records_of_odd_shape_do_not_matter(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL_RESNET, versions=None, command=None, extra={"a": [1, {"b": True}]})
    assert "matplotlib" in read(write_report(run.path).read_text(encoding="utf-8")).text


def test_bad_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run: .*got .*nothing"):
        write_report(tmp_path / "nothing")
    run = make_run(tmp_path / "run", SMALL_RESNET)
    run.metrics_file.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"run: .*got {re.escape(str(run.path))}"):
        write_report(run.path)
    run.metrics_file.write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: must be .*got '\{'"):
        write_report(run.path)


def test_heads_of_other_dimensions_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = {"epoch": 0, "layers": [{"name": "a", "centres": [[0.0]], "covariance": [[[1.0]]]}]}
    run.heads_file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"centres: .*got \(1, 1\)"):
        write_report(run.path)


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunFolder = make_run(tmp_path / "named", SMALL_RESNET)
    monkeypatch.chdir(run.path)
    assert "<h1>named</h1>" in write_report(".").read_text(encoding="utf-8")
