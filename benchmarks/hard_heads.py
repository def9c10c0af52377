"""Hard attention heads compared with the equivalent convolution.

Every distinct convolution of ResNet-18 is compared with its conversion by `from_conv`, planned for the image's size, in
the forward pass, and in the forward and backward pass. For the first convolution, the gradient of the input is not
computed.

    python -m benchmarks hard-heads
"""

import torch
from torch import Tensor, nn

from attnconv.convert import from_conv
from attnconv.layers import SelfAttention2d
from benchmarks.compare import Step, compare
from benchmarks.results import Results, Row

# Input channels, output channels, kernel size, stride, image size of the network / the convolution, and occurrences.
RESNET18 = (
    (3, 64, 7, 2, 1, 1),
    (64, 64, 3, 1, 4, 4),
    (64, 128, 3, 2, 4, 1),
    (64, 128, 1, 2, 4, 1),
    (128, 128, 3, 1, 8, 3),
    (128, 256, 3, 2, 8, 1),
    (128, 256, 1, 2, 8, 1),
    (256, 256, 3, 1, 16, 3),
    (256, 512, 3, 2, 16, 1),
    (256, 512, 1, 2, 16, 1),
    (512, 512, 3, 1, 32, 3),
)
QUICK = {"batch": 2, "side": 32, "repeats": 2}


def run(*, batch: int = 32, side: int = 224, repeats: int = 9) -> Results:
    """Measure the time of all distinct convolutions, and the total over the network."""
    rows: list[Row] = []
    facts: dict[str, float] = {}
    for words in ("forward", "forward + backward"):
        attention = convolution = 0.0
        for inputs, outputs, kernel, stride, reduction, count in RESNET18:
            sizes = {"inputs": inputs, "outputs": outputs, "kernel": kernel, "stride": stride}
            size = side // reduction
            shape = f"{kernel} x {kernel}" + (f" stride {stride}" if stride > 1 else "")
            found = compare(
                prepare,
                {**sizes, "batch": batch, "side": size, "backward": words != "forward"},
                ("convolution", "attention"),
                case=f"{inputs} to {outputs}, {shape}, {size} x {size}, {words}",
                repeats=repeats,
                slower=True,
            )
            rows += found
            convolution += count * found[0].median
            attention += count * found[1].median
        facts[f"time ratio for all 20 convolutions of the network, {words}"] = attention / convolution
    return Results("hard-heads", "time relative to the convolution", tuple(rows), facts)


def prepare(
    *, inputs: int, outputs: int, kernel: int, stride: int, batch: int, side: int, backward: bool, contender: str
) -> Step:
    """Return a step of the convolution, or of the layer with its weights."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    module = from_conv(convolution) if contender == "attention" else convolution
    if isinstance(module, SelfAttention2d):
        module.plan((side, side), choose="shift")
    torch.manual_seed(1)  # the same images for both contenders
    images = torch.randn(batch, inputs, side, side, requires_grad=backward and inputs != RESNET18[0][0])

    def step() -> list[Tensor]:
        module.zero_grad()
        images.grad = None
        with torch.set_grad_enabled(backward):
            out: Tensor = module(images)
        if backward:
            out.sum().backward()
        return [out.detach()]

    return step
