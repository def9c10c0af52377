"""Hostile calls: invalid arguments of every kind for functions that read or change a model.

A call either succeeds, or raises a `ValueError` or `TypeError` that names one of its arguments (or a module of the
model) and leaves the model unchanged bit for bit. Both happen within a time limit.
"""

import copy
import inspect
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import nn

from attnconv import SelfAttention2d, from_conv, recast, restore, to_conv
from attnconv.convert import compare, low_rank, place_heads, plan_shifts
from attnconv.encodings import GeneralizedQuadratic, Quadratic
from attnconv.encodings.quadratic import start_at_neighbours
from attnconv.inspect import attention_operators, audit, visit_attention
from attnconv.layers import fuse_convit
from attnconv.models.checkpoint import Checkpoint, load_weights
from attnconv.models.classifiers import build
from attnconv.models.settings import AttentionSettings
from attnconv.surgery import (
    condition_numbers,
    degenerate_heads,
    initialize,
    prune_heads,
    replace_heads,
)
from experiments.small_vit import SmallViT
from tests.layers.test_gated_positional import StandIn
from tests.model_state import model_state

CALLS = 3000  # at full scale
SECONDS = 20.0  # limit per call; the slowest need about one second
SETTINGS = AttentionSettings(layers=1, heads=2, width=8, mlp_width=8)


def vit() -> nn.Module:
    return SmallViT(size=16, dim=24, num_heads=2, depth=1)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))


def layers() -> nn.Module:
    return nn.Sequential(SelfAttention2d(3, 4, 3), SelfAttention2d(4, 4, 2))


def images(*, size: int = 16) -> torch.Tensor:
    return torch.randn(4, 3, size, size)


def checkpoint() -> Checkpoint:
    return Checkpoint(
        {name: torch.ones_like(tensor) for name, tensor in build(SETTINGS).state_dict().items()}, SETTINGS
    )


def watched(_name: str, operator: Any) -> None:
    operator.rows(torch.tensor([0]))


# Valid arguments of each function. Other arguments have their defaults unless they are made hostile.
GOOD: dict[Callable[..., object], Callable[[], dict[str, Any]]] = {
    audit: lambda: {"model": vit(), "images": images()},
    replace_heads: lambda: {"model": vit(), "images": images(), "count": 1},
    initialize: lambda: {"model": vit(), "images": images()},
    visit_attention: lambda: {"model": vit(), "images": images(), "visit": watched},
    attention_operators: lambda: {"model": vit(), "images": images()},
    recast: lambda: {"model": cnn()},
    restore: lambda: {"model": recast(cnn())},
    plan_shifts: lambda: {"model": recast(cnn())},
    compare: lambda: {"model": cnn().eval(), "recast": recast(cnn()), "inputs": images(size=6)},
    prune_heads: lambda: {"model": layers(), "heads": {"0": [1]}},
    degenerate_heads: lambda: {"attention": GeneralizedQuadratic(3)},
    condition_numbers: lambda: {"attention": Quadratic(3)},
    fuse_convit: lambda: {"model": nn.Sequential(StandIn())},
    load_weights: lambda: {"model": build(SETTINGS), "checkpoint": checkpoint()},
    start_at_neighbours: lambda: {"encoding": Quadratic(4)},
    from_conv: lambda: {"conv": nn.Conv2d(2, 3, 3)},
    to_conv: lambda: {"layer": SelfAttention2d(2, 3, 4), "kernel_size": 3, "x": torch.randn(1, 2, 5, 5)},
    low_rank: lambda: {"layer": SelfAttention2d(3, 4, 3), "head_channels": 2},
    place_heads: lambda: {"conv": nn.Conv1d(1, 1, 3), "heads": 1, "restarts": 0},
}

PASSES_ON = {visit_attention, compare}  # these pass on errors of the model and of the user's functions


def plain_values() -> list[Any]:
    """Return values of every kind except tensors and modules."""
    numbers = [True, -1, 0, 1, 2, 3, 99, 2**63, 10**400, 0.5, -0.0, 1e30, 1e-300, float("nan"), float("inf"), 1j]
    words = ["", "abc", "model", "0", b"0", "\x00"]
    lists = [[], (), {}, set(), [None], ["abc"], [-1], [0, 0], [0.5], [[0]], {"0": [0]}, {"": None}, {0: 0}, range(3)]
    others = [
        None,
        object(),
        torch.float8_e4m3fn,
        torch.device("meta"),
        lambda *_: None,
        iter([0]),
    ]
    return [*numbers, *words, *lists, *others]


