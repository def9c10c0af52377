"""`experiments.fast_recast` from its settings to its table, at a tiny size, and the parts of its training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attnconv.convert import recast
from attnconv.data.image_set import ImageSet
from attnconv.layers import SelfAttention
from attnconv.training.run_recorder import save_state
from experiments import fast_net, fast_recast
from experiments.common import Images
from experiments.fast_net import FastNet, FastSettings, batches, logits_of, meet, shifted, train, triangular, whiten
from experiments.fast_recast import Settings, main
from tests.tolerances import tolerance


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CIFAR-10 by random images."""

    def made(_: Path, train: dict[str, slice], test: int, *, held_out: int) -> dict[str, Images]:
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, n in {"train": train["train"].stop, "test": test}.items():
            pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
            found[name] = Images(ImageSet(pixels, torch.arange(n) % 10), (0.5,) * 3, (0.25,) * 3)
        return found

    monkeypatch.setattr(fast_recast, "cifar10_images", made)


def settings(folder: Path) -> Settings:
    return Settings(
        root=folder,
        preset="tiny",
        out=folder / "out",
        kept=folder / "kept",
        images=40,
        test_images=8,
        compare=2,
        tuning_epochs=1,
        tuning_images=4,
        device="cpu",
    )


def test_from_beginning_to_end_and_kept(cifar: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = main(settings(tmp_path))
    assert first.cnn == first.attention
    assert first.difference <= tolerance(torch.float32)["atol"]
    assert first.softmax_difference <= tolerance(torch.float32)["atol"]
    assert first.softmax == first.few
    assert set(first.tuned) == {"soft before", "CNN after", "soft after", "farthest move"}
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["network"]["widths"] == [4, 4, 4]
    assert "largest difference of a logit" in (tmp_path / "out" / "table.md").read_text()
    monkeypatch.setattr(fast_recast, "train", None)  # a call would fail
    assert main(settings(tmp_path)) == [first]
    (again,) = main(replace(settings(tmp_path), compare=1, tuning_epochs=0))
    assert (again.cnn, again.train_seconds) == (first.cnn, first.train_seconds)


def test_weights_of_other_settings_are_not_taken(cifar: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(settings(tmp_path), tuning_epochs=0)
    (first,) = main(chosen)
    other = replace(fast_recast.PRESETS["tiny"], rate=0.5)
    monkeypatch.setattr(fast_recast, "PRESETS", {"tiny": other})
    (second,) = main(chosen)
    assert first.largest_logit != second.largest_logit


def test_nothing_is_left_that_mixes_places_by_weights_but_attention() -> None:
    hard = recast(FastNet((4, 4, 4)).eval())
    kinds = {type(module) for module in hard.modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    assert kinds == {nn.Linear}
    assert sum(isinstance(module, SelfAttention) for module in hard.modules()) == 7


def test_whitening_gives_patches_the_identity_as_covariance() -> None:
    torch.manual_seed(0)
    images = torch.randn(20, 3, 16, 16) @ torch.randn(16, 16)  # neighbours are correlated
    net = FastNet((4, 4, 4))
    whiten(net, images)
    made = net.whiten(images).detach().permute(0, 2, 3, 1).flatten(0, 2)
    half = made.shape[1] // 2
    torch.testing.assert_close(made[:, :half], -made[:, half:], **tolerance(torch.float32))
    covariance = made[:, :half].T @ made[:, :half] / len(made)
    torch.testing.assert_close(covariance, torch.eye(half), rtol=0.0, atol=0.02)  # the lower bound of variances
    assert not net.whiten.weight.requires_grad


def test_the_rate_is_a_triangle() -> None:
    rates = [triangular(step / 100) for step in range(101)]
    assert max(rates) == 1.0
    top = rates.index(1.0)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_mirroring_alternates() -> None:
    images = torch.randn(6, 3, 4, 4)
    chosen = FastSettings(epochs=2, batch_size=6, shift=0)
    seen = []
    for epoch in range(2):
        ((x, y),) = batches(images, torch.arange(6), chosen, seed=0, epoch=epoch)
        seen.append(x[y.argsort()])
    assert not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(seen[0], seen[1].flip(-1))


def test_shifted_windows_are_the_image_s() -> None:
    padded = torch.arange(36.0).reshape(1, 1, 6, 6).expand(50, 3, 6, 6)
    taken = shifted(padded, 1, torch.Size((4, 4)), torch.Generator().manual_seed(0))
    corners = set(taken[:, 0, 0, 0].int().tolist())
    assert corners == {6 * row + column for row in range(3) for column in range(3)}
    torch.testing.assert_close(taken[:, 1, 1, 2] - taken[:, 1, 0, 0], torch.full((50,), 8.0))


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 1.0), (0.25, 1.5), (1.0, 3.0)])
def test_slow_and_fast_weights_meet(share: float, wanted: float) -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    slow = {"weight": torch.ones(1, 1)}
    meet(net, slow, share)
    assert (float(net.weight.detach()), float(slow["weight"])) == (wanted, wanted)


