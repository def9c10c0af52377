"""Tests of Kronecker contractions: all splits into blocks, tiles and bands equal the plain products and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnconv import Quadratic, SelfAttention2d
from attnconv.grid import BORDERS, Border, Grid
from attnconv.operators import Kronecker
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import contract_rows
from attnconv.operators.kernels.kronecker_long_axes import contract_long, pull_long, strips
from attnconv.operators.kronecker import contract_factors, contract_plainly
from tests.tolerances import tolerance

DOUBLE = torch.float64
SHAPES = [((7,), (7,)), ((6, 5), (6, 5)), ((5, 6), (3, 7)), ((4, 3, 5), (4, 2, 5))]  # sizes, queries


def problem(
    sizes: tuple[int, ...],
    queries: tuple[int, ...],
    *,
    batch: int = 3,
    band: bool = True,
    outputs: int = 5,
    groups: int = 1,
) -> list[Tensor]:
    """Return images of 4 channels, weights and factors; factors have zeros in every row, and one row is all zeros."""
    x, weight = torch.randn(batch, *sizes, 4), torch.randn(3, 4 // groups, outputs)
    factors = [torch.rand(3, n, m) for n, m in zip(queries, sizes, strict=True)]
    if band:
        for factor in factors:
            places = torch.arange(factor.shape[2]) - torch.arange(factor.shape[1])[:, None]
            for head, (low, high) in enumerate(((-1, 1), (0, 0), (-9, 2))):
                factor[head] *= (places >= low) & (places <= high)
        factors[0][0, -1] = 0
    return [part.to(DOUBLE).requires_grad_() for part in (x, weight, *factors)]


def check(inputs: list[Tensor], dtype: torch.dtype = DOUBLE) -> None:
    x, weight, *factors = inputs
    fast, slow = contract_factors(x, weight, factors), contract_plainly(x, weight, *factors)
    torch.testing.assert_close(fast, slow, **tolerance(dtype, scale=10))
    check_gradients(fast, slow, inputs, dtype)


def check_gradients(fast: Tensor, slow: Tensor, inputs: list[Tensor], dtype: torch.dtype = DOUBLE) -> None:
    chosen, g = [tensor for tensor in inputs if tensor.requires_grad], torch.randn_like(slow)
    grads = zip(torch.autograd.grad(fast, chosen, g), torch.autograd.grad(slow, chosen, g), strict=True)
    for tensor, (got, expected) in zip(chosen, grads, strict=True):
        factor = any(tensor is each for each in inputs[2:])
        held = (tensor != 0).to(DOUBLE) if factor else 1.0  # a softmax propagates no gradient to zeros of a factor
        torch.testing.assert_close(got * held, expected * held, **tolerance(dtype, scale=10))


@pytest.mark.parametrize(("sizes", "queries"), SHAPES)
@pytest.mark.parametrize("block", [1, 1200, 2**24])
@pytest.mark.parametrize("axis", [1, 6, 96])
@pytest.mark.parametrize("strip", [2, 256])
def test_every_split_equals_the_plain_products(
    sizes: tuple[int, ...], queries: tuple[int, ...], block: int, axis: int, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sizes, "STRIP", strip)
    monkeypatch.setattr(block_sizes, "KRONECKER_BLOCK", block)
    monkeypatch.setattr(block_sizes, "LEAST_ROWS", 2)
    monkeypatch.setattr(block_sizes, "LONG_AXIS", axis)
    monkeypatch.setattr(block_sizes, "BAND_TILE", 2)
    monkeypatch.setattr(block_sizes, "LEAST_COLUMNS", 2)
    for outputs in (5, 3):  # mixing before projection; projection before mixing
        for band in (True, False):
            check(problem(sizes, queries, band=band, outputs=outputs))
    for outputs in (6, 2):
        check(problem(sizes, queries, outputs=outputs, groups=2))


class Largest(TorchDispatchMode):
    """Record the bytes of the largest storage returned by an operation, except storages that existed before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("sizes", "channels", "outputs"),
    [((192,), 2, 2), ((192,), 1, 60), ((6, 160), 2, 3), ((128, 5), 2, 2), ((3, 4, 128), 2, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_outgrows_a_block_and_the_inputs(
    sizes: tuple[int, ...], channels: int, outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For long axes and few channels, the summands of the factors' gradients are larger than the mixed values."""
    monkeypatch.setattr(block_sizes, "KRONECKER_BLOCK", 2**17)
    x, weight = torch.randn(40, *sizes, channels).to(dtype), torch.randn(3, channels, outputs).to(dtype)
    factors = [torch.rand(3, size, size).to(dtype) for size in sizes]
    with Largest(x, weight, *factors) as forward:
        out = contract_long(x, weight, *factors)
    gradient, inputs = torch.randn_like(out), (x, weight, *factors)
    with Largest(*inputs, gradient) as backward:
        pull_long(inputs, gradient, [True] * len(inputs))
    exact = [4 * tensor.numel() for tensor in (*inputs, out)]  # sums are in float32
    assert forward.bytes <= max(2**17, *exact)
    assert backward.bytes <= max(2**17, *exact)


@pytest.mark.parametrize(("keys", "channels", "outputs"), [(40, 6, 6), (40, 6, 3), (4, 20, 20)])
def test_rows_for_all_images_have_no_gradient_of_each_image_where_there_are_more_keys_than_channels(
    keys: int, channels: int, outputs: int
) -> None:
    batch, heads = 16, 3
    rows = torch.rand(1, heads, keys, keys, requires_grad=True)
    x, weight = torch.randn(batch, keys, channels), torch.randn(heads, channels, outputs)
    with Largest(rows, x, weight) as largest:
        contract_rows(rows, x, weight, 1).sum().backward()
    assert largest.bytes <= 4 * max(rows.numel(), batch * heads * keys * channels)


@pytest.fixture(params=["short", "long"])
def axes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Short axes use large products; long axes use bands, tiles and strips for each head."""
    if request.param == "long":
        monkeypatch.setattr(block_sizes, "LONG_AXIS", 1)
        monkeypatch.setattr(block_sizes, "BAND_TILE", 2)
        monkeypatch.setattr(block_sizes, "STRIP", 2)
        monkeypatch.setattr(block_sizes, "KRONECKER_BLOCK", 2**10)
    return str(request.param)


@pytest.mark.parametrize("outputs", [5, 3])
@pytest.mark.parametrize("wanted", range(16))
def test_only_the_gradients_that_are_wanted(wanted: int, outputs: int, axes: str) -> None:
    inputs = problem((4, 5), (4, 5), outputs=outputs, band=axes == "long")
    assert block_sizes.are_short(inputs[2:]) == (axes == "short")
    for bit, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> bit & 1))
    chosen = [tensor for tensor in inputs if tensor.requires_grad]
    out, expected = contract_factors(inputs[0], inputs[1], inputs[2:]), contract_plainly(*inputs)
    assert out.requires_grad == bool(chosen)
    if chosen:
        check_gradients(out, expected, inputs)


@pytest.mark.parametrize("outputs", [5, 3])
def test_second_and_forward_derivatives(outputs: int) -> None:
    inputs = problem((3, 2), (3, 2), batch=1, outputs=outputs)

    def run(*values: Tensor) -> Tensor:
        return contract_factors(values[0], values[1], values[2:])

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_vmap_over_any_input() -> None:
    x, weight, *factors = problem((3, 4), (3, 4))
    many = torch.stack([factors[0], 2 * factors[0]])
    got = torch.func.vmap(lambda one: contract_factors(x, weight, [one, factors[1]]))(many)
    torch.testing.assert_close(got[1], contract_plainly(x, weight, many[1], factors[1]))
    got = torch.func.vmap(lambda one: contract_factors(one[None], weight, factors)[0])(x)
    torch.testing.assert_close(got, contract_plainly(x, weight, *factors))


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("far", [False, True])
def test_long_images_of_local_wide_and_far_heads(border: Border, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "STRIP", 35)
    monkeypatch.setattr(block_sizes, "LONG_AXIS", 16)
    monkeypatch.setattr(block_sizes, "BAND_TILE", 8)
    monkeypatch.setattr(block_sizes, "KRONECKER_BLOCK", 16000)
    encoding = Quadratic(4, 2).double()
    with torch.no_grad():
        encoding.centres.copy_(torch.tensor([[0.0, 0.3], [3.0, -40.0], [0.0, 0.0], [-2.5, 90.0]]))
        encoding.spread.copy_(torch.tensor([[1.0], [2.0], [0.02], [9.0]]))
        if not far:  # all heads are local, so the image is split into strips
            encoding.centres.clamp_(-1, 1)
            encoding.spread.clamp_min_(5.0)
    grid = Grid.make((20, 140), padding=3, border=border)
    x = torch.randn(2, 20, 140, 3, dtype=DOUBLE, requires_grad=True)
    operator = encoding.operator(grid, x)
    assert isinstance(operator, Kronecker)
    weight = torch.randn(4, 3, 4, dtype=DOUBLE, requires_grad=True)
    inputs = [x, weight, *encoding.parameters()]
    fast = operator.contract(x, weight)
    whole = far or border == "circular"  # the first columns attend to the last keys
    assert (len(strips(operator.factors)) == 1) == whole
    slow = contract_plainly(x, weight, *operator.factors)
    torch.testing.assert_close(fast, slow, **tolerance(DOUBLE))
    for got, want in zip(
        torch.autograd.grad(fast.square().sum(), inputs, retain_graph=True),
        torch.autograd.grad(slow.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("axes")
def test_low_precision_and_autocast(dtype: torch.dtype) -> None:
    layer = SelfAttention2d(8, 8, 4, backend="structured")
    x = torch.randn(2, 8, 9, 7, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = layer(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    exact = SelfAttention2d(8, 8, 4, backend="structured", dtype=DOUBLE)
    exact.load_state_dict(layer.state_dict())
    expected = exact(x.detach().double())
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype, scale=2))
    expected.square().sum().backward()
    for name, parameter in exact.named_parameters():
        got = found[name]
        assert got is not None
        assert parameter.grad is not None
        error = (got.double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2)
