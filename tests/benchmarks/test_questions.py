"""Each benchmark at its quick sizes: what it measures, and that peers compute what they should."""

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attnconv.models.factory import build
from attnconv.operators.kernels import fused_relative_bias
from benchmarks import compare, gated, megapixel, model_step, planner, position_only, relative_bias
from benchmarks.measure import Memory, measuring_on, memory_of
from benchmarks.results import Answer
from benchmarks.settings import QUESTIONS, QUICK, MegapixelSettings, ModelStepSettings, problems
from tests.tolerances import tolerance


@pytest.fixture(autouse=True)
def memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own take seconds; tests/benchmarks/test_measuring.py starts one."""
    for module in (position_only, megapixel, compare):
        monkeypatch.setattr(module, "memory_of", lambda name, case: Memory(2**20, 2**28, 2**19))


def asked(name: str) -> Answer:
    module = name.replace("-", "_")
    found: Answer = importlib.import_module(f"benchmarks.{module}").answer(getattr(QUICK, module))
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_number_is_finite_and_positive(name: str) -> None:
    found = asked(name)
    assert found.name == name
    assert found.rows
    for row in found.rows:
        numbers = list(row.seconds.seconds)
        if row.ratio is not None:
            assert row.ratio.least <= row.ratio.value <= row.ratio.most
            numbers += [row.ratio.least, row.ratio.most]
        numbers += [value for value in (row.memory_ratio, row.pixels, row.dense_bytes) if value is not None]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert row.difference is None or row.difference < 1e-5
    assert all(math.isfinite(value) for value in found.facts.values())


def test_quick_questions_start_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes seconds, whatever it measures."""
    started: list[str] = []

    def noted(name: str, case: dict[str, Any]) -> Memory:
        started.append(name)
        return Memory(2**20, 2**28, 2**19)

    for module in (position_only, megapixel, compare):
        monkeypatch.setattr(module, "memory_of", noted)
    for name in QUESTIONS:
        asked(name)
    assert started == ["benchmarks.megapixel"]


def test_every_case_has_every_backend() -> None:
    rows = position_only.answer(replace(QUICK.position_only, memory_from=16)).rows
    assert [row.contender for row in rows] == ["reference", "dense", "structured", "auto"] * 2
    assert [row.memory is None for row in rows] == [True] * 4 + [False] * 4
    assert rows[0].dense_bytes == 9 * 64 * 64 * 4


def test_the_planners_choices_are_counted() -> None:
    facts = asked("planner").facts
    assert facts["cases"] == 4
    assert 0 <= facts["within 1.2 of the best"] <= 4
    assert facts["worst"] >= 1


def test_gated_attention_has_three_contenders_that_agree() -> None:
    rows = gated.answer(replace(QUICK.gated, memory_from=8)).rows
    assert [row.contender for row in rows] == ["per image", "materialised", "fused"] * 2
    assert [row.difference is None for row in rows] == [True, False, False] * 2
    assert [row.memory is None for row in rows] == [True] * 3 + [False] * 3
    assert [row.memory_ratio for row in rows] == [None] * 4 + [1.0, 1.0]


def test_a_relative_bias_in_bfloat16_differs_by_its_rounding() -> None:
    settings = replace(QUICK.relative_bias, dtypes=("float32", "bfloat16"), repeats=1)
    rows = relative_bias.answer(settings).rows
    assert [row.contender for row in rows] == ["materialised", "folded", "linear"] * 4
    low = [row.difference for row in rows if row.case.startswith("bfloat16") and row.difference is not None]
    assert len(low) == 4
    assert all(1e-4 < difference < 5e-2 for difference in low)


