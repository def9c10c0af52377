"""The forms for GPUs, as far as a CPU runs them: FlexAttention uncompiled, the folded form, and which one is taken."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from attnconv.operators.kernels import fused_relative_bias
from attnconv.operators.kernels.contractions import attend_plainly
from attnconv.operators.kernels.fused_relative_bias import attend_flex, attend_folded, form_of
from attnconv.operators.kernels.relative_bias import attend
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
    with pytest.raises(ValueError, match=rf"biases: .*got {count}"):
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


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_derivatives_of_the_folded_form_beyond_the_first(sizes: tuple[int, ...]) -> None:
    """Fused kernels have none: they are those of all scores."""
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


class Compiling:
    """In the place of compiled FlexAttention on a GPU: the uncompiled one, which may fail when it compiles or later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, forward: Exception | None, backward: Exception | None):
        self.calls, self.forward, self.backward = 0, forward, backward
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(fused_relative_bias, "_KERNELS", fused_relative_bias._Kernels())
        monkeypatch.setattr(fused_relative_bias, "_compiled", lambda: self)
        fused_relative_bias._say_once.cache_clear()

    def __call__(self, *inputs: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        if self.forward is not None:
            raise self.forward
        out = fused_relative_bias._uncompiled(*inputs, **options)
        if self.backward is not None:
            out.register_hook(self._fail)
        return out

    def _fail(self, gradient: Tensor) -> None:
        del gradient
        assert self.backward is not None
        raise self.backward


def failure(module: str) -> Exception:
    """An error as a compiler raises it, by the module of its class."""
    return type("OutOfResources", (Exception,), {"__module__": module})("out of resource: shared memory\nmore")


@asks_for_gradients
@pytest.mark.usefixtures("gradients_on_a_cpu")
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    "error",
    [failure("triton.runtime.errors"), failure("torch._inductor.exc"), RuntimeError("No valid triton configs.")],
)
def test_what_does_not_compile_is_folded(error: Exception, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [tensor.requires_grad_() for tensor in problem((2, 5))]
    expected = attend_plainly(*inputs)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, g)
    flex = Compiling(monkeypatch, **({"forward": None, "backward": None} | {when: error}))

    def run() -> tuple[Tensor, ...]:
        out = attend_flex(*inputs)
        torch.testing.assert_close(out, expected, **tolerance(DOUBLE))
        return torch.autograd.grad(out, inputs, g)

    with pytest.warns(UserWarning, match=rf"does not compile \({type(error).__name__}: [^\n]*; .* folded"):
        found = run()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance(DOUBLE, scale=10))
    run()  # neither tried nor said again
    assert flex.calls == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("sizes do not match")])
def test_other_errors_are_not_the_compilers(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    Compiling(monkeypatch, forward=error, backward=None)
    with pytest.raises(RuntimeError, match=str(error)):
        attend_flex(*problem((2, 5)))


def test_shapes_beyond_those_that_torch_compiles_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold all scores at once for them."""
    flex = Compiling(monkeypatch, forward=None, backward=None)
    monkeypatch.setattr(fused_relative_bias, "_recompile_limit", lambda: 2)
    for width in (2, 3, 2, 3):
        attend_flex(*problem((2, width)))
    assert flex.calls == 4
    inputs = problem((2, 4))
    with pytest.warns(UserWarning, match=r"torch compiles FlexAttention for 2 shapes .* folded"):
        out = attend_flex(*inputs)
    torch.testing.assert_close(out, attend_plainly(*inputs), **tolerance(DOUBLE))
    attend_flex(*problem((2, 3)))
    assert flex.calls == 5
    fused_relative_bias.forget_kernels()
    attend_flex(*inputs)
    assert flex.calls == 6


def test_torch_names_its_limit() -> None:
    assert fused_relative_bias._recompile_limit() >= 1


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
    monkeypatch.setattr(fused_relative_bias, "can_compile", lambda device: True)
    case: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "queries": 128, "axes": 2, "channels": (64, 64)}
    assert form_of(**(case | changes)) == expected


def test_without_a_compiler_the_biases_are_folded_and_transforms_see_plain_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case: dict[str, Any] = {"queries": 196, "axes": 2, "channels": (64, 64)}
    monkeypatch.setattr(fused_relative_bias, "can_compile", lambda device: False)
    assert form_of(CUDA, torch.bfloat16, **case) == "folded"
    monkeypatch.setattr(fused_relative_bias, "can_compile", lambda device: True)
    forms: list[str] = []

    def note(x: Tensor) -> Tensor:
        forms.append(form_of(CUDA, torch.bfloat16, **case))
        return x

    torch.func.vmap(note)(torch.zeros(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    note(torch.zeros(2))
    assert forms == ["plain", "folded"]
    assert form_of(torch.device("cpu"), torch.float32, **case) == "plain"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_compiler_needs_triton_and_a_gpu_that_it_serves(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert fused_relative_bias.can_compile(CUDA) is expected
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fused_relative_bias.can_compile(CUDA) is False


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
