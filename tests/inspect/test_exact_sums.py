"""Sums in twice the precision of float64."""

import math

import pytest
import torch

from attnconv.inspect.exact_sums import ExactSum


@pytest.mark.parametrize("least", [1e-1, 1e-8, 1e-25])
def test_sums_in_any_order_and_grouping_are_correctly_rounded(least: float) -> None:
    terms = torch.rand(200, 5, dtype=torch.float64) * least ** torch.rand(200, 5, dtype=torch.float64)
    expected = [math.fsum(column) for column in terms.T.tolist()]
    for parts in (1, 2, 7):
        sums = [ExactSum.of(torch.zeros(5, dtype=torch.float64)) for _ in range(parts)]
        for index in torch.randperm(len(terms)).tolist():
            sums[index % parts] += ExactSum.of(terms[index])
        assert sum(sums[1:], sums[0]).value().tolist() == expected
    assert terms.sum(0).tolist() != expected  # a plain sum is not
