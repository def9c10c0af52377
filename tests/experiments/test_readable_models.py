"""`experiments.readable_models` tells attention among tokens from other attention."""

import torch
from torch import Tensor, nn

from experiments.readable_models import Entry, examine


class Mixed(nn.Module):
    """Attention among tokens, among channels, and with maps that do not sum to 1."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.parts = nn.Sequential(*map(Part, parts))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        return out


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        if self.kind == "channels":
            tokens = tokens.mT
        maps = (tokens @ tokens.mT).softmax(-1)
        out = (maps * 2 if self.kind == "doubled" else maps) @ tokens
        return (out if self.kind == "channels" else out.mT).unflatten(2, x.shape[2:])


def entry(*kinds: str) -> Entry:
    return examine("none", "mixed", Mixed(*kinds), torch.randn(1, 3, 4, 5), {})


def test_verdicts() -> None:
    assert entry("tokens").verdict == entry("tokens", "channels").verdict == "whole"
    assert entry("tokens", "doubled").verdict == "partly"
    assert entry("doubled").verdict == "refused"
    assert entry("channels").verdict == entry().verdict == "no attention among tokens"
    assert entry("tokens", "doubled").row().startswith("| none | mixed | 1 | partly | it changes or mixes its maps")
