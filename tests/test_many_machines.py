"""docs/many-machines.md: its commands, its scripts, and its recipe for sharded training."""

import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from attnconv.cli.parsing import parse
from tests.two_processes import ROOT, run_python

PAGE = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"-m attnconv (\w+) ([^\n&]*)", PAGE.replace("\\\n", ""))
SCRIPTS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(RECIPE,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "fully_shard" in block)

# Trains a model in one process, with DistributedDataParallel, and by the recipe, and compares the weights.
PROGRAM = """
import os
import sys
from pathlib import Path
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from attnconv.inspect import audit
from attnconv.models import AttentionSettings, build

STEPS = 50
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
generator = torch.Generator().manual_seed(1)
images, labels = torch.randn(16, 1, 8, 8, generator=generator), torch.randint(4, (16,), generator=generator)
everything, share = slice(None), slice(8 * rank, 8 * rank + 8)

def fresh(encoding):
    torch.manual_seed(0)
    sizes = dict(layers=2, heads=4, width=16, mlp_width=16, image_size=8, image_channels=1, classes=4, max_shift=3)
    return build(AttentionSettings(encoding=encoding, dropout=0.0, **sizes))

def train(model, optimizer, part=share):
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

for encoding in ("quadratic", "learned-content"):
    one, two, sharded = (fresh(encoding) for _ in range(3))
    train(one, sgd(one), everything)
    train(DistributedDataParallel(two), sgd(two))
    names = {"torch": torch, "model": sharded, "train": train}
    exec(Path(sys.argv[1]).read_text(), names)
    with pytest.raises(ValueError, match="model: must not have sharded parameters, got embedding.weight"):
        audit(sharded, images)
    if rank == 0:
        for kind, weights in {"DDP": two.state_dict(), "FSDP2": names["weights"]}.items():
            differences = [weights[name] - value for name, value in one.state_dict().items()]
            worst = max(float(difference.abs().max()) for difference in differences)
            print(f"{encoding}: largest difference of a weight between {kind} and one process: {worst:.1e}")
            assert worst < 1e-5
torch.distributed.destroy_process_group()
sys.stdout.flush()
# Sharded models keep gloo's threads alive, which may abort a normal exit: https://github.com/pytorch/pytorch/pull/179291
os._exit(0)
"""


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_a_documented_command_is_understood(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parse(importlib.import_module(f"attnconv.cli.{name}_command").Arguments, shlex.split(words))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_valid(script: str) -> None:
    assert re.match(r"#!/bin/bash\n(#SBATCH --[\w-]+(=\S+)?\n)+\n", script)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.9", reason="FSDP2 does not average gradients on a CPU")
def test_sharded_training_follows_one_process(tmp_path: Path) -> None:
    program, recipe = tmp_path / "program.py", tmp_path / "recipe.py"
    program.write_text(PROGRAM)
    recipe.write_text(RECIPE)
    print(run_python(str(program), str(recipe)))
