"""Tokens before and after those of the image: if they were counted wrongly, every map would be shifted."""

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

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.before, self.after = (torch.randn(1, count, 48, generator=generator) for count in (before, after))
        self.seen = torch.empty(0)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 4, stride=4).mT
        some = [part.expand(len(images), -1, -1) for part in (self.before, self.after)]
        x = torch.cat([some[0], patches, some[1]], 1)[:, None]
        self.seen = (x @ x.mT / 48**0.5).softmax(-1)
        return F.scaled_dot_product_attention(x, x, x)


class Hidden(nn.Module):
    """Computes its output outside PyTorch."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(images.numpy().copy())


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


class TestOtherTokens:
    """Tokens before and after those of the image are found from where the tokens come from."""

    @pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (1, 5), (0, 2)])
    def test_they_are_not_part_of_the_image(self, before: int, after: int) -> None:
        model = Among(before, after)
        operator, rows = operator_of(model, pictures())
        assert (operator.grid.sizes, operator.prefix, operator.suffix) == ((3, 4), before, after)
        end = before + 12
        torch.testing.assert_close(rows, model.seen[:, :, before:end, before:end], **tolerance(torch.float32))
        elsewhere = model.seen[:, :, before:end, :before].sum(-1) + model.seen[:, :, before:end, end:].sum(-1)
        torch.testing.assert_close(operator.padding_mass(torch.arange(12)), elsewhere, **tolerance(torch.float32))
        classes = operator.prefix_rows(torch.arange(before))
        torch.testing.assert_close(classes, model.seen[:, :, :before, before:end], **tolerance(torch.float32))


class TestGivenGrid:
    """Positions that cannot be followed are given by the user."""

    def model(self, before: int, after: int) -> nn.Module:
        return nn.Sequential(Hidden(), Among(before, after))

    def test_without_a_grid_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"positions of its tokens are lost|do not come from the images"):
            operator_of(self.model(1, 0), pictures())

    @pytest.mark.parametrize("before", [0, 1])
    def test_a_single_other_token_stands_before(self, before: int) -> None:
        assert operator_of(self.model(before, 0), pictures(), grid=(3, 4))[0].prefix == before

    def test_of_several_other_tokens_the_prefix_is_asked_for(self) -> None:
        with pytest.raises(ValueError, match=r"prefix: must be given, since 6 of the 18 tokens"):
            operator_of(self.model(1, 5), pictures(), grid=(3, 4))
        operator, rows = operator_of(model := self.model(1, 5), pictures(), grid=(3, 4), prefix=1)
        assert (operator.grid.sizes, operator.prefix, operator.suffix) == ((3, 4), 1, 5)
        seen: Any = model[1].seen  # type: ignore[index]
        torch.testing.assert_close(rows, seen[:, :, 1:13, 1:13], **tolerance(torch.float32))

    def test_too_large_a_grid(self) -> None:
        with pytest.raises(ValueError, match=r"images: must have at least 20 tokens .*got 12 tokens"):
            operator_of(self.model(0, 0), pictures(), grid=(4, 5))


class TestYolos:
    """YOLOS of Hugging Face: a class token, the patches, then detection tokens."""

    def test_maps_are_the_models_own(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        config = transformers.YolosConfig(**sizes, image_size=[32, 48], patch_size=8, num_detection_tokens=10)
        model = transformers.YolosModel(config).eval()
        operator, rows = operator_of(model, pictures(32, 48))
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
