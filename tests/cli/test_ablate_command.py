"""`attnconv ablate`."""

import csv
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from attnconv.cli.image_inputs import ImageOptions, Subject
from attnconv.data.load_splits import load_data
from attnconv.data.settings import DataSettings
from attnconv.surgery import head_effects
from tests.cli.test_commands import call


def test_a_run_on_its_data(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, figure = tmp_path / "new" / "heads.csv", tmp_path / "figures" / "heads.png"
    words = ["ablate", str(run), "--data=digits", "--images=50", "--to=mean", f"--csv={table}", f"--figure={figure}"]
    status, out, err = call(capsys, *words)
    assert (status, err) == (0, "")
    subject, options = Subject.load(str(run), ImageOptions()), ImageOptions(images=50)
    images = subject.normalised(*subject.images("digits", options))
    labels = load_data(DataSettings("digits")).test.labels[:50]
    found = head_effects(subject.loaded.model, images, labels=labels, to="mean")
    assert str(found) in out
    assert "on 50 images of digits, 8 x 8 pixels." in " ".join(out.split())
    with table.open() as file:
        assert list(csv.DictReader(file)) == [{name: str(each) for name, each in row.items()} for row in found.rows()]
    with Image.open(figure) as image:
        assert image.format == "PNG"


def test_images_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(2):
        pixels = torch.randint(256, (8, 8), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{index}.png")
    words = ["ablate", "quadratic-digits", "--data", str(tmp_path), "--layers", "blocks.1.attention"]
    status, out, _ = call(capsys, *words, "--csv", str(tmp_path / "heads.csv"))
    assert status == 0
    assert "ccuracy" not in out
    assert len(re.findall(r"^blocks\.1\.attention ", out, re.MULTILINE)) == out.count("blocks.") == 9
    assert (tmp_path / "heads.csv").read_text().splitlines()[1].startswith("blocks.1.attention,0,0.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quadratic-digits", "--data: must be .*digits.*got none"),
        ("quadratic-digits --data digits --to nothing", "--to: .*got 'nothing'"),
        ("quadratic-digits --data digits --figure heads", "--figure: must end in .*got heads"),
        ("quadratic-digits --data digits --layers none", r"--layers: .*got \['none'\]"),
        ("resnet-digits --data digits", "MODEL: .*attention"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    status, _, err = call(capsys, "ablate", *words.split())
    assert status != 0
    assert re.search(message, err)