def tensors(good: torch.Tensor) -> list[Any]:
    """Return variants of a valid tensor."""
    with torch.inference_mode():
        inference = good.clone()
    dtypes = (torch.float64, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool)
    broken = good.clone()
    broken.view(-1)[-1] = torch.nan
    return [
        *(good.to(dtype) for dtype in dtypes),
        broken,
        good * 1e38,
        good * torch.inf,
        good * 1e-42,
        torch.zeros_like(good),
        good[:0],
        good[:1],
        good[..., :0],
        good[..., :1],
        good[..., 1:],
        good[:, :1],
        good[0],
        good[None],
        good.flatten(),
        good.sum(),
        good.to("meta"),
        good.to_sparse(),
        good.mT,
        good[:1].expand(4, *good.shape[1:]),
        good.clone().requires_grad_(),
        inference,
        good.numpy(),
    ]


def failing(*_: object) -> None:
    raise RuntimeError("a hook of the model's own")


def modules(good: nn.Module) -> list[Any]:
    """Return variants of a valid module."""
    broken, half, frozen, hooked = (copy.deepcopy(good) for _ in range(4))
    for parameter in broken.parameters():
        parameter.data.fill_(torch.nan)
    frozen.requires_grad_(False)
    hooked.register_forward_hook(failing)
    empty = copy.deepcopy(good).to("meta")
    others = [nn.Linear(2, 2), nn.Sequential(), vit(), cnn(), layers(), nn.Identity(), type(good)]
    return [broken, half.half(), frozen, hooked, empty, copy.deepcopy(good).double(), *others]


@final
@dataclass(frozen=True)
class Call:
    """Function and its arguments, of which one or two are hostile."""

    function: Callable[..., object]
    given: dict[str, Any]
    hostile: tuple[str, ...]

    def run(self) -> object:
        positional = [self.given[name] for name in ("model", "recast", "inputs")] if self.function is compare else []
        return self.function(*positional, **({} if positional else self.given))

    def __str__(self) -> str:
        words = {name: re.sub(r"\s+", " ", _shown(self.given[name])) for name in self.hostile}
        return f"{self.function.__name__}({', '.join(f'{name}={word}' for name, word in words.items())})"


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{tuple(value.shape)} {value.dtype} {value.device} {value.layout}>"
    return repr(value)[:100]


def drawn(source: random.Random) -> Call:
    """Return a random call."""
    function = source.choice(list(GOOD))
    given = GOOD[function]()
    parameters = [name for name in inspect.signature(function).parameters if (function, name) != (compare, "inputs")]
    chosen = tuple(source.sample(parameters, min(source.choice((1, 1, 1, 2)), len(parameters))))
    for name in chosen:
        good = given.get(name)
        some: list[Any] = plain_values()
        if isinstance(good, torch.Tensor) and source.random() < 0.7:
            some = tensors(good)
        elif isinstance(good, nn.Module) and source.random() < 0.8:
            some = modules(good)
        elif name == "images":
            some = [*some, *tensors(images())]
        elif name == "filters":
            some = [*some, *tensors(torch.randn(24, 24, 1, 1))]
        given[name] = source.choice(some)
    return Call(function, given, chosen)


def fault(call: Call) -> str | None:
    """Return what is wrong with the outcome of a call, or None."""
    models = [value for value in call.given.values() if isinstance(value, nn.Module)]
    before = [model_state(model) for model in models]
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.run()
    except (ValueError, TypeError) as error:
        names = [*call.given, *call.hostile, *inspect.signature(call.function).parameters]
        names += ["input", *(name for model in models for name, _ in model.named_parameters())]
        names += [name for model in models for name, _ in model.named_modules() if name]
        if not re.match("|".join(rf"(\S+: )?{re.escape(name)}\b" for name in names), str(error)):
            return f"{type(error).__name__} without an argument's name: {error}"
        if [model_state(model) for model in models] != before:
            return "a model that is not what it was"
    except RuntimeError as error:
        if call.function not in PASSES_ON:
            return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - every other exception is a finding
        return f"{type(error).__name__}: {error}"
    took = time.perf_counter() - start
    return None if took < SECONDS else f"{took:.0f} seconds"


@pytest.mark.usefixtures("unhooked")
def test_hostile_calls_work_or_are_refused_by_name(verify_scale: float) -> None:
    explore = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
    seed = time.time_ns() if explore else 0
    source = random.Random(seed)
    torch.manual_seed(seed % 2**63)
    found: dict[str, str] = {}
    for _ in range(round(CALLS * verify_scale)):
        call = drawn(source)
        if (wrong := fault(call)) is not None:
            found.setdefault(str(call), wrong)
    lines = "\n".join(f"{call}: {wrong}" for call, wrong in found.items())
    assert not found, f"{len(found)} calls, seed {seed}:\n{lines}"
