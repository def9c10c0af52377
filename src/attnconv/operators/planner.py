"""Cost model that predicts the faster form of a position-only operator, dense or structured.

    seconds = flops of large products / rate + flops of thin products / rate + bytes / bandwidth + calls * overhead

The default constants are those of a two-core x86 machine; `attnconv calibrate` measures your machine.
"""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

import msgspec
import torch
from torch import Tensor

from attnconv._util.atomic_write import write_atomically
from attnconv._util.settings import Positive
from attnconv.grid import Grid
from attnconv.operators.kernels.block_sizes import KRONECKER_BLOCK, LONG_AXIS, block_bytes

Form = Literal["dense", "structured"]


@final
@dataclass(frozen=True)
class Machine:
    """Speed of a device, as constants of the cost model."""

    product: float = 150e9  # flops per second of large matrix products in float32
    low_product: float = 400e9  # the same in bf16
    thin: float = 80e9  # flops per second of batched products of small matrices in float32
    low_thin: float = 250e9  # the same in bf16
    memory: float = 15e9  # bytes read or written per second
    call: float = 6e-6  # minimum seconds per operation


# Estimates for a large GPU from its data sheet: a fifth of its peak rates, and its launch overhead.
GPU = Machine(product=20e12, low_product=150e12, thin=2e12, low_thin=6e12, memory=1e12, call=8e-6)


def seconds(
    grid: Grid,
    heads: int,
    channels: int,
    batch: int,
    *,
    low: bool,
    training: bool,
    machine: Machine,
    block: int = KRONECKER_BLOCK,
) -> dict[Form, float]:
    """Predict how many seconds each form of an operator (dense or structured) takes to compute a layer's output.

    `channels` is the smaller of the layer's numbers of input and output channels, `low` selects 16-bit matrix products,
    `training` adds the backward pass, and `block` is the maximum size of an intermediate tensor, in bytes.
    """
    product, thin = (machine.low_product, machine.low_thin) if low else (machine.product, machine.thin)
    size, queries, keys = 2 if low else 4, grid.query_count, grid.key_count
    matrix, mixed = heads * queries * keys, heads * queries * channels * batch
    dense = (30 if training else 12) * machine.call + 2 * matrix * channels * batch * (3 if training else 1) / product
    dense += matrix * ((48 + 3 * size) if training else (16 + size)) / machine.memory
    keys_along = sum(axis.size for axis in grid.axes)
    structured = (70 if training else 22) * machine.call + mixed * size / block * (24 if training else 8) * machine.call
    structured += 2 * mixed * keys_along * (4 if training else 1) / thin
    structured += mixed * size * (8 if training else 3) / machine.memory
    return {"dense": dense, "structured": structured}


@functools.lru_cache(maxsize=1024)
def fastest(grid: Grid, heads: int, channels: int, batch: int, *, low: bool, training: bool, device: str) -> Form:
    """Return the form that is predicted to be faster on a device (`cpu`, `cuda`, ..)."""
    block = block_bytes(device, long=max(axis.size for axis in grid.axes) >= LONG_AXIS)
    machine = machine_of(device)
    costs = seconds(grid, heads, channels, batch, low=low, training=training, machine=machine, block=block)
    return "dense" if costs["dense"] <= costs["structured"] else "structured"


@functools.lru_cache
def machine_of(device: str) -> Machine:
    """Return the constants of a device: measured ones if available, otherwise defaults."""
    default = asdict(Machine() if device == "cpu" else GPU)
    found = _known().get(device, {})
    return Machine(**({name: found[name] for name in default} if found.keys() >= default.keys() else default))


def calibration_file() -> Path:
    """Return the path of the measured constants: `attnconv/machine.json` in `$XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "attnconv" / "machine.json"


def calibrate(device: str = "cpu") -> Machine:
    """Measure the constants of a device, which takes about two seconds."""
    from torch.utils.benchmark import Timer  # a slow import (0.1 s) that layers do not need

    def measured(call: Callable[..., Tensor], *inputs: Tensor | int) -> float:
        timer = Timer("call(*inputs)", globals={"call": call, "inputs": inputs}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange().median

    rates = {}
    for prefix, dtype in (("", torch.float32), ("low_", torch.bfloat16)):
        large = torch.randn(768, 768, device=device).to(dtype)
        small = torch.rand(288, 32, 32, device=device).to(dtype)
        images = torch.randn(288, 32, 64, device=device).to(dtype)
        rates[f"{prefix}product"] = 2 * 768**3 / measured(torch.mm, large, large)
        rates[f"{prefix}thin"] = 2 * 288 * 32 * 32 * 64 / measured(torch.bmm, small, images)
    much, little = torch.randn(2**23, device=device), torch.randn(16, device=device)
    return Machine(**rates, memory=2 * 4 * 2**23 / measured(torch.clone, much), call=measured(torch.add, little, 1))


def keep(machine: Machine, device: str = "cpu") -> Path:
    """Save measured constants and use them in this process and later ones."""
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**_known(), device: asdict(machine)}, indent=2) + "\n"
    write_atomically(path, text.encode())  # other processes may be reading it
    machine_of.cache_clear()
    fastest.cache_clear()
    return path


def _known() -> dict[str, dict[str, float]]:
    """Return the measured constants of all devices; empty if the file is missing or invalid."""
    try:
        return msgspec.json.decode(calibration_file().read_bytes(), type=dict[str, dict[str, Positive]])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
