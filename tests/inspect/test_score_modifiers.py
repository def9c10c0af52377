"""Scores beyond `Q K^T`: rotated queries, masks of all shapes, and how modules are called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect.score_modifiers import CallForm, PositionBias, ScoreTerms
from experiments.small_vit import Attention
from tests.tolerances import tolerance

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
FORM = CallForm(("x", "rope", "attn_mask", "is_causal"), neighbours=True)


def angles(heads: int = 1) -> Tensor:
    return torch.randn(heads, 5, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("neighbours", [False, True])
def test_planes_are_turned_by_their_angles(heads: int, neighbours: bool) -> None:
    """Compare with complex numbers; the token before the image is not rotated."""
    x, angle = torch.randn(2, 3, 6, 4), angles(heads)
    if neighbours:
        spread = angle.repeat_interleave(2, -1)
        planes = torch.view_as_complex(x.unflatten(-1, (2, 2)))
    else:
        spread = torch.cat((angle, angle), -1)
        planes = torch.complex(x[..., :2].contiguous(), x[..., 2:].contiguous())
    turned = planes[:, :, 1:] * torch.polar(torch.ones_like(angle), angle)
    flat = torch.view_as_real(turned)
    expected = flat.flatten(-2) if neighbours else torch.cat((flat[..., 0], flat[..., 1]), -1)
    found = ScoreTerms(spread.cos(), spread.sin(), neighbours).turned(x)
    torch.testing.assert_close(found[:, :, 1:], expected, **tolerance(torch.float32))
    torch.testing.assert_close(found[:, :, :1], x[:, :, :1], rtol=0, atol=0)
    if heads > 1:
        some = ScoreTerms(spread.cos(), spread.sin(), neighbours).of([2, 0]).turned(x[:, [2, 0]])
        torch.testing.assert_close(some, found[:, [2, 0]])


@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4), (3, 5, 4), (1, 3, 5, 4)])
def test_rotations_come_in_two_ways(shape: tuple[int, ...]) -> None:
    sin, cos = torch.randn(shape), torch.randn(shape)
    _, one = FORM.read((X,), {"rope": torch.cat((sin, cos), -1)})
    _, two = FORM.read((X,), {"position_embeddings": (cos, sin)})
    for terms in (one, two):
        assert terms.cos is not None
        assert terms.sin is not None
        torch.testing.assert_close(terms.cos, cos.reshape(-1, 5, 4))
        torch.testing.assert_close(terms.sin, sin.reshape(-1, 5, 4))


class TestMasks:
    def test_sequences_of_an_image_follow_one_another(self) -> None:
        mask = torch.randn(2, 6, 6)
        _, terms = FORM.read((X, None, mask), {})
        scores = torch.zeros(4, 3, 6, 6)
        torch.testing.assert_close(terms.raised(scores)[:, 0], mask.repeat(2, 1, 1))

    def test_a_mask_of_each_sequence_must_be_that_of_each_image(self) -> None:
        mask = torch.randn(2, 1, 6, 6)
        _, terms = FORM.read((X, None, mask.repeat(2, 1, 1, 1)), {})
        found = terms.per_image(2, "model.attn").added
        assert found is not None
        torch.testing.assert_close(found, mask)
        _, odd = FORM.read((X, None, torch.randn(4, 1, 6, 6)), {})
        with pytest.raises(ValueError, match=r"model.attn: .*scores of every image"):
            odd.per_image(2, "model.attn")

    def test_truth_is_what_may_be_looked_at_but_for_torch_s_own(self) -> None:
        may = torch.eye(6, dtype=torch.bool)
        _, terms = FORM.read((X,), {"attn_mask": may})
        torch.testing.assert_close(terms.allowed(), may[None])
        _, torchs = CallForm.of(nn.MultiheadAttention(8, 2, batch_first=True)).read((X, X, X), {"attn_mask": ~may})
        torch.testing.assert_close(torchs.allowed(), may[None])

    def test_a_bias_blocks_nothing(self) -> None:
        _, terms = FORM.read((X,), {"attn_mask": torch.randn(1, 3, 6, 6)})
        allowed = terms.allowed()
        assert allowed is not None
        assert bool(allowed.all())
        some = terms.of([1]).added
        assert some is not None
        assert some.shape == (1, 1, 6, 6)

    def test_a_hundred_less_blocks(self) -> None:
        blocked = torch.zeros(2, 6, 6)
        blocked[1, :3, 3:] = -100
        terms = FORM.read((X,), {"attn_mask": blocked})[1]
        allowed = terms.allowed()
        assert allowed is not None
        assert int((~allowed).sum()) == 9


class TestCalls:
    @pytest.mark.parametrize(
        ("args", "named", "message"),
        [
            ((X[0],), {}, r"x: .*got shape \(6, 8\)"),
            ((X, None, None, True), {}, "is_causal: must be False, got True"),
            ((X,), {"head_mask": torch.ones(3)}, "head_mask: must be None, got a tensor"),
            ((X,), {"attn_mask": torch.ones(3)}, r"attn_mask: .*got shape \(3,\)"),
            ((X,), {"rope": torch.ones(4, 1, 5, 8)}, r"rotary positions: must be"),
        ],
    )
    def test_what_is_not_known_is_refused(self, args: Any, named: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FORM.read(args, named)

    def test_other_words_are_no_matter(self) -> None:
        x, terms = FORM.read((), {"x": X, "output_attentions": False, "resolution": (2, 3), "head_mask": None})
        assert x is X
        assert terms.cos is terms.added is None

    @pytest.mark.parametrize("batch_first", [False, True])
    def test_torch_s_own(self, batch_first: bool) -> None:
        form = CallForm.of(nn.MultiheadAttention(8, 2, batch_first=batch_first))
        x, _ = form.read((X, X, X), {"need_weights": False, "key_padding_mask": None})
        torch.testing.assert_close(x, X if batch_first else X.transpose(0, 1))
        out = form.give(x)
        assert isinstance(out, tuple)
        torch.testing.assert_close(out[0], X)
        with pytest.raises(ValueError, match=r"key, value: .*got "):
            form.read((X, X.clone(), X), {})
        with pytest.raises(ValueError, match="key_padding_mask: must be None"):
            form.read((X, X, X, torch.ones(4, 6)), {})

    def test_of_a_plain_module(self) -> None:
        form = CallForm.of(Attention(8, 2))
        assert (form.names, form.torch_style, form.batch_first, form.pair) == (("x",), False, True, False)
        assert form.give(X) is X


def test_a_bias_of_some_heads_is_a_copy() -> None:
    table = nn.Parameter(torch.randn(4, 3))
    bias = PositionBias(table, torch.tensor([[0, 1, 2], [3, 0, 1], [2, 3, 0]]))
    part = bias.of([2, 0], slice(1))
    torch.testing.assert_close(part(), bias()[[2, 0], :1])
    with torch.no_grad():
        table.zero_()
    assert bool((part() != 0).all())
