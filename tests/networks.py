"""Networks that no installed library has: VGG-11 and a U-Net with transposed convolutions."""

import torch
from torch import Tensor, nn


def vgg11() -> nn.Module:
    """Return VGG-11, that is eight 3 x 3 convolutions and max pooling, with one linear layer instead of three."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if isinstance(outputs, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class UNet(nn.Module):
    """U-Net of three levels; `output_size` selects an even or odd size for each transposed convolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 3, stride=2, padding=1) for w in widths[1::-1])
        self.join = nn.ModuleList(nn.Conv2d(2 * w, w, 3, padding="same", padding_mode="reflect") for w in widths[1::-1])
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for block in self.down:
            x = block(x if not levels else nn.functional.max_pool2d(x, 2, ceil_mode=True))
            levels.append(x)
        levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            level = levels.pop()
            x = torch.relu(join(torch.cat((up(x, output_size=level.shape[2:]), level), 1)))
        out: Tensor = self.head(x)
        return out
