"""The forms for GPUs, as far as a CPU runs them: FlexAttention uncompiled, the folded form, and which one is taken."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from attnconv.operators import fused
from attnconv.operators.biased import attend, attend_plainly
from attnconv.operators.fused import attend_flex, attend_folded, form_of
from tests.tolerances import tolerance

CUDA, DOUBLE = torch.device("cuda"), torch.float64
# torch's compiler asks inputs that are no leaves for their gradient, and torch warns of it.
asks_for_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def problem(sizes: tuple[int, ...], dtype: torch.dtype = DOUBLE, *, shared: bool = False) -> list[Tensor]:
    """Queries, keys, values, biases; shared: one set of queries and biases for both images, of values for all heads."""
    lattice, few = torch.Size(sizes).numel(), 1 if shared else 2
    tensors = [
        torch.randn(few, 3, 7, 4),
        torch.randn(2, 3, lattice, 4),
        torch.randn(2, 1 if shared else 3, lattice, 20),
        *(torch.randn(few, 3, 7, size) for size in sizes),
    ]
    return [tensor.to(dtype) for tensor in tensors]


@pytest.fixture
def gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses them there for want of a compiled kernel; its uncompiled form has them."""
    if not hasattr(torch_flex, "_validate_device"):
        pytest.skip("this torch names its check differently")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize(("sizes", "shared"), [((6,), False), ((2, 5), False), ((3, 2), True)])
def test_flex_equals_the_softmax_of_all_scores(sizes: tuple[int, ...], shared: bool, dtype: torch.dtype) -> None:
    inputs = problem(sizes, dtype, shared=shared)
    out = attend_flex(*inputs)
    assert out.dtype == dtype
    torch.testing.assert_close(out, attend_plainly(*inputs), **tolerance(dtype))


@asks_for_gradients
@pytest.mark.usefixtures("gradients_on_a_cpu")
@pytest.mark.parametrize(("sizes", "shared"), [((6,), False), ((2, 5), False), ((3, 2), True)])
def test_gradients_reach_all_tensors_through_flex(sizes: tuple[int, ...], shared: bool) -> None:
    inputs = [tensor.requires_grad_() for tensor in problem(sizes, shared=shared)]
    expected, out = attend_plainly(*inputs), attend_flex(*inputs)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, g)
    for got, want in zip(torch.autograd.grad(out, inputs, g), wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize("count", [0, 3])
def test_flex_takes_one_bias_or_two(count: int) -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=rf"biases: must be one or two, got {count}\. Use attend_folded"):
        attend_flex(q, q, q, *[torch.zeros(1, 1, 4, 4)] * count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [attend_flex, attend_folded])
def test_biases_keep_their_digits_in_half_precision(form: Any, dtype: torch.dtype) -> None:
    """Scores of a hundred and more, of biases alone: rounded to bfloat16 they would be off by a quarter and more."""
    queries, keys, values = (part.to(dtype) for part in problem((4, 5))[:3])
    biases = [100 + 2 * torch.randn(2, 3, 7, size) for size in (4, 5)]
    exact = attend_plainly(0 * queries.float(), keys.float(), values.float(), *biases)
    out = form(0 * queries, keys, values, *biases)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, **tolerance(torch.bfloat16))
    rounded = attend_plainly(0 * queries.float(), keys.float(), values.float(), *(b.bfloat16().float() for b in biases))
    assert float((rounded - exact).abs().max()) > 0.1


def test_the_gradient_of_a_folded_bias_is_whole() -> None:
    """Of its two parts one carries it: neither both nor none."""
    inputs = problem((4, 5), torch.float32)
    biases = [part.requires_grad_() for part in inputs[3:]]
    half = [part.bfloat16() for part in inputs[:3]]
    expected, out = attend_plainly(*(part.float() for part in half), *biases), attend_folded(*half, *biases)
    g = torch.randn_like(expected).bfloat16()
    wanted = torch.autograd.grad(expected, biases, g.float())
    for got, want in zip(torch.autograd.grad(out, biases, g), wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, **tolerance(torch.bfloat16, scale=2))  # the kernel's backward is bfloat16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "flex"),
        ({"dtype": torch.float16}, "flex"),
        ({"dtype": torch.float32}, "flex"),
        ({"dtype": DOUBLE}, "folded"),
        ({"axes": 1}, "flex"),
        ({"axes": 0}, "folded"),
        ({"axes": 3}, "folded"),
        ({"queries": 127}, "folded"),
        ({"channels": (256, 256)}, "flex"),
        ({"channels": (257, 64)}, "folded"),
        ({"channels": (64, 400)}, "folded"),
        ({"device": torch.device("cpu")}, "blocks"),
        ({"device": torch.device("mps")}, "blocks"),
    ],
)
def test_which_form_is_taken(changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "can_compile", lambda device: True)
    case: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "queries": 128, "axes": 2, "channels": (64, 64)}
    assert form_of(**(case | changes)) == expected


def test_without_a_compiler_or_inside_transforms_the_biases_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {"queries": 196, "axes": 2, "channels": (64, 64)}
    monkeypatch.setattr(fused, "can_compile", lambda device: False)
    assert form_of(CUDA, torch.bfloat16, **case) == "folded"
    monkeypatch.setattr(fused, "can_compile", lambda device: True)
    forms: list[str] = []

    def note(x: Tensor) -> Tensor:
        forms.append(form_of(CUDA, torch.bfloat16, **case))
        return x

    torch.func.vmap(note)(torch.zeros(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    note(torch.zeros(2))
    assert forms == ["folded", "folded"]
    assert form_of(torch.device("cpu"), torch.float32, **case) == "plain"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_compiler_needs_triton_and_a_gpu_that_it_serves(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert fused.can_compile(CUDA) is expected
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fused.can_compile(CUDA) is False


@asks_for_gradients
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
    assert form_of(CUDA, dtype, queries=count, axes=2, channels=(24, 24)) == "flex"
    for out in (attend_folded(*there), attend_flex(*there), attend(there[0], there[1], there[2], there[3:])):
        torch.testing.assert_close(out.cpu().double(), expected, **tolerance(dtype))
        for got, want in zip(torch.autograd.grad(out, there, g.to(out)), wanted, strict=True):
            # Sums over hundreds of queries, of products in the inputs' dtype.
            torch.testing.assert_close(got.cpu(), want, **tolerance(dtype, scale=5))
