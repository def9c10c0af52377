"""`experiments.sequence` from its settings to its tables, at a tiny size, and its statistics of heads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attnconv import from_conv
from experiments import sequence, sequence_tasks
from experiments.sequence import Layer, Settings, found_of_teacher, look, main, measure
from experiments.sequence_tasks import MODELS, TEACHER_SHIFTS, SequenceNet, make_task, mixing_layer
from tests.tolerances import tolerance


def settings(folder: Path) -> Settings:
    return Settings(
        out=folder / "out",
        kept=folder / "kept",
        tasks=("teacher",),
        seeds=1,
        width=4,
        steps=2,
        real_steps=1,
        batch_size=4,
        test_images=4,
        device="cpu",
    )


def test_from_beginning_to_end_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = main(settings(tmp_path))
    assert [(r.task, r.model) for r in first] == [("teacher", model) for model in MODELS]
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["settings"]["steps"] == 2
    assert "torch" in record["environment"]["versions"]
    assert "teacher's shifts found" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "shifts.png").stat().st_size > 1000
    monkeypatch.setattr(sequence, "train", None)  # a call would fail
    assert main(settings(tmp_path)) == first


def test_a_run_is_kept_by_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MODELS", ("quadratic",))
    chosen = replace(settings(tmp_path), out=None)
    main(chosen)
    files = set((tmp_path / "kept").rglob("*.json"))
    main(replace(chosen, real_steps=9))
    assert set((tmp_path / "kept").rglob("*.json")) == files
    main(replace(chosen, steps=3))
    assert len(set((tmp_path / "kept").rglob("*.json"))) == 2 * len(files)


def test_classes_of_digits_read_as_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MODELS", ("learned",))
    (result,) = main(replace(settings(tmp_path), out=None, tasks=("digits",)))
    assert 0 <= result.score <= 1
    assert [layer.heads for layer in result.layers] == [9, 9, 9]


def test_rows_need_a_folder() -> None:
    with pytest.raises(ValueError, match=r"--root: .*got None"):
        main(Settings(tasks=("rows",)))


def test_rows_are_the_rows_of_the_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).float()
    found = (images, torch.tensor([0, 1]))
    monkeypatch.setattr(sequence_tasks, "cifar10", lambda *_: {"train": found, "test": found})
    task = make_task("rows", root=tmp_path, images=2, test_images=2, seed=0)
    assert task.test.shape == (2, 96, 32)
    torch.testing.assert_close(task.test[1, :, 5].reshape(3, 32), images[1, :, 5])


def test_a_student_that_is_the_teacher_makes_no_error_and_holds_all_its_shifts() -> None:
    task = make_task("teacher", root=None, images=0, test_images=10, seed=3)
    assert isinstance(task.teacher, nn.Sequential)
    deviation = make_task("teacher", root=None, images=0, test_images=500, seed=3).test_targets.std((0, 2))
    torch.testing.assert_close(deviation, torch.ones(4), rtol=0.1, atol=0.0)
    student = SequenceNet(task, "quadratic", width=16)
    for number, conv in enumerate(m for m in task.teacher if isinstance(m, nn.Conv1d)):
        student.layers[number] = from_conv(conv)
    assert measure(student, task, torch.device("cpu")) < tolerance(torch.float32)["atol"]
    heads = look(student, task)
    layers = [Layer(len(h), 0, tuple(shift for shift, *_, fixed in h if fixed), (), score) for h, score in heads]
    assert [set(layer.shifts) for layer in layers] == [set(shifts) for shifts in TEACHER_SHIFTS]
    assert found_of_teacher(layers) == (8, 0)
    assert min(layer.score for layer in layers) > 0.9


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ((0, 1, 2), (-3, -2, -1, 0, 1), (8, 1)),  # layer 0 is translated by 1, layer 1 by -1
        ((0, 1, 2), (-2, -1, 0, 1, 2), (7, 0)),
        ((9,), (-9,), (2, 8)),  # several translations match two of the teacher's shifts; the smallest is used
        ((), (1, 1, 1), (1, 0)),
    ],
)
def test_shifts_count_up_to_a_translation(
    first: tuple[int, ...], second: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    assert found_of_teacher([Layer(5, 0, shifts, (), 0.0) for shifts in (first, second)]) == wanted


def test_attention_without_positions_sees_none() -> None:
    layer = mixing_layer("no positions", 4, 4, heads=3, places=8)
    x, order = torch.randn(2, 4, 8), torch.randperm(8)
    torch.testing.assert_close(layer(x)[:, :, order], layer(x[:, :, order]), **tolerance(torch.float32))


def test_all_models_have_the_convolution_s_weights() -> None:
    counts = {
        name: sum(
            p.numel() for n, p in mixing_layer(name, 6, 8, heads=5, places=9).named_parameters() if "enc" not in n
        )
        for name in MODELS
    }
    assert set(counts.values()) == {5 * 6 * 8 + 8}
