"""Tests of the operator contract for all registered operators, border rules, strides and sizes."""

import copy
import random

import pytest
import torch

from attnconv.encodings import ENCODING_NAMES
from attnconv.operators import AttentionOperator, Dense
from attnconv.operators.base import all_queries
from tests.drawn_recasts import MEMORY, dirty_memory, laid_out
from tests.laws import CASES, CHANNELS, HEADS, NARROW, OPERATORS, Layout, contracted, contracted_by, images
from tests.tolerances import tolerance

every_operator = pytest.mark.parametrize("name", list(OPERATORS))
every_case = pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
DOUBLE = torch.float64


@every_case
def test_contract_and_apply_equal_the_dense_matrix(name: str, layout: Layout) -> None:
    for batch in (1, 3):
        grid = layout.grid()
        operator, _ = OPERATORS[name](grid, DOUBLE, batch)
        matrix = operator.to_dense()
        assert matrix.shape == (operator.batch, HEADS, grid.query_count, grid.key_count)
        assert operator.batch in (1, batch)
        x = images(grid, DOUBLE, batch)
        for outputs, groups in ((2 * CHANNELS, 1), (4, 1), (2 * CHANNELS, 2), (6, 3)):
            weight = torch.randn(HEADS, CHANNELS // groups, outputs, dtype=DOUBLE)
            expected = contracted_by(matrix, grid, x, weight, groups)
            torch.testing.assert_close(operator.contract(x, weight, groups), expected, **tolerance(DOUBLE, scale=10))
        values = torch.randn(batch, HEADS, *grid.sizes, 5, dtype=DOUBLE)
        mixed = (matrix @ values.flatten(2, -2)).unflatten(2, grid.query_sizes)
        torch.testing.assert_close(operator.apply(values), mixed, **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ENCODING_NAMES])
def test_contract_of_narrow_images_and_few_channels_in_any_memory(name: str, dtype: torch.dtype) -> None:
    """Forward and backward do not depend on strides, which are arbitrary for axes of size 1."""
    for number, layout in enumerate(NARROW):
        source, grid = random.Random(number), layout.grid()
        operator, _ = OPERATORS[name](grid, torch.float32, 2)
        matrix = operator.to_dense().detach().double()
        for channels, outputs, groups in ((1, 1, 1), (1, 2, 1), (3, 1, 1), (8, 8, 8)):
            leaves = [images(grid, dtype, 2, channels), torch.randn(HEADS, channels // groups, outputs).to(dtype)]
            x, weight = (leaf.double().requires_grad_() for leaf in leaves)
            expected = contracted_by(matrix, grid, x, weight, groups)
            wanted = torch.autograd.grad(expected.sum(), [x, weight])
            for memory in MEMORY[:-1]:  # expanded images are equal
                x, weight = (laid_out(leaf.movedim(-1, 1), memory, source).movedim(1, -1) for leaf in leaves)
                dirty_memory()
                out = operator.contract(x.requires_grad_(), weight.requires_grad_(), groups)
                gradient = laid_out(torch.ones_like(out).movedim(-1, 1), memory, source).movedim(1, -1)
                got = torch.autograd.grad(out, [x, weight], gradient)
                for mine, theirs in zip([out, *got], [expected, *wanted], strict=True):
                    torch.testing.assert_close(mine.double(), theirs, **tolerance(dtype, scale=30))  # sums of 30


@every_case
def test_rows_are_probabilities(name: str, layout: Layout) -> None:
    grid = layout.grid()
    operator, _ = OPERATORS[name](grid, DOUBLE, 2)
    matrix, mass = operator.to_dense(), operator.padding_mass(all_queries(grid, operator.device))
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1) + mass, torch.ones_like(mass), **tolerance(DOUBLE))
    if layout.border != "zero":
        torch.testing.assert_close(mass, torch.zeros_like(mass), **tolerance(DOUBLE))
    some = torch.tensor([grid.query_count - 1, 0])
    torch.testing.assert_close(operator.rows(some), matrix[:, :, some], **tolerance(DOUBLE))
    torch.testing.assert_close(operator.padding_mass(some), mass[:, :, some], **tolerance(DOUBLE))


