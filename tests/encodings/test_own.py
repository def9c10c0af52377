"""The encodings of docs/own-encoding.md: the laws accept them unchanged."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws import CHANNELS, HEADS, LAYOUTS, Layout, by_encoding, contracted, images
from tests.tolerances import tolerance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-encoding.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code defines."""
    parser, names = doctest.DocTestParser(), {}  # type: ignore[var-annotated]
    for example in parser.get_examples(PAGE.read_text()):
        exec(compile(example.source, str(PAGE), "single"), names)
    return names


@pytest.mark.parametrize("name", ["LinearDecay", "Ring"])
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
