"""ResNet-18 of He et al. (2015) with the usual stem for CIFAR, one 3x3 convolution of stride 1 and no pooling.

An image of 32 x 32 pixels is still 32 x 32 in the first stage and 4 x 4 in the last. 11,173,962 parameters.
"""

from typing import final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.settings import check
from attnconv.models.image_size_checks import check_images
from attnconv.models.settings import ResNetSettings


@final
class ResNet(nn.Module):
    """Stem, stages of basic blocks, mean over positions, linear head.

    Args:
        settings: Widths and numbers of blocks of the stages, image channels and classes.

    Raises:
        ValueError: The settings are not legal; the message lists all problems.

    Example:
        >>> import torch
        >>> model = ResNet(ResNetSettings(widths=(8, 16), blocks=(1, 1)))
        >>> model(torch.zeros(2, 3, 32, 24)).shape
        torch.Size([2, 10])
    """

    def __init__(self, settings: ResNetSettings) -> None:
        super().__init__()
        check(settings, "settings")
        self.image_channels = settings.image_channels
        self.stem = nn.Conv2d(settings.image_channels, settings.widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(settings.widths[0])
        self.stages = nn.Sequential()
        before = settings.widths[0]
        for stage, (width, blocks) in enumerate(zip(settings.widths, settings.blocks, strict=True)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                self.stages.append(BasicBlock(before, width, stride=stride))
                before = width
        self.head = nn.Linear(before, settings.classes)

    def forward(self, images: Tensor) -> Float[Tensor, "b classes"]:
        """Logits of images (b, c, height, width) of any size."""
        check_images(images, channels=self.image_channels)
        hidden = self.stages(F.relu(self.stem_norm(self.stem(images))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


@final
class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), two 3x3 convolutions, the first one with the stride.

    The shortcut is the identity where shapes agree, elsewhere a 1x1 convolution with a norm.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.convolution2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: Float[Tensor, "b c height width"]) -> Float[Tensor, "b d new_height new_width"]:
        branch = F.relu(self.norm1(self.convolution1(x)))
        branch = self.norm2(self.convolution2(branch))
        return F.relu(self.shortcut(x) + branch)