@every_operator
def test_contract_is_linear_and_has_its_adjoint_as_gradient(name: str) -> None:
    grid = Layout((5, 3), "zero", 2).grid()
    operator, _ = OPERATORS[name](grid, DOUBLE, 2)
    x, y = images(grid, DOUBLE, 2).requires_grad_(), images(grid, DOUBLE, 2)
    weight = torch.randn(HEADS, CHANNELS, 7, dtype=DOUBLE)
    out = operator.contract(x, weight)
    torch.testing.assert_close(
        operator.contract(2 * x - y, weight), 2 * out - operator.contract(y, weight), **tolerance(DOUBLE, scale=100)
    )
    z = torch.randn_like(out)
    (adjoint,) = torch.autograd.grad((out * z).sum(), x, retain_graph=True)
    inner = (operator.contract(y, weight) * z).sum()  # <A y, z> = <y, A* z>
    torch.testing.assert_close((y * adjoint).sum(), inner, **tolerance(DOUBLE, scale=100))


@every_operator
def test_gradients_of_everything_are_right(name: str) -> None:
    grid = Layout((3, 2), "zero").grid()
    operator, leaves = OPERATORS[name](grid, DOUBLE, 1)
    x = images(grid, DOUBLE, 1).requires_grad_()
    weight = torch.randn(HEADS, CHANNELS, 2, dtype=DOUBLE, requires_grad=True)
    fast = torch.autograd.grad(
        operator.contract(x, weight).square().sum(), [x, weight, *leaves], retain_graph=True, materialize_grads=True
    )
    slow = torch.autograd.grad(
        contracted(operator, x, weight).square().sum(), [x, weight, *leaves], materialize_grads=True
    )
    for got, expected in zip(fast, slow, strict=True):
        torch.testing.assert_close(got, expected, **tolerance(DOUBLE, scale=100))
    assert torch.autograd.gradcheck(operator.contract, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(operator.contract, (x, weight), fast_mode=True)


@every_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_and_device_are_kept(name: str, dtype: torch.dtype) -> None:
    grid = Layout((4, 3), "circular").grid()
    operator, _ = OPERATORS[name](grid, torch.promote_types(dtype, torch.float32), 2)
    out = operator.contract(images(grid, dtype, 2), torch.randn(HEADS, CHANNELS, 4).to(dtype))
    assert out.dtype == dtype
    assert out.device == operator.device
    assert operator.to_dense().dtype == torch.promote_types(dtype, torch.float32)


@every_operator
def test_deepcopy_and_dense_of_keep_the_values(name: str) -> None:
    grid = Layout((4, 3), "zero").grid()
    with torch.no_grad():
        operator, _ = OPERATORS[name](grid, DOUBLE, 2)
        for leaf, value in vars(operator).items():
            if isinstance(value, torch.Tensor):
                setattr(operator, leaf, value.detach())
    detached = _detached(operator)
    torch.testing.assert_close(copy.deepcopy(detached).to_dense(), operator.to_dense())
    stored = Dense.of(operator)
    torch.testing.assert_close(stored.to_dense(), operator.to_dense())
    every = all_queries(grid, operator.device)
    torch.testing.assert_close(stored.padding_mass(every), operator.padding_mass(every))


def _detached(operator: AttentionOperator) -> AttentionOperator:
    """Only leaves can be copied, so compare with the same operator without history."""
    for name, value in vars(operator).items():
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            setattr(operator, name, tuple(part.detach() for part in value))
    return operator


@pytest.mark.parametrize("name", ["dense", "kronecker", "shift", "toeplitz", "content"])
def test_queries_outside_the_grid_are_refused(name: str) -> None:
    operator, _ = OPERATORS[name](Layout((2, 3), "zero").grid(), DOUBLE, 1)
    with pytest.raises(ValueError, match=r"queries: .*got values from 0 to 6"):
        operator.rows(torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"queries: .*got values from -1 to 0"):
        operator.padding_mass(torch.tensor([-1, 0]))