def test_a_training_shorter_than_the_average_s_period_keeps_its_steps() -> None:
    torch.manual_seed(0)
    net = FastNet((4, 4, 4))
    before = net.out.weight.detach().clone()
    train(net, torch.randn(8, 3, 32, 32), torch.arange(8), FastSettings(epochs=1, batch_size=4, rate=0.1), seed=0)
    assert float((net.out.weight.detach() - before).abs().max()) > 1e-3


@pytest.mark.parametrize("hardest", [None, 2])
def test_interrupted_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardest: int | None) -> None:
    images, labels = torch.randn(12, 3, 32, 32), torch.arange(12) % 10
    chosen = FastSettings(epochs=3, batch_size=4, rate=0.1, slow_every=2, hardest=hardest, proxy_widths=(4, 4, 4))

    def run(state: Path | None) -> FastNet:
        torch.manual_seed(0)
        net = FastNet((4, 4, 4), depth=3)
        losses = train(net, images, labels, chosen, seed=0, state=state).loss
        assert len(losses) == chosen.epochs
        return net

    whole, file = run(None), tmp_path / "a.state"
    saves = iter([True, False])

    def interrupted(path: Path, state: dict[str, object]) -> None:
        if not next(saves):
            raise KeyboardInterrupt
        save_state(path, state)

    monkeypatch.setattr(fast_net, "save_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(file)
    monkeypatch.undo()
    for name, value in run(file).state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=0, atol=0)


def test_the_proxy_selects_the_images_with_the_largest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an image is its first pixel."""
    seen: dict[int, list[torch.Tensor]] = {3: [], 8: []}  # number of selected images and of all images

    def losses(net: FastNet, x: torch.Tensor, *_: object) -> torch.Tensor:
        seen[len(x)].append(x[:, 0, 0, 0].sort().values)
        return x[:, 0, 0, 0] + 0 * net.out.weight.sum()

    monkeypatch.setattr(fast_net, "losses", losses)
    images = torch.randn(16, 3, 1, 1).expand(-1, -1, 32, 32)
    chosen = FastSettings(epochs=1, batch_size=8, rate=0.1, hardest=3, proxy_widths=(4, 4, 4))
    train(FastNet((4, 4, 4)), images, torch.arange(16) % 10, chosen, seed=0)
    for selected, given in zip(seen[3], seen[8], strict=True):
        torch.testing.assert_close(selected, given[-3:], rtol=0, atol=0)
    assert len(seen[3]) == 2


def test_it_learns() -> None:
    """The class of an image is its brightest channel; accuracy rises from one third to above 70 %."""
    torch.manual_seed(0)
    labels = torch.arange(240) % 3
    images = torch.randn(240, 3, 32, 32) + 0.5 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    net = FastNet((6, 6, 6), classes=3)
    train(net, images, labels, FastSettings(epochs=3, batch_size=20, rate=0.03, cutout=4), seed=0)
    right = (logits_of(net, images, several=True).argmax(1) == labels).double().mean()
    assert float(right) > 0.7
