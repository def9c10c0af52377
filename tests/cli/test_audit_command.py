"""`attnconv audit`."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from attnconv.cli import main
from attnconv.cli.image_inputs import ImageOptions, Subject
from tests.two_processes import run_python

# A user's module with a model.
MODULE = """
import torch
from torch import nn
from attnconv import LearnedRelativeContent, SelfAttention2d

def looks():
    torch.manual_seed(0)
    return SelfAttention2d(3, 4, heads=2, encoding=LearnedRelativeContent(3, 2, head_channels=4, max_shift=12))

class Bound(nn.Module):
    def forward(self, x):
        assert x.shape[-1] == 224, "made for 224."

def bound():
    return Bound()

def nothing():
    return nn.Conv2d(3, 4, 3)
"""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["attnconv", "audit", *words])
        with pytest.raises(SystemExit) as end:
            main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a user's module and images."""
    (tmp_path / "of_a_user.py").write_text(MODULE)
    (tmp_path / "pictures").mkdir()
    for index in range(3):
        pixels = torch.randint(256, (20, 30, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "pictures" / f"{index}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_on_digits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "quadratic-digits", "--data", "digits", "--images", "10", "--out", "found")
    assert (status, err) == (0, "")
    assert "Measured on 10 images of digits, 8 x 8 pixels." in out
    numbers = json.loads((home / "found" / "audit.json").read_text())
    assert numbers["images"] == 10
    for layer in numbers["layers"]:
        assert layer["position_only"]
        assert f"{layer['convolution_score']:.3f}" in out
    page = (home / "found" / "index.html").read_text()
    assert "attnconv audit quadratic-digits --data digits --images 10 --out found" in page


def test_two_processes_write_the_files_of_one(home: Path) -> None:
    words = ("-m", "attnconv", "audit", "of_a_user:looks", "--data", "pictures", "--image-size", "10", "--out", "found")
    Image.new("L", (30, 20)).save(home / "pictures" / "black.png")
    for number in range(9):  # in all, two batches
        shutil.copy(home / "pictures" / f"{number % 3}.png", home / "pictures" / f"copy-{number}.png")
    found = []
    for processes in (1, 2):
        folder = home / str(processes)
        folder.mkdir()
        for name in ("of_a_user.py", "pictures"):
            (folder / name).symlink_to(home / name)
        printed = run_python(*words, "--skip-broken", processes=processes, cwd=folder)
        assert printed.count("black.png") == printed.count("Audit: found") == 1
        found.append({name: (folder / "found" / name).read_bytes() for name in ("audit.json", "audit.csv")})
    assert found[0] == found[1]


def test_position_only_attention_needs_no_images(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "quadratic-digits")
    assert status == 0
    assert "attention depends only on positions" in out
    assert (home / "audits" / "quadratic-digits" / "index.html").is_file()


def test_content_attention_needs_images(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "of_a_user:looks", "--image-size", "12")
    assert status == 1
    assert "--data: must be given" in err
    assert list(home.glob("audits")) == []


def test_on_a_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["of_a_user:looks", "--data", "pictures", "--image-size", "10x12", "--queries", "40", "--out", "found"]
    status, out, err = call(capsys, *words)
    assert (status, err) == (0, "")
    assert "Measured on 3 images of pictures, 10 x 12 pixels." in out
    (layer,) = json.loads((home / "found" / "audit.json").read_text())["layers"]
    assert layer["sizes"] == [10, 12]
    assert layer["queries"] <= 40
    assert layer["span_residual"] is None
    assert min(layer["content_share"]) > 0


def test_a_broken_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "pictures" / "0.png").write_bytes(b"no picture")
    words = ["of_a_user:looks", "--data", "pictures", "--image-size", "10", "--out", "found"]
    status, _, err = call(capsys, *words)
    assert status == 1
    assert "got broken files (1)" in err
    assert "0.png: must be" in err
    assert not (home / "found").exists()
    status, out, _ = call(capsys, *words, "--skip-broken")
    assert status == 0
    assert "Skipped a broken file." in out
    assert json.loads((home / "found" / "audit.json").read_text())["images"] == 2
    assert "Skipped a broken file." in (home / "found" / "index.html").read_text()


def test_a_picture_of_one_colour_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (30, 20), (9, 8, 7)).save(home / "pictures" / "1.png")
    words = ["of_a_user:looks", "--data", "pictures", "--image-size", "10", "--out", "found"]
    status, _, err = call(capsys, *words)
    assert status == 1
    assert re.search(r"1\.png: .*got \[9, 8, 7\]", err)
    status, out, _ = call(capsys, *words, "--skip-broken")
    assert (status, "1.png: must have" in out) == (0, True)


def test_a_picture_that_is_enlarged_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quadratic-digits", "--data", "pictures", "--image-size", "48", "--images", "1", "--out", "found"]
    status, out, _ = call(capsys, *words)
    note = "Enlarged to 48 x 48 pixels: 0.png 2.4 times."
    assert (status, note in out) == (0, True)
    assert note in (home / "found" / "index.html").read_text()


def test_layers_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        call(capsys, "quadratic-digits", "--layers", "blocks.1.attention, blocks.0.attention", "--out", "found")[0] == 0
    )
    layers = json.loads((home / "found" / "audit.json").read_text())["layers"]
    assert [layer["name"] for layer in layers] == ["blocks.0.attention", "blocks.1.attention"]


def test_what_cannot_be_read_is_left_out(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiments.small_vit:PoolingViT", "--data", "pictures", "--image-size", "32", "--out", "found"]
    status, out, _ = call(capsys, *words)
    assert (status, "Left out attn_pool: " in out) == (0, True)
    assert "Left out attn_pool" in (home / "found" / "index.html").read_text()


@pytest.mark.parametrize(("package", "spec"), [("timm", "timm:vit_tiny_patch16_224"), ("transformers", "hf:vit")])
@pytest.mark.filterwarnings("default")  # warnings of the libraries
def test_a_stock_model_at_another_size(package: str, spec: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package, reason="the extra 'models' is not installed", exc_type=ImportError)
    name = "blocks.0.attn" if package == "timm" else "network.vit.layers.0.attention"
    words = [spec, "--data", "pictures", "--image-size", "64x96", "--layers", name, "--out", "found"]
    assert call(capsys, *words)[0] == 0
    (layer,) = json.loads((home / "found" / "audit.json").read_text())["layers"]
    assert layer["sizes"] == [4, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quadratic-digits --images 0", "--images: .*got 0"),
        ("quadratic-digits --queries 0", "--queries: .*got 0"),
        ("quadratic-digits --image-size 8by8", "--image-size: .*HxW.*got '8by8'"),
        ("quadratic-digits --grid 0", "--grid: .*HxW.*got '0'"),
        ("quadratic-small --image-size 7", r"divisible by 4, got shape \(2, 3, 7, 7\)"),
        ("quadratic-digits --data nowhere", "--data: .*digits.*got 'nowhere'"),
        ("quadratic-digits --layers none", r"--layers: .*got \['none'\]\. .*: blocks.0.attention, blocks.1."),
        (
            "of_a_user:bound --data pictures --image-size 12",
            ": made for 224.",
        ),
        ("of_a_user:nothing --data pictures --image-size 12", "MODEL: .*got Conv2d"),
    ],
)
@pytest.mark.usefixtures("home")
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    status, _, err = call(capsys, *words.split())
    assert status != 0
    assert re.search(message, err)


def test_a_random_model_is_the_same_in_every_process() -> None:
    states = [Subject.load("quadratic-digits", ImageOptions()).loaded.model.state_dict() for _ in range(2)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
