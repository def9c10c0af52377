"""Tests of the encodings in docs/own-encoding.md with the operator tests of `tests/laws.py`."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnconv import Quadratic, SelfAttention2d
from attnconv.encodings import Encoding
from attnconv.explorer.payload_layers import position_tensors
from attnconv.surgery import degenerate_heads, prune_heads
from attnconv.theory import error_bound
from attnconv.training.run_recorder import head_record
from tests.laws import CHANNELS, HEADS, LAYOUTS, Layout, by_encoding, contracted, images
from tests.tolerances import tolerance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-encoding.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return the names defined by the code of the page."""
    parser, names = doctest.DocTestParser(), {}  # type: ignore[var-annotated]
    for example in parser.get_examples(PAGE.read_text()):
        exec(compile(example.source, str(PAGE), "single"), names)
    return names


@pytest.mark.parametrize("name", ["LinearDecay", "Ring", "Oval"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_laws_accept_it(page: dict[str, Any], name: str, layout: Layout) -> None:
    maker = by_encoding(lambda dims: page[name](HEADS, dims))
    grid, weight = layout.grid(), torch.randn(HEADS, CHANNELS, 5, dtype=torch.float64)
    operator, leaves = maker(grid, torch.float64, 2)
    x = images(grid, torch.float64, 2).requires_grad_()
    out, expected = operator.contract(x, weight), contracted(operator, x, weight)
    torch.testing.assert_close(out, expected, **tolerance(torch.float64, scale=10))
    total = operator.to_dense().sum(-1) + operator.padding_mass(torch.arange(grid.query_count))
    torch.testing.assert_close(total, torch.ones_like(total), **tolerance(torch.float64))
    for got, wanted in zip(
        torch.autograd.grad(out.sum(), [x, *leaves], retain_graph=True),
        torch.autograd.grad(expected.sum(), [x, *leaves]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, **tolerance(torch.float64, scale=100))


@pytest.fixture
def twins(page: dict[str, Any]) -> tuple[Encoding, Quadratic]:
    """Return an encoding of the page and an equal `Quadratic` encoding."""
    mine, ours = page["Oval"](HEADS), Quadratic(HEADS, diagonal=True)
    with torch.no_grad():
        mine.spread.copy_(torch.linspace(0.5, 3, HEADS)[:, None])
        ours.centres.copy_(mine.centres)
        ours.spread.copy_(mine.inverse_widths())
    return mine, ours


def test_gaussian_heads_are_treated_as_our_own(twins: tuple[Encoding, Quadratic]) -> None:
    torch.manual_seed(0)
    layers = [SelfAttention2d(3, 4, HEADS, encoding=encoding) for encoding in twins]
    layers[0].load_state_dict({**layers[0].state_dict(), "weight": layers[1].weight, "bias": layers[1].bias})
    bounds, records, payloads = [], [], []
    for layer in layers:
        bounds.append(error_bound(layer, -1.0, 1.0))
        records.append(head_record(nn.Sequential(layer), 0))
        payloads.append(position_tensors(layer.encoding, (5, 6)))
    torch.testing.assert_close(bounds[0], bounds[1])
    assert records[0] == records[1]
    assert payloads[0].keys() == payloads[1].keys() == {"centres", "precision"}
    for name, tensor in payloads[0].items():
        torch.testing.assert_close(tensor, payloads[1][name])
    with torch.no_grad():
        twins[0].get_parameter("spread")[1] = 0
    assert degenerate_heads(layers[0]) == (1,)
    pruned = prune_heads(layers[0], {"": [1]})
    x = torch.randn(2, 3, 6, 7)
    assert layers[0].weight is not None
    with torch.no_grad():
        layers[0].weight[1] = 0
        torch.testing.assert_close(pruned(x), layers[0](x), **tolerance(torch.float32))


def test_hard_heads_are_shifts_and_keep_zero_gradients(twins: tuple[Encoding, Quadratic]) -> None:
    layer = SelfAttention2d(3, 4, HEADS, encoding=twins[0])
    assert layer.plan((8, 8)) == "structured" or layer.hard_shifts() is None
    with torch.no_grad():
        twins[0].get_parameter("centres").round_()
        twins[0].get_parameter("spread").fill_(20)
    assert layer.plan((8, 8)) == "shift"
    x = torch.randn(1, 3, 8, 8)
    out = layer(x)
    out.sum().backward()
    centres = twins[0].get_parameter("centres")
    assert centres.grad is not None
    assert torch.equal(centres.grad, torch.zeros_like(centres))
    layer.unplan()
    torch.testing.assert_close(out, layer(x), **tolerance(torch.float32, scale=10))