@pytest.mark.parametrize(
    ("device", "side", "expected"),
    [
        ("cpu", 24, ("materialised", "folded", "linear")),
        ("cuda", 24, ("materialised", "folded", "flex", "linear")),
        ("cuda", 8, ("materialised", "folded", "linear")),
    ],
)
def test_flex_attention_runs_where_the_library_may_take_it(
    device: str, side: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_relative_bias, "can_compile", lambda device: True)
    monkeypatch.setattr(relative_bias, "device_here", lambda: torch.device(device))
    assert relative_bias.contenders(side, 32, "bfloat16") == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_flex_attention_computes_what_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it refuses gradients, for want of a compiled kernel; uncompiled it has them."""
    if not hasattr(torch_flex, "_validate_device"):
        pytest.skip("this torch names its check differently")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    flex, exact = (
        relative_bias.prepared(batch=2, side=3, heads=2, channels=8, dtype="float32", contender=name)()
        for name in ("flex", "materialised")
    )
    for one, other in zip(flex, exact, strict=True):
        torch.testing.assert_close(one, other, **tolerance(torch.float32, scale=3))  # sums of float32 in another order


@pytest.mark.parametrize(
    ("module", "case", "names"),
    [
        ("relative_bias", {"side": 6, "heads": 2, "dtype": "float32"}, ("materialised", "folded", "linear")),
        ("gated", {"side": 6, "heads": 2}, ("per image", "materialised", "fused")),
        ("full_covariance", {"side": 8, "heads": 3, "root": 1.0}, ("rows", "rank 3", "auto")),
    ],
)
def test_a_case_stays_on_the_device_where_it_is_measured(module: str, case: dict[str, Any], names: list[str]) -> None:
    """A tensor left on the CPU would not meet those that are elsewhere."""
    prepared = importlib.import_module(f"benchmarks.{module}").prepared
    for name in names:
        with measuring_on("meta"):
            found = prepared(batch=1, channels=8, **case, contender=name)()
        assert all(tensor.is_meta for tensor in found)


def test_the_other_questions_stay_there_too() -> None:
    with measuring_on("meta"):
        for backend in position_only.BACKENDS:
            sizes = {"batch": 1, "side": 16, "channels": 8, "heads": 4}
            assert position_only.prepared(**sizes, dtype="float32", backend=backend)().is_meta
        assert megapixel.prepared(side=16, channels=8, heads=4, alpha=0.5)().is_meta
        assert model_step.answer(replace(QUICK.model_step, dtypes=("float32",))).rows
        assert planner.answer(QUICK.planner).rows


def test_wide_layers_are_measured_up_to_a_side() -> None:
    settings = replace(QUICK.position_only, cases=((1, 4), (1, 8)), channels=(64, 65), wide_to=4, repeats=1)
    rows = position_only.answer(settings).rows
    cases = list(dict.fromkeys(row.case for row in rows))
    assert cases == ["float32, 1 x 64 x 4 x 4", "float32, 1 x 64 x 8 x 8", "float32, 1 x 65 x 4 x 4"]


def test_growth_is_fitted_per_sharpness() -> None:
    found = asked("megapixel")
    assert len(found.facts) == len(QUICK.megapixel.alphas)
    assert all("alpha" in name for name in found.facts)


def test_hard_heads_are_the_networks_twenty_convolutions() -> None:
    found = asked("hard-heads")
    assert len(found.rows) == 11 * 2 * 2
    assert sum("all 20 convolutions" in name for name in found.facts) == 2


def test_stored_values_leave_the_gradients_of_weights_and_of_all_before_them() -> None:
    model = model_step.with_stored_values(build("quadratic-digits"))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    assert not any("centres" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("preset", ["resnet-digits", "learned-content"])
def test_a_model_without_heads_of_position_alone_is_refused(preset: str) -> None:
    with pytest.raises(ValueError, match=rf"--model-step\.preset: .* got '{preset}'"):
        model_step.answer(ModelStepSettings(preset=preset))


def test_a_case_of_a_question_runs_in_a_process_of_its_own() -> None:
    case = {"side": 32, "channels": 8, "heads": 2, "alpha": 0.5}
    assert memory_of("benchmarks.megapixel", case).process > 32 * 32 * 8 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megapixel": MegapixelSettings(sides=(8, 8))}, "--megapixel.sides: must be at least two different"),
        ({"megapixel": MegapixelSettings(alphas=())}, "--megapixel.alphas: must not be empty"),
        ({"planner": replace(QUICK.planner, sides=())}, "--planner.sides: must not be empty"),
        ({"megapixel": MegapixelSettings(alphas=(0.0,))}, "--megapixel.alphas: must be positive, got 0.0"),
        ({"hard_heads": replace(QUICK.hard_heads, side=33)}, "--hard-heads.side: must be a positive multiple of 32"),
        ({"model_step": ModelStepSettings(batch=0)}, "--model-step.batch: must be at least 1, got 0"),
        ({"gated": replace(QUICK.gated, repeats=0)}, "--gated.repeats: must be at least 1, got 0"),
        ({"position_only": replace(QUICK.position_only, cases=((0, 4),))}, "--position-only.cases: must be at least 1"),
    ],
)
def test_wrong_settings_are_named_as_flags(changes: dict[str, Any], message: str) -> None:
    assert problems(QUICK) == []
    found = problems(replace(QUICK, **changes))
    assert len(found) == 1
    assert found[0].startswith(message)
