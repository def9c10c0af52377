"""Published initialisations, compared with independent computations in NumPy, on three families of models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attnconv.inspect.module_adapters import vit_parts
from attnconv.surgery import initialize
from attnconv.surgery.initialisation import Method
from experiments.small_vit import SmallViT
from tests.small_hf_vit import SmallHfViT
from tests.small_torchvision_vit import SmallTorchvisionViT

MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: SmallViT(dim=72, num_heads=9),
    "hf": lambda: SmallHfViT(SmallViT(dim=72, num_heads=9)),
    "torchvision": SmallTorchvisionViT,
}
ORDER = [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def array(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().numpy()


def of_heads(weight: torch.Tensor, heads: int) -> Any:
    return array(weight).reshape(heads, -1, weight.shape[1])


def best_rank(matrix: Any, rank: int) -> Any:
    left, values, right = np.linalg.svd(matrix)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def test_mimetic(model: nn.Module) -> None:
    initialize(model, "mimetic", generator=seeded())
    numbers = seeded()
    for block in vit_parts(model).blocks:
        parts = block.parts
        c = parts.out.weight.shape[0]
        for query, key in zip(
            of_heads(parts.query.weight, parts.heads), of_heads(parts.key.weight, parts.heads), strict=True
        ):
            z = array(torch.randn(c, c, dtype=torch.float64, generator=numbers)) / np.sqrt(c)
            wanted = best_rank(0.7 * z + 0.7 * np.eye(c), parts.head_dim)
            np.testing.assert_allclose(query.T @ key, wanted, atol=1e-6)
            np.testing.assert_allclose(query @ query.T, key @ key.T, atol=1e-6)  # square roots of the same values
        z = array(torch.randn(c, c, dtype=torch.float64, generator=numbers)) / np.sqrt(c)
        found = array(parts.out.weight) @ array(parts.value.weight)
        np.testing.assert_allclose(found, 0.4 * z - 0.4 * np.eye(c), atol=1e-6)


def test_impulse(model: nn.Module) -> None:
    found = initialize(model, "impulse", generator=seeded())
    numbers, parts = seeded(), vit_parts(model)
    height, width = parts.grid
    n, c = height * width, parts.patches.out_channels
    positions = 0.36 * array(torch.randn(1, n, c, dtype=torch.float64, generator=numbers))[0]
    np.testing.assert_allclose(array(parts.positions)[0, -n:], positions, atol=1e-6)
    positions = array(parts.positions)[0, -n:]
    normed = positions - positions.mean(1, keepdims=True)
    normed /= np.sqrt((normed**2).mean(1, keepdims=True) + 1e-5)
    for name, block in zip(found, parts.blocks, strict=True):
        k, heads = block.parts.head_dim, block.parts.heads
        noise = torch.nn.init.trunc_normal_(torch.empty(heads, n, n, dtype=torch.float64), std=0.6, generator=numbers)
        left, values, right = np.linalg.svd(normed, full_matrices=False)
        inverse = (right[:k].T / values[:k]) @ left[:, :k].T
        pairs = zip(of_heads(block.parts.query.weight, heads), of_heads(block.parts.key.weight, heads), strict=True)
        for head, (query, key) in enumerate(pairs):
            down, across = ORDER[head % 9]
            assert found[name].shifts[head].tolist() == [down, across]
            target = 3 * array(noise[head])
            for row in range(height):
                for column in range(width):
                    if 0 <= row + down < height and 0 <= column + across < width:
                        target[row * width + column, (row + down) * width + column + across] = 1000
            wanted = best_rank(inverse @ target @ inverse.T, k)
            np.testing.assert_allclose(np.linalg.norm(query), 7, atol=1e-6)
            np.testing.assert_allclose(np.linalg.norm(key), 7, atol=1e-6)
            scale = 49 / np.linalg.svd(wanted, compute_uv=False).sum()
            np.testing.assert_allclose(query.T @ key, scale * wanted, atol=1e-6)
        torch.randn(c, c, dtype=torch.float64, generator=numbers)  # of the values


def test_conditioned(model: nn.Module) -> None:
    before = [array(block.parts.out.weight).copy() for block in vit_parts(model).blocks]
    initialize(model, "conditioned", generator=seeded())
    for block, out in zip(vit_parts(model).blocks, before, strict=True):
        for part in (block.parts.query, block.parts.key):
            for rows in of_heads(part.weight, block.parts.heads):
                np.testing.assert_allclose(rows @ rows.T, np.eye(block.parts.head_dim), atol=1e-6)
        assert (array(block.parts.value.weight) == np.eye(len(out))).all()
        assert (array(block.parts.out.weight) == out).all()


@pytest.mark.parametrize("method", ["mimetic", "impulse", "conditioned"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_seed_gives_the_same_weights_in_every_dtype(make: Callable[[], nn.Module], method: Method) -> None:
    models = [make(), make().double()]
    for model in models:
        initialize(model, method, generator=seeded())
    for name in ("query", "key", "value"):
        single, double = (getattr(vit_parts(model).blocks[0].parts, name).weight.detach() for model in models)
        rounded = 1e-5 if method == "impulse" else 0  # its weights depend on the rounded position embeddings
        torch.testing.assert_close(single, double.float(), rtol=0, atol=rounded)


@pytest.mark.parametrize("options", [{"values": "unchanged"}, {"attention": "unchanged"}, {"layers": [1]}])
def test_only_the_chosen_parts_change(options: dict[str, Any]) -> None:
    model, original = (SmallViT(dim=72, num_heads=9) for _ in range(2))
    model.load_state_dict(original.state_dict())
    initialize(model, "mimetic", **options)
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, original.state_dict()[name])
    }
    wanted = {
        "values": {"blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"},
        "attention": {f"blocks.{i}.attn.{name}.weight" for i in (0, 1) for name in ("qkv", "proj")},
        "layers": {f"blocks.1.attn.{name}.weight" for name in ("qkv", "proj")},
    }
    assert changed == wanted[next(iter(options))]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"method": "xavier"}, "method"),
        ({"attention": "none"}, "attention"),
        ({"values": "eye"}, "values"),
        ({"positions": "reserved", "method": "mimetic"}, "positions"),
        ({"positions": "normal"}, "positions"),
        ({"values": torch.zeros(72, 72, 3, 3), "method": "mimetic"}, "values"),
        ({"identity": float("nan")}, "identity"),
        ({"mass": 1.0}, "mass"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_what_is_refused(options: dict[str, Any], argument: str) -> None:
    model = SmallViT(dim=72, num_heads=9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        initialize(model, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_impulse_needs_as_many_tokens_as_channels_per_head() -> None:
    model = SmallViT(dim=72, num_heads=4, patch=8)
    with pytest.raises(ValueError, match=r"^attention: 'impulse' needs .*\(18\), got 16"):
        initialize(model, "impulse")
