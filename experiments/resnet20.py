"""ResNet-20 for CIFAR-10 with parameter-free shortcuts, and the tensor names of a published checkpoint."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Residual block of two 3 x 3 convolutions; if the size changes, the shortcut subsamples and pads channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.missing or self.stride > 1:
            half = self.missing // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.missing - half))
        return F.relu(x + y)


class ResNet20(nn.Module):
    """ResNet-20 with three stages of three blocks and 269,722 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(
            *(Block(16 if first else 32, 32, 2 if first else 1) for first in (True, False, False))
        )
        self.layer3 = nn.Sequential(
            *(Block(32 if first else 64, 64, 2 if first else 1) for first in (True, False, False))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        out: Tensor = self.linear(y.mean((2, 3)))
        return out


def pretrained(file: Path) -> ResNet20:
    """Return the network with the weights of a checkpoint, in evaluation mode."""
    state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return model.eval()
