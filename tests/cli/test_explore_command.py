"""`attnconv explore`."""

import http.client
import io
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from PIL import Image

from attnconv.cli import main
from attnconv.cli.explore_command import title_of
from attnconv.data import DataSettings, load_data
from attnconv.explorer import Payload, html_page, read_payload
from attnconv.models.model_loader import LoadedModel, load
from attnconv.training.run_folder import RunFolder
from tests.explorer.pages import PAGE

MODULE = """
import torch
from attnconv import LearnedRelativeContent, SelfAttention2d

class Bound(torch.nn.Linear):
    def forward(self, x):
        assert x.shape[-1] == 224, "made for 224."

def bound():
    return Bound(1, 1)

def looks():
    torch.manual_seed(0)
    return SelfAttention2d(3, 4, heads=2, encoding=LearnedRelativeContent(3, 2, head_channels=4, max_shift=12))
"""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        main(["explore", *words])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the HTML page, a user's module and images."""
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "of_an_explorer.py").write_text(MODULE)
    (tmp_path / "pictures").mkdir()
    for index in range(3):
        pixels = torch.randint(256, (20, 30, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "pictures" / f"{index}.png")
    monkeypatch.setattr(html_page, "PACKAGED", tmp_path / "page.html")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_an_explorer", raising=False)
    return tmp_path


def written(folder: Path) -> Payload:
    assert "attnconv-payload" in (folder / "index.html").read_text()
    return read_payload((folder / "payload.safetensors").read_bytes())


def test_a_preset_needs_no_images(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "quadratic-digits", "--export", "shown")
    assert (status, err) == (0, "")
    assert out.strip() == f"Explorer: {Path('shown') / 'index.html'}"
    found = written(home / "shown")
    assert (found.title, found.names, found.patch, found.times) == ("quadratic-digits", (), (1, 1), ("now",))
    assert [layer.sizes for layer in found.layers] == [(8, 8)] * 3
    assert found.random


def test_a_run_brings_its_digits_and_its_past(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, str(run), "--images", "2", "--export", "shown")
    assert (status, err) == (0, "")
    found = written(home / "shown")
    assert (len(found.names), found.images.shape) == (2, (2, 8, 8, 3))
    assert found.title == f"{run.parent.name}/{run.name}"  # not the path on this disk
    assert str(run.parent).encode() not in (home / "shown" / "payload.safetensors").read_bytes()
    assert found.times == ("epoch 0", "epoch 1", "now")
    centres = found.layers[0].tensors["centres"]
    recorded = torch.tensor(RunFolder(run).heads()[1]["layers"][0]["centres"])
    torch.testing.assert_close(centres[1], recorded, rtol=0, atol=1e-6)
    assert not torch.equal(centres[0], centres[1])
    torch.testing.assert_close(centres[1], centres[2], rtol=1e-4, atol=1e-4)  # float32
    assert found.layers[0].scores[1] == pytest.approx(found.layers[0].scores[2], abs=1e-5)
    digits = load_data(DataSettings("digits"))
    assert found.labels == tuple(str(int(label)) for label in digits.test.labels[:2])
    assert found.logits is not None
    assert (found.classes, found.logits.shape) == (tuple("0123456789"), (2, 10))
    assert not found.random
    call(capsys, str(run), "--snapshots", "0", "--export", "shown")
    assert written(home / "shown").times == ("now",)
    copy = RunFolder(Path(shutil.copytree(run, home / "copy")))
    shutil.copyfile(copy.last_weights, copy.start_weights)  # initial weights from epoch 1 of a different run
    call(capsys, str(copy.start_weights), "--images", "1", "--export", "shown")
    assert written(home / "shown").times == ("epoch 0", "now")


def test_a_published_run_has_only_weights(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders such as those in `results/`, where the weights are not in `checkpoints`, and their weights files."""
    shutil.copytree(run, home / "results", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copyfile(run / "checkpoints" / "last.safetensors", home / "results" / "weights.safetensors")
    for name in ("results", str(Path("results", "weights.safetensors"))):
        status, _, err = call(capsys, name, "--images", "1", "--export", "shown")
        assert (status, err) == (0, "")
        assert written(home / "shown").times == ("epoch 0", "epoch 1", "now")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("quadratic-digits", "quadratic-digits"),
        ("runs/demo", "runs/demo"),
        ("/home/somebody/runs/x/", "runs/x"),
        ("../../runs/x/checkpoints/best.ckpt", "checkpoints/best.ckpt"),
        ("/x", "x"),
        ("package.module:function", "package.module:function"),
        ("/home/somebody/code/models.py:function", "code/models.py:function"),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224"),
        ("hf:google/vit-base-patch16-224", "hf:google/vit-base-patch16-224"),
        ("hf:/home/somebody/models/vit", "hf:models/vit"),
    ],
)
def test_a_title_keeps_two_parts_of_a_path(name: str, title: str) -> None:
    assert title_of(name) == title


def test_without_a_name_the_example_or_the_demo(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--export", "shown")
    assert status == 0
    assert "bundled example" in out
    example = written(home / "shown")
    assert len(example.times) == 25  # snapshots of its training
    assert (len(example.images), len(set(example.labels)), example.random) == (12, 10, False)
    assert example.logits is not None
    best = [example.classes[index] for index in example.logits.argmax(-1).tolist()]
    right = [prediction == label for prediction, label in zip(best, example.labels, strict=True)]
    assert right == [True] * 10 + [False] * 2
    assert example.images.float().std(-1).mean() > 1  # in colour
    status, _, err = call(capsys, "--data", "digits", "--export", "shown")
    assert status == 1
    assert "MODEL: must be given if --data is given" in err
    shutil.copytree(run, home / "runs" / "demo")
    assert call(capsys, "--export", "shown")[0] == 0
    assert written(home / "shown").title == "runs/demo"


def test_content_asks_for_images_and_takes_a_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["of_an_explorer:looks", "--image-size", "10x12", "--export", "shown"]
    status, _, err = call(capsys, *words)
    assert status == 1
    assert "--data: must be given" in err
    assert not (home / "shown").exists()
    assert call(capsys, *words, "--data", "pictures", "--images", "2")[0] == 0
    found = written(home / "shown")
    assert [(layer.kind, layer.sizes) for layer in found.layers] == [("content", (10, 12))]
    assert found.names == ("0.png", "1.png")


def test_a_budget_in_megabytes_decides_how_many_rows_are_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["of_an_explorer:looks", "--image-size=10x12", "--data=pictures", "--images=1", "--export=shown"]
    assert call(capsys, *words, "--budget=0.01")[0] == 0
    (layer,) = written(home / "shown").layers
    assert (layer.kind, len(layer.tensors["queries"])) == ("rows", 20)  # 4 x 5 queries of 488 bytes each
    assert sum(tensor.nbytes for tensor in layer.tensors.values()) <= 10_000


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "10001"])
def test_budgets_out_of_range(home: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    status, _, err = call(capsys, "quadratic-digits", f"--budget={value}")
    assert status == 2
    assert re.search(rf"--budget: .*got {value}(\.0)?\.", err)


def test_the_model_is_made_for_the_size(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    plain = load

    def noting(spec: str, **more: Any) -> LoadedModel:
        asked.append(more["size"])
        return plain(spec, **more)

    monkeypatch.setattr("attnconv.models.model_loader.load", noting)
    words = ["of_an_explorer:looks", "--data", "pictures", "--images", "1", "--export", "shown"]
    assert call(capsys, *words, "--image-size", "10x12")[0] == 0
    assert asked == [(10, 12)]


def test_what_a_model_of_one_size_says_is_passed_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["of_an_explorer:bound", "--data", "pictures", "--image-size", "12", "--export", "shown"]
    status, _, err = call(capsys, *words)
    assert status == 1
    assert ": made for 224." in err


@pytest.mark.parametrize(("flag", "value"), [("images", "0"), ("snapshots", "-1"), ("port", "-1")])
def test_numbers_out_of_range(home: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    status, _, err = call(capsys, "quadratic-digits", f"--{flag}={value}")
    assert status == 2
    assert re.search(rf"--{flag}: .*got {value}\.", err)


def test_without_a_page(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACKAGED", "BUILT"):
        monkeypatch.setattr(html_page, name, home / "none.html")
    status, _, err = call(capsys, "quadratic-digits")
    assert status == 1
    assert "page: must be" in err
    assert "make page" in err


def test_served_until_it_is_interrupted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    answers: dict[str, tuple[int, bytes]] = {}

    def visit(port: int) -> None:
        file = io.BytesIO()
        Image.linear_gradient("L").save(file, "PNG")
        for method, path, body in (("GET", "/payload", None), ("POST", "/image", file.getvalue())):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(method, path, body, {"Content-Type": "image/png"})
            response = connection.getresponse()
            answers[path] = (response.status, response.read())
            connection.close()

    run = uvicorn.Server.run

    def interrupted(server: uvicorn.Server, sockets: Any) -> None:
        """Run the server, request two pages, then interrupt it as Ctrl-C does."""

        def come_and_end() -> None:
            try:
                visit(sockets[0].getsockname()[1])
            finally:
                server.should_exit = True

        visitor = threading.Thread(target=come_and_end)
        visitor.start()
        run(server, sockets)
        visitor.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    status, out, err = call(capsys, "quadratic-digits", "--port", "0")
    assert (status, err) == (130, "")
    assert out.endswith("Explorer: stopped.\n")
    address = re.search(r"http://127\.0\.0\.1:\d+/", out)
    assert address is not None
    assert opened == [address[0]]
    assert [answer[0] for answer in answers.values()] == [200, 200]
    assert read_payload(answers["/payload"][1]).names == ()
    mine = read_payload(answers["/image"][1])
    assert (mine.names, mine.images.shape) == (("your image",), (1, 8, 8, 3))
    assert call(capsys, "quadratic-digits", "--port", "0", "--no-browser")[0] == 130
    assert len(opened) == 1
