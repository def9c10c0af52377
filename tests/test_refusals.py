"""Arguments of the wrong type raise an error that names them, instead of an error from inside the library."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from attnconv import SelfAttention2d, from_conv, to_conv
from attnconv._util.value_checks import indices, is_index, is_real, whole
from attnconv.convert import compare, low_rank
from attnconv.encodings import Quadratic
from attnconv.inspect import attention_operators, audit, visit_attention
from attnconv.layers import fuse_convit
from attnconv.models.checkpoint import Checkpoint, load_weights
from attnconv.models.classifiers import build
from attnconv.models.settings import AttentionSettings
from attnconv.surgery import condition_numbers, initialize, prune_heads, replace_heads

IMAGES = torch.randn(2, 3, 6, 6)
SETTINGS = AttentionSettings(layers=1, heads=2, width=8, mlp_width=8)


def layer() -> SelfAttention2d:
    return SelfAttention2d(3, 4, 3)


def visit(**arguments: object) -> None:
    visit_attention(**{"model": layer(), "images": IMAGES, "visit": print, **arguments})  # type: ignore[arg-type]


def broken() -> SelfAttention2d:
    made = SelfAttention2d(3, 4, 3, encoding="learned-content")
    nn.init.constant_(made.encoding.get_parameter("query.weight"), torch.nan)
    return made


REFUSED: dict[str, Callable[[], object]] = {
    r"model: .*got str": lambda: audit("vit", IMAGES),  # type: ignore[arg-type]
    r"model: .*got type": lambda: attention_operators(nn.Linear, IMAGES),  # type: ignore[arg-type]
    r"model: .*got int": lambda: replace_heads(3, IMAGES, count=1),  # type: ignore[type-var]
    r"model: .*got float": lambda: initialize(0.5),  # type: ignore[arg-type]
    r"model: .*got list": lambda: fuse_convit([]),  # type: ignore[arg-type]
    r"model: .*got dict": lambda: prune_heads({}, {}),  # type: ignore[type-var]
    r"recast: .*got NoneType": lambda: compare(nn.Linear(1, 1), None, IMAGES),  # type: ignore[arg-type]
    r"model\.: operator: .*got NaN": lambda: audit(broken(), IMAGES),
    r"images: .*got str": lambda: attention_operators(layer(), "cat"),  # type: ignore[arg-type]
    r"images: .*got a batch of shape \(2, 2, 6, 6\)": lambda: attention_operators(layer(), IMAGES[:, :2]),
    r"visit: .*got int": lambda: visit(visit=0),
    r"unreadable: .*got complex": lambda: visit(unreadable=1j),
    r"grid: .*got 'model'": lambda: visit(grid="model"),
    r"prefix: .*got -1": lambda: visit(prefix=-1),
    r"layers: .*got 3": lambda: visit(layers=3),
    r"layers: .*got \[\[0\]\]": lambda: visit(layers=[[0]]),
    r"options: .*got \{0: 0\}": lambda: visit(options={0: 0}),
    r"batch: .*got 9223372036854775808": lambda: audit(layer(), IMAGES, batch=2**63),
    r"heads: .*got 3": lambda: prune_heads(layer(), 3),  # type: ignore[arg-type]
    r"heads\[''\]: .*got None": lambda: prune_heads(layer(), {"": None}),  # type: ignore[dict-item]
    r"attention: .*got .*meta": lambda: condition_numbers(Quadratic(3).to("meta")),
    r"checkpoint: .*got dict": lambda: load_weights(build(SETTINGS), {}),  # type: ignore[arg-type]
    r"model: .*got LazyLinear": lambda: load_weights(nn.LazyLinear(2), Checkpoint({}, SETTINGS)),
    r"x: .*got bytes": lambda: to_conv(layer(), 3, x=b"0"),  # type: ignore[arg-type]
    r"x: .*got shape \(3, 6, 6\)": lambda: to_conv(layer(), 3, x=IMAGES[0]),
    r"x: .*got a tensor on the meta device": lambda: to_conv(layer(), 3, x=IMAGES.to("meta")),
    r"layer: .*got a layer on the meta device": lambda: to_conv(layer().to("meta")),
    r"kernel_size: .*got \(99, 99\)": lambda: to_conv(layer(), 99, x=IMAGES),
    r"layer: .*meta": lambda: low_rank(layer().to("meta"), 2),
    r"alpha: .*got 1000": lambda: from_conv(nn.Conv2d(1, 1, 1), alpha=10**400),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_argument_is_refused_by_name(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        REFUSED[message]()


def test_weights_that_are_not_finite_are_not_factored() -> None:
    bad = layer()
    nn.init.constant_(bad.get_parameter("weight"), torch.nan)
    with pytest.raises(ValueError, match=r"weight: .*got NaN"):
        low_rank(bad, 2)


def test_what_counts_as_a_number() -> None:
    assert is_index(3)
    assert is_index(torch.tensor(3).numpy())
    assert not any(is_index(value) for value in (True, int, 0.5, torch.zeros(2, 2, dtype=torch.int64), "3"))
    assert not any(is_real(value) for value in (10**400, float("nan"), float("-inf"), True, "1"))
    assert is_real(10**300)
    with pytest.raises(ValueError, match=r"count: .*got 9223372036854775808"):
        whole("count", 2**63, 0)


def test_indices_are_whole_numbers_below_a_count() -> None:
    assert indices("heads", iter([2, torch.tensor(0).numpy(), 2]), 3) == [2, 0]
    for wrong, shown in ((3, "3"), ([3], r"\[3\]"), ([-1], r"\[-1\]"), ([True], r"\[True\]"), ("0", r"\['0'\]")):
        with pytest.raises(ValueError, match=rf"heads: .*got {shown}"):
            indices("heads", wrong, 3)
