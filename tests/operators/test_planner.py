"""Tests of the planner: growth of costs, choices, and saving and loading of calibrations."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnconv import Dense, Grid, Kronecker, SelfAttention2d
from attnconv.operators import planner
from attnconv.operators.kernels import block_sizes
from attnconv.operators.planner import Machine, calibrate, calibration_file, fastest, keep, machine_of, seconds


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_of.cache_clear()
    fastest.cache_clear()
    yield
    machine_of.cache_clear()
    fastest.cache_clear()


def costs(size: int, *, low: bool = False, training: bool = True) -> dict[planner.Form, float]:
    return seconds(Grid.make((size, size)), 9, 64, 8, low=low, training=training, machine=Machine())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_small_images_run_dense_and_large_ones_by_structure(low: bool, training: bool) -> None:
    for size, form in ((4, "dense"), (32, "structured"), (256, "structured")):
        found = costs(size, low=low, training=training)
        assert min(found, key=found.__getitem__) == form
    growth = {form: costs(512)[form] / costs(256)[form] for form in costs(256)}
    assert growth["dense"] == pytest.approx(16, rel=0.05)
    assert growth["structured"] == pytest.approx(8, rel=0.2)  # n^1.5: all keys along each axis


def test_the_layer_follows_the_plan() -> None:
    layer = SelfAttention2d(8, 8, 9)
    assert isinstance(layer.operator(torch.zeros(2, 8, 4, 4)), Dense)
    assert isinstance(layer.operator(torch.zeros(2, 8, 40, 40)), Kronecker)
    layer.backend = "structured"
    assert isinstance(layer.operator(torch.zeros(2, 8, 4, 4)), Kronecker)


def test_a_calibration_is_kept_and_used() -> None:
    grid = Grid.make((4, 4))
    options = {"low": False, "training": False, "device": "cpu"}
    assert fastest(grid, 9, 8, 1, **options) == "dense"
    assert machine_of("cpu") == Machine()
    slow = Machine(product=1e3)  # slow at large products
    assert keep(slow) == calibration_file()
    assert machine_of("cpu") == slow
    assert fastest(grid, 9, 8, 1, **options) == "structured"
    keep(Machine(call=1.0), "cuda")
    assert machine_of("cpu") == slow


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("device", "side", "block"), [("cpu", 64, 2**22), ("cuda", 64, 2**24), ("cuda", 128, 2**28)])
def test_the_plan_counts_the_blocks_of_its_device(
    device: str, side: int, block: int, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def noted(*arguments: object, block: int, **options: object) -> dict[planner.Form, float]:
        given.append(block)
        return {"dense": 1.0, "structured": 2.0}

    monkeypatch.setattr(planner, "seconds", noted)
    fastest(Grid.make((side, side)), 9, 64, 8, low=low, training=True, device=device)
    assert given == [block]
    image = torch.zeros(1, side, side, 1, device="meta" if device == "cuda" else "cpu")
    assert block_sizes.block_bytes(image.device.type, long=side == 128) == block
    grid, machine = Grid.make((side, side)), Machine(call=1.0)  # only launches have a cost
    costs = [seconds(grid, 9, 64, 8, low=low, training=True, machine=machine, block=block) for block in (2**22, 2**23)]
    mixed = 9 * side**2 * 64 * 8 * (2 if low else 4)
    assert costs[0]["structured"] - costs[1]["structured"] == pytest.approx(24 * mixed / 2**23)


NAMES = ("product", "low_product", "thin", "low_thin", "memory", "call")
ZEROS = json.dumps({"cpu": dict.fromkeys(NAMES, 0.0)})
ENDLESS = json.dumps({"cpu": dict.fromkeys(NAMES, float("inf"))})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 10**5, '{"cpu": {"product": 1}}', '{"cpu": 3}', ZEROS, ENDLESS]
)
def test_a_calibration_that_cannot_be_read_counts_for_nothing(text: str) -> None:
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text(text)
    assert machine_of("cpu") == Machine()
    keep(Machine(call=1.0))  # and can be calibrated again
    assert machine_of("cpu") == Machine(call=1.0)


def test_measured_constants_are_those_of_a_machine() -> None:
    found = calibrate()
    assert found.thin > 1e8
    assert 1e9 < found.product < 1e15
    assert 1e8 < found.memory < 1e13
    assert 1e-8 < found.call < 1e-2


@pytest.mark.parametrize(("columns", "form"), [(0.5, "structured"), (1, "structured"), (3, "dense")])
def test_where_memory_is_slow_the_form_that_moves_less_is_chosen(columns: float, form: str) -> None:
    """In training, n x n probabilities are passed over about twice as often as n mixed values of each column."""
    keys, starved = 16 * 16, Machine(memory=1.0)
    found = seconds(Grid.make((16, 16)), 9, int(columns * keys), 1, low=False, training=True, machine=starved)
    assert min(found, key=found.__getitem__) == form
    twice = seconds(Grid.make((16, 16)), 9, int(columns * keys), 2, low=False, training=True, machine=starved)
    assert twice["dense"] == pytest.approx(found["dense"], rel=1e-3)  # images share the probabilities
    assert twice["structured"] == pytest.approx(2 * found["structured"], rel=1e-3)
