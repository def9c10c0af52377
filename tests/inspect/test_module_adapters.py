"""The parts of attention modules: both layouts reproduce the output, and modules with other parts are rejected."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect.module_adapters import attention_parts, first_tensor
from attnconv.surgery.replaceable_attention import refuse_other_formula
from experiments.small_vit import Attention
from tests.inspect.sharp_vit import layer_tokens
from tests.small_hf_vit import PairAttention
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
    torch.testing.assert_close(parts.finish(rows @ values), expected, **tolerance(torch.float32))
    refuse_other_formula(replace(layer_tokens(module, x, (2, 5)), outputs=expected))


def test_first_tensor_of_a_mapping() -> None:
    logits = torch.ones(2)
    assert first_tensor({"loss": None, "logits": logits}) is logits


def test_parts_are_the_module_s_own_weights() -> None:
    for module in (Attention(24, 3), PairAttention(Attention(24, 3))):
        parts = attention_parts(module)
        with torch.no_grad():
            for part in (parts.query, parts.key, parts.value):
                part.weight.zero_()
                part.bias.zero_()  # type: ignore[union-attr]
        torch.testing.assert_close(first_tensor(module(X)), parts.out.bias.expand(2, 10, 24))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gate", nn.Linear(24, 24), "got Attention with gate"),
        ("relative_position_bias_table", nn.Parameter(torch.zeros(9, 3)), "with relative_position_bias_table"),
        ("q_norm", nn.LayerNorm(24), "norms over several heads"),
        ("proj", nn.Linear(30, 24), "width is not 24"),
        ("num_heads", None, "got Attention with no num_heads"),
        ("qkv", None, "got Attention with no qkv or q_proj, k_proj and v_proj"),
    ],
)
def test_other_parts_are_refused_by_name(name: str, value: Any, words: str) -> None:
    module = copy.deepcopy(Attention(24, 3))
    setattr(module, name, value)
    with pytest.raises(ValueError, match=f"model.blocks: .*{words}"):
        attention_parts(module, "model.blocks")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gate", nn.Linear(24, 24), "with gate"),
        ("logit_scale", nn.Parameter(torch.zeros(3)), "with logit_scale"),
        ("rel_pos", nn.Linear(2, 3), "with rel_pos"),
        ("relative_position_bias_table", nn.Parameter(torch.zeros(3, 9, 9)), "with relative_position_bias_table"),
        ("q_bias", nn.Parameter(torch.zeros(24)), "with q_bias"),
        ("norm", nn.LayerNorm(8), "with a norm .*24 channels"),
    ],
)
def test_parts_of_no_known_attention_are_refused(name: str, value: Any, words: str) -> None:
    module = Attention(24, 3)
    setattr(module, name, value)
    with pytest.raises(ValueError, match=f"attention: must be a softmax attention module .*{words}"):
        attention_parts(module)


class Tabled(Attention):
    """Attention with a bias by relative position of tokens, a norm before `proj`, and biases outside `qkv`."""

    def __init__(self) -> None:
        super().__init__(24, 3)
        self.qkv = nn.Linear(24, 72, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(24)) for _ in range(2))
        self.relative_position_bias_table = nn.Parameter(torch.randn(19, 3))
        self.relative_position_index = (torch.arange(10)[:, None] - torch.arange(10) + 9).flatten()
        norm = nn.LayerNorm(24)
        nn.init.normal_(norm.weight)
        self.norm = norm  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros(24), self.v_bias))
        query, key, value = (self.qkv(x) + bias).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        raised = self.relative_position_bias_table[self.relative_position_index].reshape(10, 10, 3).permute(2, 0, 1)
        out = ((query @ key.mT * self.scale + raised).softmax(-1) @ value).transpose(1, 2).flatten(2)
        projected: Tensor = self.proj(self.norm(out))
        return projected


def test_tables_norms_and_biases_apart_make_the_output() -> None:
    assert_makes(Tabled(), X)


@pytest.mark.parametrize("bias", [False, True])
def test_torch_s_own_parts_make_the_output(bias: bool) -> None:
    module = nn.MultiheadAttention(24, 3, bias=bias, batch_first=True)
    parts = attention_parts(module)
    rows, values = parts.maps_and_values(X)
    torch.testing.assert_close(parts.finish(rows @ values), module(X, X, X)[0], **tolerance(torch.float32))
    for more in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match=r"got MultiheadAttention with .*keys"):
            attention_parts(nn.MultiheadAttention(24, 3, **more))
    with pytest.raises(ValueError, match="with no qkv or q_proj"):
        attention_parts(nn.MultiheadAttention(24, 3, kdim=12))


def test_an_output_that_its_parts_do_not_make_is_refused() -> None:
    module = Attention(24, 3)
    with pytest.raises(ValueError, match=r"attention: .*got Attention, whose output differs"):
        refuse_other_formula(replace(layer_tokens(module, X, (2, 5)), outputs=module(X) * 1.01))


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


def test_parts_that_do_not_fit_are_refused() -> None:
    module = Tabled()
    with pytest.raises(ValueError, match=r"attention: .*got Tabled, "):
        refuse_other_formula(layer_tokens(module, X[:, :7], (1, 7)))
