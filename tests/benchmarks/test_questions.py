"""Every benchmark at its quick sizes: what it measures, and that the contenders compute the same values."""

import importlib
import math
from typing import Any

import pytest
import torch

from attnconv.models.classifiers import build
from benchmarks import compare, gated, megapixel, model_step, position_only, relative_bias
from benchmarks.__main__ import ask, settings_of
from benchmarks.measure import Memory, measuring_on, memory_of
from benchmarks.results import QUESTIONS, Results


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the modules that measure memory instead of starting their processes, which take seconds."""
    modules: list[str] = []

    def noted(module: str, case: dict[str, Any]) -> Memory:
        modules.append(module)
        return Memory(2**20, 2**28, 2**19)

    monkeypatch.setattr(compare, "memory_of", noted)
    return modules


def quick(name: str) -> Results:
    return ask(name, settings_of(name, "cpu", quick=True))


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_number_is_finite_and_positive(name: str) -> None:
    found = quick(name)
    assert found.name == name
    assert found.rows
    for row in found.rows:
        numbers = list(row.seconds)
        if row.ratio is not None:
            assert row.ratio.least <= row.ratio.value <= row.ratio.most
            numbers += [row.ratio.least, row.ratio.most]
        numbers += [value for value in (row.memory_ratio, row.pixels, row.dense_bytes) if value is not None]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert row.difference is None or row.difference < 1e-5
    assert all(math.isfinite(value) for value in found.facts.values())


def test_quick_questions_start_one_process(measured: list[str]) -> None:
    """A new process takes seconds, whatever it measures."""
    for name in QUESTIONS:
        quick(name)
    assert measured == ["benchmarks.megapixel"]


def test_every_case_has_every_backend() -> None:
    rows = position_only.run(cases=((2, 8), (1, 32)), channels=(4,), dtypes=("float32",), repeats=1).rows
    assert [row.contender for row in rows] == ["reference", "dense", "structured", "auto"] * 2
    assert [row.memory is None for row in rows] == [True] * 4 + [False] * 4
    assert rows[0].dense_bytes == 9 * 64 * 64 * 4


def test_the_planners_choices_are_counted() -> None:
    facts = quick("planner").facts
    assert facts["cases"] == 4
    assert 0 <= facts["within 1.2 of the best"] <= 4
    assert facts["worst"] >= 1


def test_gated_attention_has_three_contenders_that_agree() -> None:
    rows = gated.run(cases=((1, 6), (1, 9)), heads=2, channels=8, repeats=1).rows
    assert [row.contender for row in rows] == ["per image", "materialised", "fused"] * 2
    assert [row.difference is None for row in rows] == [True, False, False] * 2
    assert [row.memory is None for row in rows] == [True] * 3 + [False] * 3
    assert [row.memory_ratio for row in rows] == [None] * 4 + [1.0, 1.0]


def test_a_relative_bias_in_bfloat16_differs_by_its_rounding() -> None:
    rows = relative_bias.run(cases=((1, 6), (2, 8)), heads=2, channels=8, repeats=1).rows
    assert [row.contender for row in rows] == ["materialised", "folded", "linear"] * 4
    low = [row.difference for row in rows if row.case.startswith("bfloat16") and row.difference is not None]
    assert len(low) == 4
    assert all(1e-4 < difference < 5e-2 for difference in low)


@pytest.mark.parametrize(
    ("module", "case", "names"),
    [
        ("relative_bias", {"side": 6, "heads": 2, "dtype": "float32"}, ("materialised", "folded", "linear")),
        ("gated", {"side": 6, "heads": 2}, ("per image", "materialised", "fused")),
        ("full_covariance", {"side": 8, "heads": 3, "root": 1.0}, ("rows", "rank 3", "auto")),
    ],
)
def test_a_case_stays_on_the_device_where_it_is_measured(module: str, case: dict[str, Any], names: list[str]) -> None:
    """A tensor left on the CPU would raise when combined with tensors on the device."""
    prepare = importlib.import_module(f"benchmarks.{module}").prepare
    for name in names:
        with measuring_on("meta"):
            found = prepare(batch=1, channels=8, **case, contender=name)()
        assert all(tensor.is_meta for tensor in found)


def test_the_other_questions_stay_there_too() -> None:
    with measuring_on("meta"):
        for backend in position_only.BACKENDS:
            sizes = {"batch": 1, "side": 16, "channels": 8, "heads": 4}
            assert position_only.prepare(**sizes, dtype="float32", contender=backend)()[0].is_meta
        for contender in ("alpha 0.5", "alpha 0.5, with gradients"):
            megapixel.prepare(side=16, channels=8, heads=4, contender=contender)()
        assert quick("model-step").rows
        assert quick("planner").rows


def test_wide_layers_are_measured_up_to_a_side() -> None:
    rows = position_only.run(cases=((1, 4), (1, 33)), channels=(1, 65), dtypes=("float32",), repeats=1).rows
    cases = list(dict.fromkeys(row.case for row in rows))
    assert cases == ["float32, 1 x 1 x 4 x 4", "float32, 1 x 1 x 33 x 33", "float32, 1 x 65 x 4 x 4"]


def test_growth_is_fitted_per_sharpness() -> None:
    found = quick("megapixel")
    assert len(found.facts) == 1
    assert all("alpha" in name for name in found.facts)


def test_hard_heads_are_the_networks_twenty_convolutions() -> None:
    found = quick("hard-heads")
    assert len(found.rows) == 11 * 2 * 2
    assert sum("all 20 convolutions" in name for name in found.facts) == 2


def test_stored_values_leave_the_gradients_of_weights_and_of_all_before_them() -> None:
    model = model_step.with_stored_values(build("quadratic-digits"))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    assert not any("centres" in name for name, _ in model.named_parameters())


def test_a_case_of_a_question_runs_in_a_process_of_its_own() -> None:
    case = {"side": 32, "channels": 8, "heads": 2, "contender": "alpha 0.5"}
    assert memory_of("benchmarks.megapixel", case).process > 32 * 32 * 8 * 4
