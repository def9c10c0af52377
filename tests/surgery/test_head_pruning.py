"""Pruning: which heads are degenerate, and the model after their removal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnconv import GeneralizedQuadratic, Quadratic, SelfAttention2d, from_conv
from attnconv.encodings import ENCODING_NAMES, SeparableEncoding
from attnconv.inspect.auditing import kernel_span
from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.operation_counts import flops_paper, parameters
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings
from attnconv.surgery import degenerate_heads, prune_heads, settings_after_pruning
from attnconv.surgery.head_pruning import attention_layers
from tests.tolerances import tolerance

DOUBLE = torch.float64
PAPER_REMOVED = (2, 4, 1, 2, 6, 0)  # heads removed from the six layers in Appendix E
SMALL = AttentionSettings(encoding="quadratic-generalized", layers=3, heads=5, width=16, mlp_width=16, dropout=0.0)


def planted(*roots: Tensor | tuple[float, float]) -> GeneralizedQuadratic:
    """Return heads with these root precisions, or with these diagonals of rotated root precisions."""
    angle = torch.tensor(0.7, dtype=DOUBLE)
    turn = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
    encoding = GeneralizedQuadratic(len(roots)).to(DOUBLE)
    with torch.no_grad():
        for head, root in enumerate(roots):
            plain = root if isinstance(root, Tensor) else turn @ torch.diag(torch.tensor(root, dtype=DOUBLE)) @ turn.mT
            encoding.root_precision[head] = plain
    return encoding


class TestDegenerateHeads:
    def test_planted_heads_are_exactly_those_found(self) -> None:
        encoding = planted(
            (1.0, 1.0),
            (1.0, 0.0),  # singular: a line
            (1.0, 1.001e5**-0.5),
            (1.0, 0.999e5**-0.5),
            (1.0, 1001**-0.5),
            (1.0, 999**-0.5),
            (0.0, 0.0),  # constant
            (0.99e-5**0.5, 0.99e-5**0.5),
            (1.01e-5**0.5, 1.01e-5**0.5),
            (1e4, 1e4),  # a head at a single position is not degenerate
        )
        assert degenerate_heads(encoding) == (1, 2, 6, 7)
        assert degenerate_heads(encoding, "code") == (1, 2, 3, 4, 6, 7)
        layer = SelfAttention2d(3, 4, 10, encoding=encoding)
        assert degenerate_heads(layer, "code") == (1, 2, 3, 4, 6, 7)

    def test_the_condition_number_is_that_of_the_covariance(self) -> None:
        root = torch.randn(50, 2, 2, generator=torch.Generator().manual_seed(3)).double()
        root[::2, 0] *= 0.003
        encoding = planted(*root)
        condition = torch.linalg.cond(encoding.gaussians().covariance)
        expected = tuple((condition > 1e3).nonzero().flatten().tolist())
        assert 20 < len(expected) < 30
        assert degenerate_heads(encoding, "code") == expected

    def test_a_line_in_single_precision_is_found(self) -> None:
        """Rounding of S S^T in float32 would leave a condition number of about 1e7, or a negative eigenvalue."""
        encoding = planted(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).float()
        assert degenerate_heads(encoding) == (0,)

    def test_round_and_diagonal_heads(self) -> None:
        encoding = Quadratic(3)
        encoding.spread.data[:, 0] = torch.tensor([1.0, -0.001, -1.0])
        assert degenerate_heads(encoding) == (1,)
        diagonal = Quadratic(2, diagonal=True)
        diagonal.spread.data.copy_(torch.tensor([[1.0, -1e-3], [1.0, 1.0]]))
        assert degenerate_heads(diagonal) == (0,)

    @pytest.mark.usefixtures("unhooked")
    def test_what_is_refused(self) -> None:
        encoding = planted((1.0, 1.0), (1.0, 1.0))
        with pytest.raises(ValueError, match=r"criterion: .*got 'best'"):
            degenerate_heads(encoding, "best")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"criterion: .*got \['code'\]"):
            degenerate_heads(encoding, ["code"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"attention: .*got LearnedRelative"):
            degenerate_heads(SelfAttention2d(3, 4, 2, encoding="learned"))
        encoding.root_precision.data[1, 0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"attention: .*got NaN"):
            degenerate_heads(encoding)


class TestPruneHeads:
    @pytest.mark.parametrize("name", ENCODING_NAMES)
    @pytest.mark.parametrize("head_channels", [None, 3])
    def test_equals_the_model_with_those_heads_weights_zero(self, name: str, head_channels: int | None) -> None:
        model = nn.Sequential(
            SelfAttention2d(12, 12, 4, encoding=name, head_channels=head_channels, dtype=DOUBLE),
            nn.ReLU(),
            SelfAttention2d(12, 6, 3, encoding=name, stride=2, border="reflect", padding=1, dtype=DOUBLE),
        )
        x = torch.randn(2, 12, 5, 6, dtype=DOUBLE)
        before = model(x)
        pruned = prune_heads(model, {"0": [2, 0], "2": (1,)})
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
        with torch.no_grad():
            model.get_parameter("0.weight" if head_channels is None else "0.output_weight")[[0, 2]] = 0
            model.get_parameter("2.weight")[1] = 0
        torch.testing.assert_close(pruned(x), model(x), **tolerance(DOUBLE))
        assert (pruned(x) - before).abs().max() > 1e-3

    def test_grouped_hard_and_transposed_layers(self) -> None:
        for conv in (nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 6, 3, stride=2)):
            layer = from_conv(conv.double())
            pruned = prune_heads(layer, {"": [4, 8]})
            x = torch.randn(1, 4, 5, 6, dtype=DOUBLE)
            assert layer.weight is not None
            layer.weight.data[[4, 8]] = 0
            torch.testing.assert_close(pruned(x), layer(x), **tolerance(DOUBLE, scale=10))
            assert not pruned.encoding.get_parameter("centres").requires_grad  # frozen parameters stay frozen
            assert pruned.hard_shifts() == tuple(
                shift for i, shift in enumerate(layer.hard_shifts() or ()) if i not in (4, 8)
            )

    def test_layers_without_removed_heads_keep_everything(self) -> None:
        model = nn.Sequential(SelfAttention2d(3, 3, 2), SelfAttention2d(3, 3, 2))
        pruned = prune_heads(model, {"1": []})
        assert [tuple(p.shape) for p in pruned.parameters()] == [tuple(p.shape) for p in model.parameters()]
        assert pruned is not model

    def test_it_trains_on(self) -> None:
        pruned = prune_heads(nn.Sequential(SelfAttention2d(3, 4, 5, encoding="learned")), {"0": [1, 3]})
        pruned(torch.randn(1, 3, 4, 4)).square().sum().backward()
        assert all(parameter.grad is not None and parameter.is_leaf for parameter in pruned.parameters())

    def test_what_is_refused(self) -> None:
        model = nn.Sequential(SelfAttention2d(3, 4, 2))
        with pytest.raises(ValueError, match=r"heads\['0'\]: .*got \[1, 0\]"):
            prune_heads(model, {"0": [1, 0]})
        with pytest.raises(ValueError, match=r"heads\['0'\]: .*from 0 to 1, got \[-1\]"):
            prune_heads(model, {"0": [-1]})
        with pytest.raises(ValueError, match=r"heads: .*got 'encoder'"):
            prune_heads(model, {"encoder": [0]})

    def test_an_encoding_of_ones_own_has_to_say_what_belongs_to_a_head(self) -> None:
        class Sharp(SeparableEncoding):
            def __init__(self) -> None:
                super().__init__(3, 2)
                self.slopes = nn.Parameter(torch.arange(1.0, 4.0))

            def axis_scores(self, axis: int, shifts: Tensor) -> Tensor:
                return -self.slopes[:, None, None] * shifts.abs()

        class Said(Sharp):
            by_head = ("slopes",)

        with pytest.raises(ValueError, match=r"by_head: .*got None in Sharp"):
            prune_heads(SelfAttention2d(3, 4, 3, encoding=Sharp()), {"": [1]})
        pruned = prune_heads(SelfAttention2d(3, 4, 3, encoding=Said()), {"": [1]})
        assert pruned.encoding.get_parameter("slopes").tolist() == [1.0, 3.0]


class TestWhatPrunedLayersCanExpress:
    """Layers with nine hard heads, which can express every 3 x 3 kernel before pruning."""

    def model(self, *, alpha: float | None = None) -> nn.Sequential:
        """Return three layers with nine heads of `from_conv`, one uniform head and one stripe."""
        layers = []
        for _ in range(3):
            heads = from_conv(nn.Conv2d(4, 4, 3, padding=1).double(), alpha=alpha).encoding
            assert isinstance(heads, Quadratic)
            encoding = planted(*([(1.0, 1.0)] * 9), (0.0, 0.0), (1.0, 0.0))
            with torch.no_grad():
                encoding.centres[:9] = heads.centres
                encoding.root_precision[:9] = torch.diag_embed(heads.spread.expand(9, 2))
            layers.append(SelfAttention2d(4, 4, 11, encoding=encoding, dtype=DOUBLE))
        return nn.Sequential(*layers)

    def able(self, model: nn.Module) -> list[str]:
        return [name for name, layer in attention_layers(model).items() if kernel_span(layer, (9, 8)).expresses]

    @pytest.mark.parametrize("alpha", [None, 40.0])
    def test_they_lose_nothing_with_planted_heads(self, alpha: float | None) -> None:
        model = self.model(alpha=alpha)
        assert self.able(model) == ["0", "1", "2"]
        removed = {name: degenerate_heads(layer) for name, layer in attention_layers(model).items()}
        assert removed == dict.fromkeys("012", (9, 10))
        assert self.able(prune_heads(model, removed)) == ["0", "1", "2"]

    def test_a_layer_that_loses_a_tap_is_the_one_named(self) -> None:
        """Head 5 of layer 1 attends to one position (large spreads), but is a stripe by the threshold of the paper."""
        model = self.model(alpha=40.0)
        with torch.no_grad():
            encoding = attention_layers(model)["1"].encoding
            encoding.get_parameter("root_precision")[5] = torch.tensor([[9.0, 0.0], [0.0, 9e3]], dtype=DOUBLE)
        assert self.able(model) == ["0", "1", "2"]
        removed = {name: degenerate_heads(layer) for name, layer in attention_layers(model).items()}
        assert removed == {"0": (9, 10), "1": (5, 9, 10), "2": (9, 10)}
        pruned = prune_heads(model, removed)
        assert self.able(pruned) == ["0", "2"]
        missed = kernel_span(attention_layers(pruned)["1"], (9, 8)).missed
        # One of nine taps has no head: the residual is the square root of its fraction.
        assert missed == pytest.approx((1 / 9) ** 0.5, rel=1e-6)


class TestPrunedModels:
    def test_counts_are_the_papers(self) -> None:
        """Table 4 has 9.7 M parameters; compare the formula and the pruned module."""
        settings = PRESETS["quadratic-generalized"]
        assert isinstance(settings, AttentionSettings)
        with torch.device("meta"):
            model = build(settings)
        heads = {f"blocks.{index}.attention": range(count) for index, count in enumerate(PAPER_REMOVED)}
        pruned = prune_heads(model, heads)
        after = settings_after_pruning(settings, pruned)
        assert after.heads == (7, 5, 8, 7, 3, 9)
        assert parameters(after) == sum(p.numel() for p in pruned.parameters()) == 9_686_916
        assert flops_paper(after) == 4_947_156_800

    def test_a_checkpoint_reloads_bit_for_bit(self, tmp_path: Path) -> None:
        model = build(SMALL).eval()
        assert settings_after_pruning(SMALL, model) == SMALL
        pruned = prune_heads(model, {"blocks.0.attention": [0, 4], "blocks.2.attention": [1]})
        settings = settings_after_pruning(SMALL, pruned)
        assert settings == replace(SMALL, heads=(3, 5, 4))
        save_weights(tmp_path / "pruned.safetensors", pruned, settings)
        again = load(tmp_path / "pruned.safetensors")
        assert again.settings == settings
        x = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(again.model(x), pruned(x), rtol=0, atol=0)
