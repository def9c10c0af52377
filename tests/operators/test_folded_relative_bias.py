"""Tests of the folded form for GPUs on a CPU: values, gradients and accuracy in half precision."""

import pytest
import torch
from torch import Tensor

from attnconv.operators.content import attend, attend_folded, attend_plainly
from tests.tolerances import tolerance

DOUBLE = torch.float64


def problem(sizes: tuple[int, ...], dtype: torch.dtype = DOUBLE, *, shared: bool = False) -> list[Tensor]:
    """Return queries, keys, values and biases. If `shared`, images share queries and biases, heads keys and values."""
    lattice, few, heads = torch.Size(sizes).numel(), 1 if shared else 2, 1 if shared else 3
    tensors = [
        torch.randn(few, 3, 7, 4),
        torch.randn(2, heads, lattice, 4),
        torch.randn(2, heads, lattice, 20),
        *(torch.randn(few, 3, 7, size) for size in sizes),
    ]
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_keep_their_digits_in_half_precision(dtype: torch.dtype) -> None:
    """With biases only and scores above 100, rounding to bfloat16 would cause errors of at least 0.25."""
    queries, keys, values = (part.to(dtype) for part in problem((4, 5))[:3])
    biases = [100 + 2 * torch.randn(2, 3, 7, size) for size in (4, 5)]
    exact = attend_plainly(0 * queries.float(), keys.float(), values.float(), *biases)
    out = attend_folded(0 * queries, keys, values, *biases)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, **tolerance(torch.bfloat16))
    rounded = attend_plainly(0 * queries.float(), keys.float(), values.float(), *(b.bfloat16().float() for b in biases))
    assert float((rounded - exact).abs().max()) > 0.1


def test_the_gradient_of_a_folded_bias_is_whole() -> None:
    """Exactly one of the two parts of a bias has its gradient."""
    inputs = problem((4, 5), torch.float32)
    biases = [part.requires_grad_() for part in inputs[3:]]
    half = [part.bfloat16() for part in inputs[:3]]
    expected, out = attend_plainly(*(part.float() for part in half), *biases), attend_folded(*half, *biases)
    g = torch.randn_like(expected).bfloat16()
    wanted = torch.autograd.grad(expected, biases, g.float())
    for got, want in zip(torch.autograd.grad(out, biases, g), wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, **tolerance(torch.bfloat16, scale=2))  # the kernel's backward is bfloat16


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_derivatives_of_the_folded_form_beyond_the_first(sizes: tuple[int, ...]) -> None:
    """Fused kernels do not support second derivatives, so they are computed from all scores."""
    inputs = [tensor.requires_grad_() for tensor in problem(sizes)]
    assert torch.autograd.gradgradcheck(attend_folded, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(attend_folded, inputs, fast_mode=True, check_forward_ad=True)
    many = torch.stack([inputs[0], 2 * inputs[0]])
    each = torch.func.vmap(lambda one: attend_folded(one, *inputs[1:]))(many)
    torch.testing.assert_close(each[1], attend_plainly(many[1], *inputs[1:]), **tolerance(DOUBLE))
    out, g = attend_folded(*inputs), torch.randn(2, 2, 3, 7, 20, dtype=DOUBLE)
    together = torch.autograd.grad(out, inputs[:2], g, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(out, inputs[:2], g[1], retain_graph=True)
    for many, one in zip(together, alone, strict=True):
        torch.testing.assert_close(many[1], one, **tolerance(DOUBLE))


def test_a_second_backward_pass_and_wanted_gradients_alone() -> None:
    inputs = problem((2, 5))
    inputs[3].requires_grad_()
    out = attend_folded(*inputs)
    g = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, inputs[3], g, retain_graph=kept)[0] for kept in (True, False))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs[3], g)
    with torch.no_grad():
        assert not attend_folded(*inputs).requires_grad


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_with_fused_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, shared: bool) -> None:
    inputs = [tensor.requires_grad_() for tensor in problem((4, 5), torch.float32, shared=shared)]
    queries, keys, values, *biases = inputs
    expected, g = attend_plainly(*inputs), torch.randn(2, 3, 7, 20)
    wanted = torch.autograd.grad(expected, inputs, g)
    monkeypatch.setattr("attnconv.operators.content.FUSED_ON", ("cpu",))
    out = attend(queries, keys.to(dtype), values.to(dtype), biases)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, **tolerance(dtype))
    for got, want in zip(torch.autograd.grad(out, inputs, g.to(dtype)), wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance(dtype, scale=5))


@pytest.mark.gpu
@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("sizes", [(14, 14), (12, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpus_kernels_agree(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    count = torch.Size(sizes).numel()
    tensors = [*torch.randn(3, 2, 3, count, 24).to(dtype).unbind(), *(torch.randn(2, 3, count, size) for size in sizes)]
    inputs = [tensor.requires_grad_() for tensor in tensors]
    expected = attend_plainly(*(tensor.double() for tensor in inputs))
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, g)
    there = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    for out in (attend_folded(*there), attend(there[0], there[1], there[2], there[3:])):
        torch.testing.assert_close(out.cpu().double(), expected, **tolerance(dtype))
        for got, want in zip(torch.autograd.grad(out, there, g.to(out)), wanted, strict=True):
            # Products in the dtype of the inputs are summed over hundreds of queries.
            torch.testing.assert_close(got.cpu(), want, **tolerance(dtype, scale=5))
