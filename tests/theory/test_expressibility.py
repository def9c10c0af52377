"""Lemma 3, compared with PyTorch's convolutions."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnconv import SelfAttention2d, from_conv
from attnconv.theory import Expressiveness, lemma3_best_weights
from attnconv.theory.conv_taps import Convolution, head_weights
from attnconv.theory.expressibility import can_express, factorise
from tests.tolerances import tolerance


def hard(border: Any = "zero", mode: Any = "zeros", **options: Any) -> SelfAttention2d:
    """Return nine heads at the positions of a 3 x 3 kernel, in float64."""
    layer = from_conv(nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode, dtype=torch.float64), **options)
    layer.border = border
    assert isinstance(layer, SelfAttention2d)
    return layer


def weights(answer: Expressiveness, conv: Convolution) -> torch.Tensor:
    """W_h = sum_j Phi[j, h] W_j."""
    return torch.einsum("jh,jid->hid", answer.uniform.phi, head_weights(conv).to(answer.uniform.phi)).to(conv.weight)


def test_counter_example_to_the_condition_of_each_query() -> None:
    one_pixel_each = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 2, 2)  # (h, n, m): head h at position h
    answer = can_express(one_pixel_each, 1, sizes=(2,))
    assert answer.expresses_each_query
    assert not answer.expresses
    assert answer.expresses_inside is False
    # Both queries have the same rows, so the best Phi is 1/2 for each: ||E - Phi A||^2 = 1 of ||E||^2 = 2.
    torch.testing.assert_close(answer.uniform.phi, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert answer.uniform.residuals.everywhere == pytest.approx(math.sqrt(0.5))
    assert answer.each_query.everywhere == 0.0


@pytest.mark.parametrize("sizes", [(6, 6), (3, 5), (1, 1), (2, 7)])
@pytest.mark.parametrize(
    ("border", "mode"),
    [("zero", "zeros"), ("replicate", "replicate"), ("reflect", "reflect"), ("circular", "circular")],
)
def test_hard_heads_express_their_kernel(border: str, mode: str, sizes: tuple[int, int]) -> None:
    answer = can_express(hard(border, mode), 3, sizes=sizes, padding_mode=mode)
    assert answer.uniform.residuals.everywhere < 1e-14
    assert answer.each_query.everywhere < 1e-14
    assert (answer.uniform_inside is None) == (min(sizes) < 3)
    assert answer.expresses_inside is (True if min(sizes) >= 3 else None)


@pytest.mark.parametrize(("size", "best", "own"), [(5, 0.4393, 0.5756), (8, 0.3690, 0.4360)])
def test_renormalised_heads_fail_at_a_border_of_zeros(size: int, best: float, own: float) -> None:
    layer = hard("renormalise")
    zeros = can_express(layer, 3, sizes=(size, size))
    assert zeros.expresses_each_query
    assert not zeros.expresses
    assert zeros.expresses_inside
    assert zeros.uniform_inside is not None
    assert zeros.uniform_inside.residuals.inside is not None
    assert zeros.uniform_inside.residuals.inside < 1e-14
    assert zeros.uniform.residuals.everywhere == pytest.approx(best, abs=1e-4)
    # Inside, Phi is the identity. The squared residual is 1 per tap that reads a zero, of 9 n taps in total.
    seen = (3 * size - 2) ** 2
    assert zeros.uniform_inside.residuals.everywhere == pytest.approx(math.sqrt((9 * size**2 - seen) / seen))
    assert zeros.uniform_inside.residuals.everywhere == pytest.approx(own, abs=1e-4)
    replicate = can_express(layer, 3, sizes=(size, size), padding_mode="replicate")
    assert replicate.uniform.residuals.everywhere < 1e-14
    assert replicate.expresses


@pytest.mark.parametrize(
    ("dtype", "equal"),
    [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_rows_in_every_dtype(dtype: torch.dtype, equal: float) -> None:
    rows = hard().operator(torch.zeros(1, 1, 4, 5, dtype=torch.float64)).to_dense().detach()[0]
    mixed = torch.einsum("gh,hnm->gnm", 0.75 * torch.eye(9, dtype=torch.float64) + 0.25 / 9, rows)
    exact, rounded = (can_express(given, 3, sizes=(4, 5)) for given in (mixed, mixed.to(dtype)))
    assert rounded.expresses
    assert rounded.tolerance == equal
    torch.testing.assert_close(rounded.uniform.phi, exact.uniform.phi, rtol=equal, atol=equal)


def test_float32_layers_express_within_their_tolerance() -> None:
    layer = from_conv(nn.Conv2d(1, 1, 3, padding=1))
    answer = can_express(layer, 3, sizes=(6, 6))
    assert answer.expresses
    assert answer.tolerance == 1e-5


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(1, 2), (2, 4), (4, 3)])
def test_even_kernels_stand_as_pytorch_pads_same(kernel: tuple[int, int], dilation: int) -> None:
    conv = nn.Conv2d(2, 3, kernel, padding="same", dilation=dilation, bias=False, dtype=torch.float64)
    layer = from_conv(conv)
    answer = can_express(layer, kernel, sizes=(5, 6), dilation=dilation)
    assert answer.expresses
    assert layer.weight is not None
    if answer.uniform.rank == layer.heads:  # every tap reads a pixel for some query
        torch.testing.assert_close(weights(answer, conv), layer.weight, **tolerance(torch.float64))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 1, 3, stride=2, padding=1),
        nn.Conv2d(1, 1, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        nn.Conv2d(1, 1, 5, padding=1, padding_mode="circular"),
        nn.Conv1d(1, 1, 4, stride=3, padding=2, padding_mode="reflect"),
        nn.Conv3d(1, 1, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
    ],
    ids=lambda conv: type(conv).__name__,
)
def test_stride_dilation_and_padding(conv: Any) -> None:
    sizes = (7, 6, 5)[: len(conv.kernel_size)]
    layer = from_conv(conv.double())
    options = {"dilation": conv.dilation, "padding": conv.padding, "padding_mode": conv.padding_mode}
    answer = can_express(layer, conv.kernel_size, sizes=sizes, **options)
    assert answer.expresses
    rows = layer.operator(torch.zeros(1, 1, *sizes, dtype=torch.float64)).to_dense()
    alone = can_express(rows, conv.kernel_size, sizes=sizes, stride=conv.stride, **options)
    torch.testing.assert_close(alone.uniform.phi, answer.uniform.phi)
    moved = {**options, "padding": tuple(pad + 1 for pad in conv.padding)}
    assert not can_express(layer, conv.kernel_size, sizes=sizes, **moved).expresses


def test_one_query_that_attends_another_pixel_is_enough() -> None:
    """The result covers every query, however many other queries there are."""
    rows = torch.eye(900, dtype=torch.bfloat16)[None].clone()
    rows[0, 7] = rows[0, 8]
    answer = can_express(rows, 1, sizes=(900,), tolerance=0.1)
    assert answer.uniform.residuals.everywhere < 0.1  # only one of 900 queries differs
    assert not answer.expresses
    swapped = torch.eye(900)[None].repeat(2, 1, 1)  # each query needs only one of the heads
    swapped[0, 7], swapped[1, 7] = swapped[0, 8].clone(), swapped[1, 7].clone()
    swapped[1] = swapped[1].roll(1, 0)
    swapped[1, 7] = torch.eye(900)[7]
    answer = can_express(swapped, 1, sizes=(900,), tolerance=0.1)
    assert (answer.expresses_each_query, answer.expresses) == (True, False)


def test_transposed_layers_over_their_stretched_image() -> None:
    conv = nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1, dtype=torch.float64)
    layer = from_conv(conv)
    answer = can_express(layer, 3, sizes=(3, 4))
    assert answer.expresses
    assert layer.weight is not None
    torch.testing.assert_close(weights(answer, conv), layer.weight, **tolerance(torch.float64))
    even = nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, groups=2, dtype=torch.float64)
    layer = from_conv(even)
    answer = can_express(layer, 4, sizes=(5,))
    assert answer.expresses
    assert layer.weight is not None
    torch.testing.assert_close(weights(answer, even), layer.weight, **tolerance(torch.float64))
    moved = can_express(layer, 4, sizes=(5,), padding=2)
    assert not moved.expresses
    layer.weight.data.copy_(weights(answer, even))
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), even(x), **tolerance(torch.float64))
    with pytest.raises(ValueError, match=r"padding_mode: .*got 'circular'"):
        can_express(layer, 3, sizes=(5,), padding_mode="circular")


def test_soft_gaussians_express_nothing_but_come_near() -> None:
    """Nine isotropic heads at the positions of a 3 x 3 kernel are not sufficient, even inside and for each query."""
    left = []
    for alpha in (0.5, 1.0, 2.0, 5.0, 20.0):
        answer = can_express(hard(alpha=alpha), 3, sizes=(7, 7))
        assert answer.uniform.rank == 9
        assert answer.expresses_inside is False
        assert not answer.expresses_each_query
        assert answer.uniform_inside is not None
        left.append(answer.uniform_inside.residuals.inside)
    assert left == pytest.approx([0.71, 0.42, 0.142, 7.1e-3, 2.1e-9], rel=0.05)


def test_other_attention_that_moves_with_the_query_by_torch_alone() -> None:
    """Attention rows like those of another library: shifts mixed by a softmax, with more heads than necessary."""
    mixture = torch.softmax(3 * torch.randn(12, 9), -1)
    padded = F.pad(torch.arange(20.0).reshape(1, 1, 4, 5) + 1, (1, 1, 1, 1))
    seen = F.unfold(padded, 3)[0]  # (9, 20) indices of pixels, 0 outside
    shifts = (seen[..., None] == torch.arange(20.0) + 1).float()
    rows = torch.einsum("hj,jnm->hnm", mixture, shifts)
    answer = can_express(rows, 3, sizes=(4, 5))
    assert answer.expresses
    assert answer.uniform.rank == 9
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    image = torch.randn(1, 2, 4, 5)
    out = torch.einsum("hnm,im,hid->dn", rows, image[0].flatten(1), weights(answer, conv))
    torch.testing.assert_close(out.reshape(1, 3, 4, 5), conv(image), rtol=1e-4, atol=1e-4)


def test_position_only_layers_look_at_the_size_alone() -> None:
    layer = SelfAttention2d(3, 4, heads=5, border="zero", padding=1)
    by_image, by_size = can_express(layer, 3, x=torch.randn(2, 3, 5, 4)), can_express(layer, 3, sizes=(5, 4))
    torch.testing.assert_close(by_image.uniform.phi, by_size.uniform.phi, rtol=0, atol=0)
    assert not by_size.uniform.phi.requires_grad


def test_heads_that_repeat_share_their_weight() -> None:
    rows = hard().operator(torch.zeros(1, 1, 4, 4, dtype=torch.float64)).to_dense().detach()[0]
    answer = can_express(rows[[0, 1, 2, 3, 4, 5, 6, 7, 8, 4]], 3, sizes=(4, 4))
    assert answer.expresses
    assert answer.uniform.rank == 9
    torch.testing.assert_close(answer.uniform.phi[4, [4, 9]], torch.full((2,), 0.5, dtype=torch.float64))


def test_rows_of_nothing() -> None:
    answer = can_express(torch.zeros(2, 3, 3), 1, sizes=(3,))
    assert (answer.uniform.rank, answer.uniform.residuals.everywhere) == (0, 1.0)
    assert not answer.uniform.phi.any()


def test_indicators_of_nothing() -> None:
    """Taps that read only padding need no weight."""
    blind = can_express(torch.full((1, 1, 1), 1.0), (2,), sizes=(1,), dilation=2)  # taps at -1 and 1 of one pixel
    assert blind.uniform.residuals.everywhere == 0.0
    assert blind.expresses
    assert not blind.uniform.phi.any()


def test_blocks_of_queries_agree_with_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.softmax(torch.randn(2, 4, 12, 12, dtype=torch.float64), -1)
    whole = can_express(rows, 2, sizes=(3, 4))
    monkeypatch.setattr(lemma3_best_weights, "_BLOCK", 1)
    blocks = can_express(rows, 2, sizes=(3, 4))
    torch.testing.assert_close(blocks.uniform.phi, whole.uniform.phi)
    assert blocks.uniform.rank == whole.uniform.rank
    assert blocks.uniform.residuals.border == pytest.approx(whole.uniform.residuals.border)
    assert blocks.each_query.inside == pytest.approx(whole.each_query.inside)


def test_the_fit_inside_is_best_inside_and_the_other_everywhere() -> None:
    answer = can_express(SelfAttention2d(1, 1, heads=6).double(), 3, sizes=(6, 6))
    assert answer.uniform_inside is not None
    mine, other = answer.uniform_inside.residuals, answer.uniform.residuals
    assert mine.inside is not None
    assert other.inside is not None
    assert mine.inside < other.inside
    assert other.everywhere < mine.everywhere


def test_printed_without_its_matrices() -> None:
    text = repr(can_express(hard("renormalise"), 3, sizes=(5, 5)))
    assert "rank=9" in text
    assert "tensor" not in text


def test_factors_of_one_query() -> None:
    layer = hard("renormalise")
    answer = can_express(layer, 3, sizes=(4, 5))
    found = factorise(layer, 3, query=(0, 2), sizes=(4, 5), phi=answer.uniform.phi)
    assert found.shifts[0] == (-1, -1)
    assert found.indicators.sum(1).tolist() == [0.0] * 3 + [1.0] * 6
    assert found.indicators[3].nonzero().tolist() == [[1]]  # left of the query, in its row
    left = (found.indicators - found.phi @ found.rows).norm() / found.indicators.norm()
    assert found.residual == pytest.approx(float(left))
    assert found.residual > 0.1
    assert factorise(layer, 3, query=(0, 2), sizes=(4, 5)).residual < 1e-14  # with this query's Phi
