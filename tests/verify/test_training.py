"""Accuracy of small models: digits in the demo, CIFAR-10 in an hour on two CPU cores."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from attnconv.cli import main
from attnconv.training.fitting import fit
from attnconv.training.recipes import recipe


def test_digits_reach_97_percent(tmp_path: Path, verify_scale: float) -> None:
    """Mean of three seeds at full scale, otherwise one seed; a single seed can be a point lower on 360 images."""
    settings = recipe("quadratic-digits")
    accuracies = []
    for seed in (42, 43, 44) if verify_scale >= 1 else (42,):
        run = fit(replace(settings, train=replace(settings.train, seed=seed)), tmp_path / str(seed), progress=False)
        result = run.result()
        assert result is not None
        accuracies.append(result["last"]["test"]["accuracy"])
        print(f"quadratic-digits, seed {seed}: {accuracies[-1]:.2%} of the test images, {result['seconds']} s")
    assert mean(accuracies) >= 0.97


def test_the_demo_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run one epoch of the full-size demo; tests/cli runs a smaller one."""
    with pytest.raises(SystemExit) as end:
        main(["demo", "--epochs", "1", "--out", str(tmp_path / "demo")])
    assert end.value.code in (0, None)
    out = capsys.readouterr().out
    assert "as 9 heads in float64: maximum relative difference" in out
    assert "test accuracy" in out
    assert Path(out.split("Report: ")[1].strip()).is_file()


def test_cifar_10_reaches_75_percent_within_an_hour(tmp_path: Path, shared_data: Path, verify_scale: float) -> None:
    """At full scale the whole run; otherwise one epoch on a tenth of the images, with a lower threshold."""
    settings = recipe("quadratic-small")
    settings = replace(settings, data=replace(settings.data, root=str(shared_data / "cifar10")))
    if verify_scale < 1:
        limited = replace(settings.data, limit=4500)
        settings = replace(settings, data=limited, train=replace(settings.train, epochs=1))
    result = fit(settings, tmp_path / "run", progress=False).result()
    assert result is not None
    accuracy = result["last"]["test"]["accuracy"]
    print(f"quadratic-small on CIFAR-10: {accuracy:.2%} of the test images, {result['seconds'] / 60:.0f} minutes")
    assert accuracy >= (0.75 if verify_scale >= 1 else 0.2)
    assert result["seconds"] <= 3600
