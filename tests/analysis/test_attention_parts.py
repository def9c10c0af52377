"""The parts of attention modules: both layouts give the module's own output, and what is besides is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.analysis.attention_parts import attention_parts, first_tensor, refuse_other_formula
from tests.small_hf_vit import PairAttention
from tests.small_vit import Attention
from tests.tolerances import tolerance

X = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_parts_make_the_output(qk_norm: bool, bias: bool) -> None:
    module = Attention(24, 3, qk_norm=qk_norm)
    if not bias:
        module.qkv = nn.Linear(24, 72, bias=False)
    assert_makes(module, X)


def test_three_projections_make_the_output() -> None:
    assert_makes(PairAttention(Attention(24, 3)), X)


def assert_makes(module: nn.Module, x: Tensor) -> None:
    parts = attention_parts(module)
    rows, values = parts.maps_and_values(x)
    expected = first_tensor(module(x))
    assert expected is not None
    torch.testing.assert_close(
        parts.out((rows @ values).transpose(1, 2).flatten(2)), expected, **tolerance(torch.float32)
    )
    refuse_other_formula(module, x, expected)


def test_parts_are_the_module_s_own_weights() -> None:
    for module in (Attention(24, 3), PairAttention(Attention(24, 3))):
        parts = attention_parts(module)
        with torch.no_grad():
            for part in (parts.query, parts.key, parts.value):
                part.weight.zero_()
                part.bias.zero_()  # type: ignore[union-attr]
        torch.testing.assert_close(first_tensor(module(X)), parts.out.bias.expand(2, 10, 24))


class Turning(Attention):
    """Takes rotary positions."""

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        return super().forward(x) if position_embeddings is None else x


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gate", nn.Linear(24, 24), "with gate .a gate."),
        ("norm", nn.LayerNorm(24), "with norm .a norm before"),
        ("relative_position_bias_table", nn.Parameter(torch.zeros(9, 3)), "with relative_position_bias_table .a bias"),
        ("q_norm", nn.LayerNorm(24), "norms over several heads"),
        ("proj", nn.Linear(30, 24), "other widths"),
        ("head_dim", None, "must be of timm's or Hugging Face's kind, with head_dim, got Attention"),
        ("qkv", None, "with qkv or q_proj, k_proj and v_proj, got Attention"),
    ],
)
def test_other_parts_are_refused_by_name(name: str, value: Any, words: str) -> None:
    module = copy.deepcopy(Attention(24, 3))
    setattr(module, name, value)
    with pytest.raises(ValueError, match=f"model.blocks: .*{words}"):
        attention_parts(module, "model.blocks")


def test_rotary_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention: .*got Turning with rotary positions"):
        attention_parts(Turning(24, 3))


def test_an_output_that_its_parts_do_not_make_is_refused() -> None:
    module = Attention(24, 3)
    with pytest.raises(ValueError, match=r"attention: must compute .*got Attention, whose output is .* away"):
        refuse_other_formula(module, X, module(X) * 1.01)


@pytest.mark.parametrize(
    ("drop", "expected"), [(nn.Dropout(0.25), 0.25), (nn.Identity(), 0.0), (0.5, 0.5), (None, 0.0)]
)
def test_dropout_is_a_module_a_number_or_nothing(drop: Any, expected: float) -> None:
    module = Attention(24, 3)
    module.__dict__.pop("attn_drop", None)
    module._modules.pop("attn_drop", None)
    if drop is not None:
        module.attn_drop = drop
    assert attention_parts(module).dropout == expected
