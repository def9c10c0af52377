"""Tests of attention with axis biases: all splits into blocks, and the folded form, equal the softmax of all scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnconv
from attnconv.operators.content import attend, attend_folded, attend_plainly, attention_with_relative_bias
from attnconv.operators.kernels import block_sizes
from tests.tolerances import tolerance

DOUBLE = torch.float64


def problem(
    sizes: tuple[int, ...], *, shared: str = "nothing", batches: tuple[int, int, int] = (2, 2, 2), channels: int = 4
) -> list[Tensor]:
    """Return queries, keys, values and biases, with the given batch sizes; values have two images.

    Heads share nothing, the keys, the values or both; with 12 channels, probabilities are saved for gradients.
    """
    lattice, (of_queries, of_keys, of_biases) = torch.Size(sizes).numel(), batches
    tensors = [
        torch.randn(of_queries, 3, 7, channels) * (4 / channels) ** 0.5,
        torch.randn(of_keys, 1 if shared in ("keys", "both") else 3, lattice, channels),
        torch.randn(2, 1 if shared in ("values", "both") else 3, lattice, 5),
        *(torch.randn(of_biases, 3, 7, size) for size in sizes),
    ]
    return [tensor.to(DOUBLE).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("block", [1, 40, 2**20])
@pytest.mark.parametrize("sizes", [(6,), (2, 5), (2, 3, 2)])
@pytest.mark.parametrize("shared", ["nothing", "keys", "values", "both"])
@pytest.mark.parametrize("batches", [(2, 2, 2), (2, 2, 1), (1, 1, 1), (1, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize("channels", [4, 12])
def test_every_split_equals_the_softmax_of_all_scores(
    sizes: tuple[int, ...],
    shared: str,
    batches: tuple[int, int, int],
    channels: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_sizes, "SCORES_BLOCK", 8 * block)
    monkeypatch.setattr(block_sizes, "LEAST_ROWS", 2)
    inputs = problem(sizes, shared=shared, batches=batches, channels=channels)
    expected = attend_plainly(*inputs)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, g)
    for out in (attend(inputs[0], inputs[1], inputs[2], inputs[3:]), attend_folded(*inputs)):
        torch.testing.assert_close(out, expected, **tolerance(DOUBLE))
        for got, want in zip(torch.autograd.grad(out, inputs, g), wanted, strict=True):
            torch.testing.assert_close(got, want, **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize("block", [1, 40, 2**20])
@pytest.mark.parametrize("shared", ["nothing", "values", "both"])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("batches", [(2, 2, 2), (1, 2, 1)])
@pytest.mark.parametrize("channels", [4, 12])
def test_in_bfloat16(
    batches: tuple[int, int, int],
    autocast: bool,
    shared: str,
    channels: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_sizes, "SCORES_BLOCK", 8 * block)
    parts = problem((2, 5), shared=shared, batches=batches, channels=channels)
    inputs = [part.detach().bfloat16().float().requires_grad_() for part in parts]
    exact = [part.detach().double().requires_grad_() for part in inputs]

    def run(*values: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return attend(values[0], values[1], values[2] if autocast else values[2].bfloat16(), values[3:])

    out, expected = run(*inputs), attend_plainly(*exact)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, **tolerance(torch.bfloat16))
    g = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, inputs, g), torch.autograd.grad(expected, exact, g.double()), strict=True
    ):
        scale = float(want.abs().max())
        torch.testing.assert_close(got.double() / scale, want / scale, **tolerance(torch.bfloat16))
    # Scores are not rounded: near 1,000, the bfloat16 numbers are 4 apart.
    with torch.no_grad():
        inputs[0][..., 0], inputs[1][..., 0] = 1, 1000
        out, expected = run(*inputs), attend_plainly(*(part.double() for part in inputs))
    torch.testing.assert_close(out.double(), expected, **tolerance(torch.bfloat16))


def test_without_biases_it_is_plain_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=DOUBLE).unbind()
    torch.testing.assert_close(attend(q, k, v, []), F.scaled_dot_product_attention(q, k, v, scale=1.0))


@pytest.mark.parametrize("channels", [2, 12])
def test_second_and_forward_derivatives_and_vmap(channels: int) -> None:
    inputs = problem((2, 2), channels=channels)

    def run(*values: Tensor) -> Tensor:
        return attend(values[0], values[1], values[2], values[3:])

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    out = run(*inputs)
    first, again = (torch.autograd.grad(out, inputs, out, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    scaled = torch.func.vmap(lambda factor: run(inputs[0] * factor, *inputs[1:]))(
        torch.tensor([1.0, 2.0], dtype=DOUBLE)
    )
    torch.testing.assert_close(scaled[1], run(inputs[0] * 2, *inputs[1:]))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5), (4, 4), (1, 6)])
def test_the_function_is_its_formula(sizes: tuple[int, int], per_head: bool) -> None:
    """Tables shorter and longer than the image, shared and per head, against explicit scores of all positions."""
    n, heads, e = sizes[0] * sizes[1], 2, 4
    q, k = torch.randn(2, 2, heads, n, e, dtype=DOUBLE).requires_grad_().unbind()
    v = torch.randn(2, heads, n, 3, dtype=DOUBLE, requires_grad=True)
    shape = (heads,) if per_head else ()
    rows, columns = torch.randn(*shape, 5, e, dtype=DOUBLE), torch.randn(*shape, 13, e, dtype=DOUBLE)
    tables = [table.requires_grad_() for table in (rows, columns)]
    scores = torch.zeros(2, heads, n, n, dtype=DOUBLE)
    for query in range(n):
        for key in range(n):
            down, right = key // sizes[1] - query // sizes[1], key % sizes[1] - query % sizes[1]
            row, column = rows[..., min(max(down, -2), 2) + 2, :], columns[..., min(max(right, -6), 6) + 6, :]
            scores[:, :, query, key] = (q[:, :, query] * (k[:, :, key] + row + column)).sum(-1) / 2
    expected = scores.softmax(-1) @ v
    out = attention_with_relative_bias(q, k, v, rows, columns, sizes=sizes)
    torch.testing.assert_close(out, expected, **tolerance(DOUBLE))
    g = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, [v, *tables], g), torch.autograd.grad(expected, [v, *tables], g), strict=True
    ):
        torch.testing.assert_close(got, want, **tolerance(DOUBLE))


def test_the_biases_of_vectors_in_half_precision_keep_their_digits() -> None:
    """With position scores only, in bfloat16: neither q / sqrt(e) nor any bias is rounded."""
    q, table = torch.randn(1, 2, 12, 8).bfloat16(), 6 * torch.randn(7, 8)
    k, v = torch.zeros_like(q), torch.randn(1, 2, 12, 4)
    sizes = (3, 4)
    exact = attention_with_relative_bias(q.float(), k.float(), v, table, table, sizes=sizes)
    out = attention_with_relative_bias(q, k, v, table, table, sizes=sizes)
    torch.testing.assert_close(out, exact, **tolerance(torch.float32))


def test_it_is_public_and_keeps_dtypes() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).bfloat16().unbind()
    table = torch.randn(3, 4)
    out = attnconv.operators.attention_with_relative_bias(q, k, v, table, table, sizes=(2, 3))
    assert out.dtype == torch.bfloat16
    exact = attnconv.operators.attention_with_relative_bias(q.float(), k.float(), v.float(), table, table, sizes=(2, 3))
    torch.testing.assert_close(out.float(), exact, **tolerance(torch.bfloat16, scale=2))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 5, 4), (3, 4), (3, 4)), r"q, k, v: must be .* for 2 x 3 positions"),
        (((1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 4), (3, 4), (3, 4)), r"q, k, v: must be .* for 2 x 3 positions"),
        (((6, 4), (6, 4), (6, 4), (3, 4), (3, 4)), r"q, k, v: must be .* for 2 x 3 positions"),
        (
            ((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), (4, 4), (3, 4)),
            r"row_table: must be of shape \(2 t \+ 1, 4\).* \(4, 4\)",
        ),
        (((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), (3, 4), (3, 5)), r"column_table: must be .* shape \(3, 5\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    q, k, v, rows, columns = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        attention_with_relative_bias(q, k, v, rows, columns, sizes=(2, 3))
