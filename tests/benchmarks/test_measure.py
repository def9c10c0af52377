"""Times, ratios, exponents and peak memory, measured with known clocks and sizes."""

import inspect
import statistics
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.utils.benchmark
from torch import Tensor

from benchmarks import memory_process
from benchmarks.measure import Ratio, device_here, exponent, interleaved, measuring_on, memory_of
from benchmarks.results import Row

MEBI = 2**20


def prepare(*, mebibytes: int) -> Callable[[], Tensor]:
    """Return a step that allocates `mebibytes` MiB, in addition to inputs of the same size."""
    inputs = torch.ones(mebibytes * MEBI // 4)
    return lambda: inputs + 1


def test_contenders_take_turns_and_the_first_round_is_not_timed() -> None:
    now, calls = [0.0], []
    costs = {"a": iter([100.0, 1.0, 5.0, 3.0]), "b": iter([100.0, 2.0, 2.0, 2.0])}

    def contender(name: str) -> Callable[[], None]:
        def step() -> None:
            calls.append(name)
            now[0] += next(costs[name])

        return step

    times = interleaved({"a": contender("a"), "b": contender("b")}, 3, clock=lambda: now[0])
    assert calls == ["a", "b"] * 4
    assert times == {"a": (1.0, 5.0, 3.0), "b": (2.0, 2.0, 2.0)}
    assert Row("case", "a", times["a"]).median == 3.0
    assert Ratio.of(times["a"], times["b"]) == Ratio(1.5, 0.5, 2.5)


def test_the_clock_waits_for_the_gpu() -> None:
    """torch's timer does; `time.perf_counter` would only measure the time to launch kernels."""
    assert inspect.signature(interleaved).parameters["clock"].default is torch.utils.benchmark.timer


def test_a_gpus_memory_is_what_torch_allocates_beyond_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = [0], [0]

    def build() -> Callable[[], None]:
        held[0] += 100  # inputs

        def step() -> None:
            most[0] = max(most[0], held[0] + 7)

        return step

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4096)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.__setitem__(0, held[0]))
    assert memory_process._on_gpu(build) == {"step": 7, "process": 4096, "tensors": 7}


def test_tensors_are_made_where_measurements_run() -> None:
    with measuring_on("meta"):
        assert torch.zeros(1).is_meta
        assert device_here().type == "meta"
    with measuring_on("cpu"):
        assert torch.zeros(1).device == device_here() == torch.device("cpu")


def test_no_measurement_asks_torch_for_its_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.8 it was the CPU, even inside `with torch.device(..)`."""
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda size: SimpleNamespace(device=torch.device("cuda")))
    assert device_here().type == "cuda"


def test_the_spread_of_a_ratio_holds_the_ratio_of_medians() -> None:
    found = Ratio.of((1.0, 2.0, 3.0), (2.0, 1.0, 0.5))
    assert found == Ratio(2.0, 0.5, 6.0)
    assert Ratio.of((3.0, 1.0, 2.0), (3.0, 1.0, 2.0)) == Ratio(1.0, 1.0, 1.0)


def test_disturbed_rounds_do_not_widen_the_spread() -> None:
    found = Ratio.of((2.0, 2.0, 300.0, 2.0, 2.2), (1.0, 1.0, 1.0, 2.1, 1.0))
    assert found == Ratio(2.0, 2.0, 2.2, disturbed=2)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    sizes = [2.0**k for k in range(5, 9)]
    assert exponent(sizes, [3e-4 * size**power for size in sizes]) == pytest.approx(power, abs=1e-12)


def test_an_exponent_needs_two_sizes() -> None:
    with pytest.raises(statistics.StatisticsError, match="x is constant"):
        exponent([4.0, 4.0], [1.0, 2.0])


def test_memory_is_that_of_the_step_and_not_of_its_inputs_or_of_this_process() -> None:
    held = torch.ones(300 * MEBI // 4)  # a child inherits ru_maxrss from its parent; this must not hide the step
    found = memory_of(__name__, {"mebibytes": 64})
    assert held[0] == 1
    assert found.step == pytest.approx(64 * MEBI, rel=0.1)
    assert found.process > 128 * MEBI


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ChildProcessError, match=r"case: .*got status 1: .*argument 'mebibyte'"):
        memory_of(__name__, {"mebibyte": 1})
