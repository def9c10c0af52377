"""`audit` in two processes returns what it returns in one, to the last digit."""

from pathlib import Path

from tests.two_processes import run_python

PROGRAM = """
import os
import pytest
import torch
from attnconv.inspect import audit
from tests.inspect.test_auditing import encoder, images, own

tokens = torch.randn(20, 30, 16, generator=torch.Generator().manual_seed(2))
calls = [
    (own(), images(37), {}),  # 5 batches
    (own(), images(5), {}),  # one batch: the second process has none
    (own(), images(24).split(12), {"layers": ["3"]}),
    (encoder(), tokens, {"batch": 3, "grid": (5, 6), "queries": 12}),
]
alone = [audit(model, given, **options) for model, given, options in calls]
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
for (model, given, options), expected in zip(calls, alone, strict=True):
    found = audit(model, iter(given) if isinstance(given, tuple) else given, **options)
    assert found.numbers() == expected.numbers()
    for one, two in zip(expected.layers, found.layers, strict=True):
        assert torch.equal(one.statistics.profile.counts, two.statistics.profile.counts)
        assert torch.equal(one.statistics.profile.mass, two.statistics.profile.mass)
        assert torch.equal(one.statistics.profile.noise, two.statistics.profile.noise)

class Picky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = own()

    def forward(self, x):
        assert rank == 0, "only process 0 can do this."
        return self.attention(x)

for model, given, message in [
    (Picky(), images(20), "images: .*only process 0"),
    (own(), images(20, seed=rank), "images: must be the same in all processes.*got 20 and 20"),
    (own(), images(20 + rank), "images: must be the same in all processes.*got 20 and 21"),
    (own(), images(0), "images: .*got 0"),
]:
    with pytest.raises(ValueError, match=message):
        audit(model, given)
torch.distributed.barrier()
os._exit(0)  # ending the group can hang in torch 2.6
"""


def test_two_processes_audit_as_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_python(str(program))
