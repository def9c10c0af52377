"""Statistics that training on CIFAR-10 depends on, measured on the images."""

from pathlib import Path

import pytest
import torch

from attnconv.data.cifar import CIFARS, read_cifar
from attnconv.data.image_set import channel_statistics
from attnconv.data.settings import DataSettings


def test_cifar_10(shared_data: Path) -> None:
    """The files next to the checkout have the counts per class and the statistics that normalisation uses."""
    root = shared_data / "cifar10"
    if not root.is_dir():
        pytest.skip("the shared data folder does not contain cifar10")
    facts = CIFARS["cifar10"]
    sets, _ = read_cifar(facts, DataSettings(root=str(root), download=False))
    train, test = sets["train"], sets["test"]
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    own_deviation = train.images[::25].flatten(2).float().div(255).std(dim=2).mean(dim=0)
    assert facts.paper_std is not None
    torch.testing.assert_close(own_deviation, torch.tensor(facts.paper_std), rtol=0.01, atol=0)
    measured = channel_statistics(train.images)
    torch.testing.assert_close(torch.tensor(measured), torch.tensor((facts.mean, facts.std)), rtol=0, atol=1e-4)
