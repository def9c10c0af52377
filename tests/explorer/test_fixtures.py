"""The numbers that the page is tested with are those of the current library."""

import json
from typing import Any

import torch
from safetensors.torch import load

from tests.explorer.write_fixtures import FOLDER, payload, theorem
from tests.tolerances import tolerance

STALE = "web/tests/fixtures is stale: run `python -m tests.explorer.write_fixtures`"


def assert_same(kept: Any, made: Any, path: str = "") -> None:
    """Require equal structure and text, and nearly equal numbers."""
    if isinstance(made, dict):
        assert kept.keys() == made.keys(), f"{STALE} ({path})"
        for name, value in made.items():
            assert_same(kept[name], value, f"{path}.{name}")
    elif isinstance(made, list) and made and not isinstance(made[0], float):
        assert len(kept) == len(made), f"{STALE} ({path})"
        for index, (left, right) in enumerate(zip(kept, made, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    elif isinstance(made, (list, float)):
        left, right = (torch.tensor(value, dtype=torch.float64) for value in (kept, made))
        torch.testing.assert_close(
            left, right, **tolerance(torch.float64), msg=lambda said: f"{STALE} ({path}): {said}"
        )
    else:
        assert kept == made, f"{STALE} ({path})"


def test_the_bench_is_held_to_the_library_of_today() -> None:
    assert_same(json.loads((FOLDER / "theorem.json").read_text(encoding="utf-8")), json.loads(json.dumps(theorem())))


def test_the_payload_is_held_to_the_library_of_today() -> None:
    content, rows = payload()
    kept = load((FOLDER / "payload.safetensors").read_bytes())
    made = load(content)
    assert kept.keys() == made.keys(), STALE
    for name, tensor in made.items():
        assert kept[name].dtype == tensor.dtype, f"{STALE} ({name})"
        assert_same(kept[name].double().flatten().tolist(), tensor.double().flatten().tolist(), name)
    assert_same(json.loads((FOLDER / "payload.json").read_text(encoding="utf-8")), json.loads(json.dumps(rows)))


def test_every_measured_error_lies_below_its_bound() -> None:
    for case in theorem()["cases"]:
        assert 0 < case["error"] <= case["bound"], case["geometry"]
