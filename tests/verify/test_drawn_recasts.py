"""50,000 random convolutions run as attention: equal forward and backward, and restored bit for bit."""

import random
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests.drawn_recasts import draw, wrong


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")  # raised by torch if oneDNN is disabled
@pytest.mark.parametrize("how", ["one thread", "two threads", "without oneDNN"])
def test_drawn_convolutions_in_every_layout(how: str, verify_scale: float, attack_seed: int) -> None:
    cases = round({"one thread": 30_000, "two threads": 10_000, "without oneDNN": 10_000}[how] * verify_scale)
    source = random.Random(f"{how} {attack_seed}")
    torch.set_num_threads(2 if how == "two threads" else 1)
    one_dnn: AbstractContextManager[None] = (
        torch.backends.mkldnn.flags(enabled=False) if how == "without oneDNN" else nullcontext()
    )
    found = []
    with one_dnn:
        for _ in range(cases):
            case = draw(source)
            if problem := wrong(case, source):
                found.append(f"{problem}: {case}")
                print(found[-1])
    print(f"{cases} recasts, {how}: {len(found)} wrong")
    assert not found, "\n".join(found[:10])
