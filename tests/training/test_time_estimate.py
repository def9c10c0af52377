"""Estimated seconds of a training, by a clock that ticks at every look: a step or a batch of evaluation takes 1."""

from itertools import count

import pytest
import torch

from attnconv.data.load_splits import load
from attnconv.training import time_estimate
from tests.training.making import tiny


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(time_estimate, "_now", lambda _module: float(next(ticks)))


@pytest.mark.parametrize(("test_curve", "accumulate", "epochs"), [(True, 1, 30), (False, 2, 3)])
def test_steps_of_training_and_batches_of_evaluation_are_counted(
    test_curve: bool, accumulate: int, epochs: int
) -> None:
    settings = tiny(epochs=epochs, limit=110, eval_batch_size=20, test_curve=test_curve, accumulate=accumulate)
    data = load(settings.data)
    held_out, test = len(data.validation) / 20, len(data.test) / 20
    epoch = len(data.train) // 20 + held_out + test * test_curve
    expected = epochs * epoch + 2 * (held_out + test)
    assert time_estimate.training_seconds(settings, data, seconds=0.0) == pytest.approx(expected)


def test_random_numbers_go_on_as_if_nothing_had_been_timed() -> None:
    settings = tiny(limit=100)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    time_estimate.training_seconds(settings, load(settings.data), seconds=0.0)
    assert torch.equal(torch.rand(3), expected)
