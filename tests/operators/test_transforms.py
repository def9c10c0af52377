"""Tests of all fast forms under function transforms, batched gradients, empty batches and meta tensors."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnconv import Kronecker, Quadratic, Relative, SelfAttention2d
from attnconv.encodings import encoding_named
from attnconv.encodings.content import TERMS
from attnconv.grid import Grid
from attnconv.operators.kernels import block_sizes
from tests.tolerances import tolerance

DOUBLE = torch.float64
every_form = pytest.mark.parametrize("encoding", ["quadratic", "quadratic-generalized", "learned-content"])
both_orders = pytest.mark.parametrize("outputs", [4, 2])


@pytest.fixture(autouse=True)
def no_problem_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "ALL_ROWS", 0)


def layer(encoding: str, outputs: int = 4) -> SelfAttention2d:
    return SelfAttention2d(4, outputs, 3, encoding=encoding, backend="structured").double()


@every_form
@both_orders
def test_gradients_by_transforms(encoding: str, outputs: int) -> None:
    attention, images = layer(encoding, outputs), torch.randn(3, 4, 5, 6, dtype=DOUBLE, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        out: Tensor = attention(x).square().sum()
        return out

    (expected,) = torch.autograd.grad(loss(images), images)
    parts = images.detach()
    torch.testing.assert_close(torch.func.grad(loss)(parts), expected, **tolerance(DOUBLE, scale=100))
    each = torch.func.vmap(torch.func.grad(lambda one: loss(one[None])))(parts)
    torch.testing.assert_close(each, expected, **tolerance(DOUBLE, scale=100))
    slope = torch.func.jvp(loss, (parts,), (parts,))[1]
    torch.testing.assert_close(slope, (expected * parts).sum(), **tolerance(DOUBLE, scale=1000))


@every_form
@both_orders
def test_many_gradients_at_once(encoding: str, outputs: int) -> None:
    attention, images = layer(encoding, outputs), torch.randn(1, 4, 4, 3, dtype=DOUBLE, requires_grad=True)
    out = attention(images)
    weights = torch.randn(5, *out.shape, dtype=DOUBLE)
    (together,) = torch.autograd.grad(out, images, weights, is_grads_batched=True, retain_graph=True)
    for weight, got in zip(weights, together, strict=True):
        (expected,) = torch.autograd.grad(out, images, weight, retain_graph=True)
        torch.testing.assert_close(got, expected, **tolerance(DOUBLE, scale=100))


@every_form
@both_orders
def test_no_images(encoding: str, outputs: int) -> None:
    attention, images = layer(encoding, outputs), torch.zeros(0, 4, 6, 5, dtype=DOUBLE, requires_grad=True)
    out = attention(images)
    assert out.shape == (0, outputs, 6, 5)
    out.sum().backward()
    assert images.grad is not None
    assert images.grad.shape == images.shape
    assert attention.weight is not None
    torch.testing.assert_close(attention.weight.grad, torch.zeros_like(attention.weight))


def test_no_images_if_keys_or_biases_are_shared() -> None:
    for terms in (TERMS[2:3], TERMS[2:], (TERMS[0], *TERMS[2:])):
        attention = SelfAttention2d(4, 5, 3, encoding=Relative(4, 3, terms=terms))
        images = torch.zeros(0, 4, 6, 5, requires_grad=True)
        out = attention(images)
        assert out.shape == (0, 5, 6, 5)
        out.sum().backward()


@every_form
def test_shapes_without_values(encoding: str) -> None:
    columns = 9 if encoding == "learned-content" else 100  # long axes; blocks of queries for content
    shape = (1, 4, 128, columns)
    attention = SelfAttention2d(4, 5, 3, encoding=encoding, device="meta")
    assert attention(torch.zeros(shape, device="meta")).shape == (1, 5, 128, columns)
    with FakeTensorMode():
        assert SelfAttention2d(4, 5, 3, encoding=encoding)(torch.zeros(shape)).shape == (1, 5, 128, columns)


@every_form
def test_autocast_leaves_float64_alone(encoding: str) -> None:
    attention, images = layer(encoding), torch.randn(1, 4, 5, 6, dtype=DOUBLE)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(images)
    torch.testing.assert_close(out, attention(images), rtol=0, atol=0)


def test_nan_is_passed_on() -> None:
    attention = layer("quadratic-generalized")
    with torch.no_grad():
        next(attention.encoding.parameters()).fill_(torch.nan)
    assert attention(torch.randn(1, 4, 9, 9, dtype=DOUBLE)).isnan().all()


def test_planned_heads_far_away_in_half_precision() -> None:
    attention = SelfAttention2d(4, 4, 9).half()
    assert isinstance(attention.encoding, Quadratic)
    with torch.no_grad():
        attention.encoding.centres.fill_(10000.0)  # their sum is beyond float16
        attention.encoding.spread.fill_(30.0)
    assert attention.plan((6, 6)) == "shift"
    assert attention(torch.randn(1, 4, 6, 6).half()).isfinite().all()


@pytest.mark.parametrize("encoding", ["quadratic", "quadratic-generalized"])
@pytest.mark.parametrize("sizes", [(24, 24), (12, 12, 12)])
def test_rows_hold_no_denormal_numbers(encoding: str, sizes: tuple[int, ...]) -> None:
    sharp = encoding_named(encoding, 4, 9, len(sizes))
    with torch.no_grad():
        for parameter in sharp.parameters():
            parameter.fill_(1.0)
    operator = sharp.operator(Grid.make(sizes), torch.zeros(1, *sizes, 4))
    if encoding == "quadratic":
        assert isinstance(operator, Kronecker)
    torch.set_flush_denormal(False)  # keep denormals
    try:
        rows = operator.to_dense()
        assert rows.sum(-1).min() > 0.999
        assert not ((rows > 0) & (rows < torch.finfo(torch.float32).tiny)).any()
    finally:
        torch.set_flush_denormal(True)


@pytest.mark.parametrize("backend", ["dense", "structured", "reference"])
def test_content_under_a_window_sees_the_queries_that_there_are(backend: str) -> None:
    windowed = SelfAttention2d(4, 4, 2, encoding="learned-content", border="zero", window=[3, 3], backend=backend)  # type: ignore[arg-type]
    free = SelfAttention2d(4, 4, 2, encoding=windowed.encoding, border="zero", backend="reference")
    free.load_state_dict(windowed.state_dict())
    images = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(windowed(images), free(images)[..., :3, :3], **tolerance(torch.float32))
