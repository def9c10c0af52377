import pytest
import torch
from torch import Tensor, nn

from attnconv import SelfAttention1d, SelfAttention2d
from attnconv.inspect import attention_operators, mean_query_maps, visit_attention
from attnconv.operators.base import AttentionOperator
from tests.tolerances import tolerance


def network(encoding: str = "quadratic", *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        SelfAttention2d(4, 4, 2, encoding=encoding),
        nn.Dropout(0.5),
        SelfAttention2d(4, 4, 3, encoding=encoding, stride=stride),
    )


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_operators_are_those_of_the_forward_pass() -> None:
    model, images = network("learned-content").eval(), torch.randn(2, 4, 5, 6)
    operators = attention_operators(model, images)
    assert list(operators) == ["0", "2"]
    first, _, second = model
    assert isinstance(second, SelfAttention2d)
    expected = second.operator(first(images)).to_dense()
    torch.testing.assert_close(operators["2"].to_dense(), expected, **tolerance(torch.float32))
    assert not operators["2"].to_dense().requires_grad


def test_the_model_is_left_as_it_was() -> None:
    model = network()
    model[2].eval()
    modes = [module.training for module in model.modules()]
    attention_operators(model, torch.randn(1, 4, 4, 4))
    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == 0


def test_hooks_go_when_the_model_fails() -> None:
    model = network()
    with pytest.raises(ValueError, match="channels"):
        attention_operators(model, torch.randn(1, 7, 4, 4))
    assert hooks(model) == 0
    assert model.training


def test_hooks_go_when_the_visitor_fails() -> None:
    model = network()

    def fail(name: str, operator: AttentionOperator) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError, match="0"):
        visit_attention(model, torch.randn(1, 4, 4, 4), fail)
    assert hooks(model) == 0


def test_a_model_without_attention() -> None:
    with pytest.raises(ValueError, match=r"model: .*got Linear"):
        attention_operators(nn.Linear(2, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(("encoding", "layers"), [("quadratic", ()), ("learned", ()), ("learned-content", ("0", "2"))])
def test_operators_by_content_have_one_of_each_image(encoding: str, layers: tuple[str, ...]) -> None:
    operators = attention_operators(network(encoding), torch.zeros(2, 4, 4, 4))
    assert tuple(name for name, operator in operators.items() if operator.batch > 1) == layers


@pytest.mark.parametrize("encoding", ["quadratic", "learned-content"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_mean_maps_equal_the_mean_of_the_dense_matrices(encoding: str, batch_size: int) -> None:
    model, images = network(encoding, stride=2).double(), torch.randn(5, 4, 6, 5, dtype=torch.float64)
    first, second = mean_query_maps(model, images, places=[(0.5, 0.5), (0.0, 0.9)], batch_size=batch_size)
    operators = attention_operators(model, images)
    assert (first.name, second.name) == ("0", "2")
    assert first.positions == ((3, 2), (0, 4))
    assert second.positions == ((2, 2), (0, 4))  # the queries are two keys apart
    for maps, queries in ((first, [3 * 5 + 2, 4]), (second, [1 * 3 + 1, 2])):
        dense = operators[maps.name].to_dense().mean(0)  # (h, n, m)
        expected = dense[:, queries].transpose(0, 1).unflatten(-1, (6, 5))
        torch.testing.assert_close(maps.maps, expected, **tolerance(torch.float64))


def test_a_layer_that_runs_twice_keeps_its_last_maps() -> None:
    layer = SelfAttention2d(4, 4, 2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x))
            return out

    (maps,) = mean_query_maps(Twice(), torch.randn(3, 4, 4, 4), places=[(0.5, 0.5)], batch_size=1)
    torch.testing.assert_close(maps.maps.sum((-1, -2)), torch.ones(1, 2).double(), **tolerance(torch.float32))


def test_bad_input() -> None:
    model, images = network(), torch.zeros(2, 4, 4, 4)
    with pytest.raises(ValueError, match=r"images: .*got \(0, 4, 4, 4\)"):
        mean_query_maps(model, images[:0], places=[(0.5, 0.5)])
    with pytest.raises(ValueError, match=r"images: .*got \(4, 4, 4\)"):
        mean_query_maps(model, images[0], places=[(0.5, 0.5)])
    with pytest.raises(ValueError, match=r"places: .*got \[\]"):
        mean_query_maps(model, images, places=[])
    with pytest.raises(ValueError, match=r"places: .* got \[\(0\.5, 1\.0\)\]"):
        mean_query_maps(model, images, places=[(0.5, 1.0)])
    with pytest.raises(ValueError, match=r"batch_size: .*got 0"):
        mean_query_maps(model, images, places=[(0.5, 0.5)], batch_size=0)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SelfAttention1d(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.flatten(2))
            return out

    with pytest.raises(ValueError, match=r"model: .*got a grid of \(16,\) positions"):
        mean_query_maps(Flat(), images, places=[(0.5, 0.5)])
