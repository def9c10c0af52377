"""`experiments.recast_resnet` from a run on digits to its table."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attnconv.data.augmentation import augment
from attnconv.data.image_set import ImageSet, uniform
from attnconv.data.settings import AugmentSettings
from attnconv.models.settings import ResNetSettings
from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder
from experiments import finetune_recast, recast_resnet
from experiments.common import Images
from experiments.recast_resnet import CNN, SOFT, Settings, final, main
from tests.tolerances import tolerance
from tests.training.making import tiny

NETWORK = ResNetSettings(widths=(6, 8), blocks=(1, 1), image_size=8, image_channels=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "resnet"
    fit(replace(tiny(epochs=1), model=NETWORK), folder, progress=False)
    return folder


def settings(run: Path, folder: Path) -> Settings:
    return Settings(
        run,
        out=folder / "out",
        kept=folder / "kept",
        seeds=2,
        epochs=1,
        images=40,
        test_images=30,
        compare=4,
        device="cpu",
    )


def test_from_a_run_to_the_table_and_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equality, tuned = main(settings(run, tmp_path))
    assert equality.cnn == equality.attention
    assert max(equality.difference, equality.softmax_difference) <= 10 * tolerance(torch.float32)["atol"]
    assert equality.largest_logit > 0.1
    for name in (CNN, SOFT):
        rates = {one.rate: one.result.held_out_after for one in tuned[name] if one.seed == 0}
        assert set(rates) == {0.01, 0.001, 0.0001}
        assert rates[tuned[name][0].rate] == max(rates.values())
        assert [one.seed for one in tuned[name]] == [0, 1, 0, 0]
        assert len(final(tuned[name])) == 2
    assert tuned[CNN][0].result.heads == 0 < tuned[SOFT][0].result.heads
    assert tuned[SOFT][0].result.farthest > 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["network"]["widths"] == [6, 8]
    assert "Test accuracy of soft heads minus that of the CNN" in (tmp_path / "out" / "table.md").read_text()
    monkeypatch.setattr(recast_resnet, "tune", None)  # a call would fail
    assert main(settings(run, tmp_path)) == (equality, tuned)


def test_a_training_is_kept_by_what_it_depends_on(run: Path, tmp_path: Path) -> None:
    chosen = replace(settings(run, tmp_path), seeds=1, rates=(0.01,), out=None)
    main(chosen)
    files = set((tmp_path / "kept").rglob("*.json"))
    assert len(files) == 2
    main(replace(chosen, compare=2))
    assert set((tmp_path / "kept").rglob("*.json")) == files
    main(replace(chosen, images=50))
    assert len(set((tmp_path / "kept").rglob("*.json"))) == 4


def test_the_network_itself_is_left_as_it_was(run: Path, tmp_path: Path) -> None:
    """Both trainings start with the run's weights, for all seeds."""
    _, tuned = main(settings(run, tmp_path))
    for name in (CNN, SOFT):
        assert len({one.result.test_before for one in tuned[name]}) == 1


def test_other_folders_are_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "begun").begin(replace(tiny(), model=NETWORK), {})
    with pytest.raises(ValueError, match=r"--run: .*got .*begun, unfinished"):
        main(Settings(tmp_path / "begun"))
    other = RunFolder(tmp_path / "other")
    other.begin(tiny(), {})
    other.result_file.write_text("{}")
    with pytest.raises(ValueError, match=r"other, finished, of AttentionSettings"):
        main(Settings(tmp_path / "other"))


def test_images_are_changed_as_the_run_changed_them(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A different border would cost accuracy, even without training."""
    asked = []

    def tune(name: str, model: nn.Module, sets: Mapping[str, Images], how: finetune_recast.Settings) -> None:
        asked.append((how.augment, how.batch_size, len(sets["train"])))
        raise KeyboardInterrupt

    monkeypatch.setattr(recast_resnet, "tune", tune)
    with pytest.raises(KeyboardInterrupt):
        main(settings(run, tmp_path))
    assert asked == [(RunFolder(run).settings().augment, 40, 40)]


def test_a_batch_is_what_trainings_of_the_library_see() -> None:
    pixels = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    images = Images(ImageSet(pixels, torch.arange(9)), (0.5,), (0.25,))
    chosen, changes = torch.tensor([7, 2]), AugmentSettings("modern")
    x, labels = images.batch(chosen, changes, seed=3, epoch=1)
    again = augment(pixels[chosen], uniform(3, 1, 9)[chosen], settings=changes, mean=(0.5,), std=(0.25,))
    assert torch.equal(x, again)
    assert labels.tolist() == [7, 2]
    torch.testing.assert_close(images.first(2).normalised()[0], (pixels[:2] / 255 - 0.5) / 0.25)
