"""Tokens before and after those of the image: if they were counted wrongly, every map would be shifted."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv.inspect import TokenOperator, visit_attention
from attnconv.operators import AttentionOperator
from attnconv.surgery import replace_heads
from tests.tolerances import tolerance


class Among(nn.Module):
    """One head over patches of 4 pixels, with other tokens before and after them; stores its attention."""

    def __init__(self, before: int, after: int, **words: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.before, self.after = (torch.randn(1, count, 48, generator=generator) for count in (before, after))
        self.seen = torch.empty(0)
        if words:
            self.config = SimpleNamespace(**words)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 4, stride=4).mT
        some = [part.expand(len(images), -1, -1) for part in (self.before, self.after)]
        x = torch.cat([some[0], patches, some[1]], 1)[:, None]
        self.seen = (x @ x.mT / 48**0.5).softmax(-1)
        return F.scaled_dot_product_attention(x, x, x)


def operator_of(model: nn.Module, images: Tensor, **more: Any) -> tuple[TokenOperator, Tensor]:
    """Return the last operator of a model and all of its rows."""
    found: list[tuple[TokenOperator, Tensor]] = []

    def visit(_name: str, operator: AttentionOperator) -> None:
        assert isinstance(operator, TokenOperator)
        found.append((operator, operator.rows(torch.arange(operator.grid.query_count))))

    visit_attention(model, images, visit, **more)
    return found[-1]


def pictures(height: int = 12, width: int = 16) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


class TestTokensAfterTheImage:
    def test_grid_and_prefix_leave_the_others_after(self) -> None:
        model = Among(1, 5)
        operator, rows = operator_of(model, pictures(), grid=(3, 4), prefix=1)
        assert (operator.grid.sizes, operator.prefix, operator.suffix) == ((3, 4), 1, 5)
        torch.testing.assert_close(rows, model.seen[:, :, 1:13, 1:13], **tolerance(torch.float32))
        elsewhere = model.seen[:, :, 1:13, :1].sum(-1) + model.seen[:, :, 1:13, 13:].sum(-1)
        torch.testing.assert_close(operator.padding_mass(torch.arange(12)), elsewhere, **tolerance(torch.float32))
        before = operator.prefix_rows(torch.tensor([0]))
        torch.testing.assert_close(before, model.seen[:, :, :1, 1:13], **tolerance(torch.float32))

    def test_of_several_surplus_tokens_the_prefix_is_asked_for(self) -> None:
        words = r"grid=\(3, 4\) .*\b6 of its 18 tokens; pass prefix="
        with pytest.raises(ValueError, match=words):
            operator_of(Among(1, 5), pictures(), grid=(3, 4))

    @pytest.mark.parametrize("before", [0, 1])
    def test_a_single_surplus_token_stands_before(self, before: int) -> None:
        assert operator_of(Among(before, 0), pictures(), grid=(3, 4))[0].prefix == before

    def test_the_models_own_word_serves(self) -> None:
        model = Among(4, 0, num_register_tokens=3)  # the configuration has no patch size
        operator, rows = operator_of(model, pictures(), grid=(3, 4))
        assert (operator.prefix, operator.suffix) == (4, 0)
        torch.testing.assert_close(rows, model.seen[:, :, 4:, 4:], **tolerance(torch.float32))
        with pytest.raises(ValueError, match=r"grid=\(2, 5\) .*\b6 of its 16 tokens; pass prefix="):
            operator_of(model, pictures(), grid=(2, 5))

    def test_a_grid_that_contradicts_a_model_which_has_no_others(self) -> None:
        model = Among(1, 0, patch_size=4)
        with pytest.raises(ValueError, match=r"6 of its 13 tokens, .*grid is \(3, 4\)"):
            operator_of(model, pictures(), grid=(2, 3), prefix=1)
        assert operator_of(model, pictures(), grid=(4, 3), prefix=1)[0].grid.sizes == (4, 3)


class TestYolos:
    """YOLOS of Hugging Face: a class token, the patches, then detection tokens."""

    @pytest.mark.parametrize("words", [{}, {"grid": (4, 6)}, {"grid": (4, 6), "prefix": 1}, {"prefix": 1}])
    def test_maps_are_the_models_own(self, words: dict[str, Any]) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        config = transformers.YolosConfig(**sizes, image_size=[32, 48], patch_size=8, num_detection_tokens=10)
        model = transformers.YolosModel(config).eval()
        operator, rows = operator_of(model, pictures(32, 48), **words)
        assert (operator.grid.sizes, operator.prefix, operator.suffix) == ((4, 6), 1, 10)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            full = model(pictures(32, 48), output_attentions=True).attentions[-1]
        torch.testing.assert_close(rows, full[:, :, 1:25, 1:25], **tolerance(torch.float32))

    def test_its_heads_are_not_replaced(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
        config = transformers.YolosConfig(**sizes, image_size=[32, 48], patch_size=8, num_detection_tokens=10)
        with pytest.raises(ValueError, match=r"1 \(class tokens.*4 x 6 .*got 35"):
            replace_heads(transformers.YolosModel(config).eval(), pictures(32, 48), count=1)
