"""`attnconv prove` and `attnconv recast` as users call them."""

import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from attnconv.convert import restore
from attnconv.models.model_loader import load
from tests.cli.test_commands import call


def small() -> nn.Module:
    """Return a network that the commands load as `tests.cli.test_theorem_commands:small`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 2, stride=2))


SMALL = "tests.cli.test_theorem_commands:small"


def test_prove_prints_differences_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "prove", "--cases", "12")
    assert err == ""
    assert status == 0
    assert out.count("All differences are within tolerance and bounds.") == 1
    words = " ".join(out.split())
    assert all(
        f"{dtype} {way}" in words for dtype in ("float64", "bfloat16") for way in ("dense", "kronecker", "shift")
    )


def test_prove_goes_through_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first.png", "second.png"):
        Image.linear_gradient("L").convert("RGB").save(tmp_path / name)
    words = ("prove", SMALL, "--image-size", "9x12", "--data", str(tmp_path))
    status, out, _ = call(capsys, *words)
    assert status == 0
    assert "on images (2, 3, 9, 12)" in " ".join(out.split())
    assert "on images (1, 3, 9, 12)" in " ".join(call(capsys, *words, "--images", "1")[1].split())
    assert f"function {SMALL} computed by attention" in " ".join(out.split())
    assert "Every layer is within its bound." in out


def test_prove_finds_out_what_images_a_network_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\ndef audio(): return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU())\n"
    )
    status, out, err = call(capsys, "prove", "own_nets:audio", "--image-size", "9")
    assert (status, "on images (1, 2, 9)" in " ".join(out.split()), err) == (0, True, "")
    err = call(capsys, "prove", "own_nets:audio", "--data", "digits")[2]
    assert re.search(r"--data: .*got images with channels: 2, spatial axes: 1\.", err)


def test_recast_writes_a_network_that_every_command_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.safetensors"
    status, out, _ = call(capsys, "recast", "resnet-small", "--out", str(file), "--image-size", "16")
    assert status == 0
    assert f"Weights: {file}" in out
    found = load(file)
    assert found.source == f"recast network {file}"
    assert found.settings is not None
    assert any(isinstance(module, nn.Conv2d) for module in restore(found.model).modules())


def test_a_function_named_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.safetensors"
    assert call(capsys, "recast", SMALL, "--out", str(file), "--image-size", "8", "--alpha", "3")[0] == 0
    with pytest.raises(ValueError, match=r"checkpoint: .*got 'tests\.cli"):
        load(file)


def test_a_file_that_cannot_be_loaded_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    words = ("--image-size", "16")
    assert call(capsys, "recast", "resnet-small", "--only", "stem*", "--out", str(first), *words)[0] == 0
    status, _, error = call(capsys, "recast", str(first), "--only", "stages*", "--out", str(second), *words)
    assert (status != 0, second.exists()) == (True, False)
    assert re.search("--out: must be omitted for a network that cannot be rebuilt .* got a recast network", error)


def test_recast_exports_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "new" / "network.pt2"
    status, out, _ = call(capsys, "recast", SMALL, "--export", str(program), "--image-size", "8")
    assert (status, f"Program: {program}" in out) == (0, True)
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(torch.export.load(program).module()(x), small()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recast", "quadratic-digits"], r"MODEL: .*convolution, got AttentionClassifier\."),
        (["recast", "resnet-small", "--out", "x.pt"], r"--out: .*\.safetensors, got x\.pt\."),
        (["recast", SMALL, "--only", "7*"], r"--only: .*got '7\*', .* 0, 2, \.\."),
        (["prove", SMALL, "--image-size", "0"], r"--image-size: .*HxW.*got '0'\."),
        (["prove", "--alpha", "2"], "--alpha: must be omitted without MODEL, got 2.0"),
        (["prove", "--data", "digits"], "--data: must be omitted without MODEL, got 'digits'"),
        (["prove", "--images", "2"], "--images: must be omitted without MODEL, got 2"),
        (["prove", SMALL, "--cases", "9"], "--cases: must be omitted with MODEL, got 9"),
        (["prove", "--cases", "0"], r"--cases: .*got 0\."),
        (
            ["prove", SMALL, "--data", "absent"],
            r"--data: .*digits.*got 'absent'\.",
        ),
        (
            ["prove", SMALL, "--alpha", "-1"],
            r" --alpha: .*above 0.*got -1\.",
        ),
    ],
)
def test_mistakes_are_said_in_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = call(capsys, *words)
    assert status != 0
    assert re.search(message, error)
