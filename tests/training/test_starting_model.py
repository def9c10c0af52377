import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.training.fitting import first_model, starting_model
from tests.report.making import SMALL, make_run


def test_the_start_is_the_one_that_the_seed_makes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", seed=7)
    before = torch.random.get_rng_state()
    model = starting_model(run)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    expected = build(SMALL)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert not model.training


def test_a_start_that_is_not_the_recorded_one_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = run.heads_file.read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    first["layers"][1]["centres"][0][0] += 1.0
    run.heads_file.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"run: .*centres.*got .*run"):
        starting_model(run)


def test_given_weights_are_the_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    given = first_model(run, replace(run.settings(), train=replace(run.settings().train, seed=1)))
    save_weights(run.start_weights, given, SMALL, mean=(0.5,), std=(0.25,))
    run.heads_file.unlink()
    pairs = zip(starting_model(run).parameters(), given.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
