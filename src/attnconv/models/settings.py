"""Architecture settings of the models, as frozen dataclasses of plain values; does not import torch.

The fields are also flags of the command line, and are stored in `settings.json` and in every checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from attnconv._util.settings import Count, Counts, Fine, Fraction, Magnitude, Problem
from attnconv.encodings.registry import EncodingName

MOST_LAYERS = 1_000
MOST_PARAMETERS = 1_000_000_000

CentresName = Literal["normal", "near"]
ImageSize = Annotated[int, Meta(ge=1, le=4096)]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Settings of the paper's attention classifier.

    Attributes:
        encoding: Positional encoding.
        layers: Number of layers, each a block of attention and an MLP; at least 1.
        heads: Number of heads in every layer, or one number per layer, e.g. for a pruned model; each at least 1.
        width: Number of channels of the hidden state.
        mlp_width: Number of hidden channels of each block's MLP.
        downsampling: Side in pixels of the square patch that becomes one position. It must divide the image size.
        dropout: Dropout rate of each residual branch, at least 0 and below 1.
        attention_dropout: Dropout rate of attention probabilities. A rate above 0 requires the full attention
            matrices, which is slower.
        norm: Layer normalisation after each residual sum ("post", as in the paper) or before each branch ("pre").
        norm_epsilon: Constant that layer normalisation adds to the variance.
        head_channels: Number of channels of each head's values. By default, the value and output projections of a
            head are merged into one matrix; this setting makes them separate.
        key_channels: Number of channels of each head's queries and keys, for encodings that compute queries and keys
            from content. The default is the width.
        max_shift: Largest shift along each axis in the tables of learned relative encodings, in positions.
        centres: Initial centres of quadratic heads. near: the shifts nearest to 0, so that nine heads form a 3 x 3
            kernel; their initial attention is half as wide as with "normal". normal: normally distributed around the
            query, as in the paper.
        centre_std: Standard deviation of the initial centres, in positions (centres "normal" only).
        spread_std: Standard deviation of the initial inverse widths s of quadratic heads, in 1 / position. A head's
            attention is a Gaussian of standard deviation 1 / s (alpha = s^2 / 2). The mean of s is 1 (with "near": 2).
        image_size: Side of the training images, in pixels. The model also accepts images of other sizes.
        image_channels: Number of image channels.
        classes: Number of classes.
    """

    kind: ClassVar[str] = "attention"

    encoding: EncodingName = "quadratic"
    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)] = 6
    heads: Count | Counts = 9
    width: Count = 400
    mlp_width: Count = 512
    downsampling: Count = 2
    dropout: Fraction = 0.1
    attention_dropout: Fraction = 0.0
    norm: Literal["post", "pre"] = "post"
    norm_epsilon: Magnitude = 1e-12
    head_channels: Count | None = None
    key_channels: Count | None = None
    max_shift: Annotated[int, Meta(ge=0, le=65_536)] = 15
    centres: CentresName = "normal"
    centre_std: Magnitude = 2.0
    spread_std: Magnitude = 0.01
    image_size: ImageSize = 32
    image_channels: Count = 3
    classes: Count = 10

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Number of heads in each layer."""
        return (self.heads,) * self.layers if isinstance(self.heads, int) else self.heads

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Yield a problem for each violated rule between fields."""
        per_layer = isinstance(self.heads, tuple) and fine("heads", "layers")
        if per_layer and len(self.heads_per_layer) != self.layers:
            yield Problem("heads", f"must be one integer, or one per layer ({self.layers})")
        if self.centres == "near" and fine("encoding") and not self.encoding.startswith("quadratic"):
            yield Problem("centres", f"must be normal for encoding {self.encoding}, whose heads have no centres")
        if fine("image_size", "downsampling") and self.image_size % self.downsampling:
            yield Problem("downsampling", f"must divide the image size ({self.image_size})")
        # Channels are divided equally between the axes, and in sinusoidal encodings also between sines and cosines.
        if self.encoding == "absolute-sinusoidal" and self.width % 4:
            yield Problem("width", f"must be a multiple of 4 for encoding {self.encoding}")
        if self.encoding == "learned-content" and self.key_channels is not None and self.key_channels % 2:
            yield Problem("key_channels", f"must be even for encoding {self.encoding}")
        if fine():
            yield from _too_large(self, "width")


@dataclass(frozen=True, kw_only=True)
class ResNetSettings:
    """Settings of the ResNet baseline for small images.

    Attributes:
        widths: Number of channels of each stage. Every stage after the first halves the image size.
        blocks: Number of basic blocks in each stage, one number per width.
        image_size: Side of the training images, in pixels. The model also accepts images of other sizes.
        image_channels: Number of image channels.
        classes: Number of classes.
    """

    kind: ClassVar[str] = "resnet"

    widths: Counts = (64, 128, 256, 512)
    blocks: Counts = (2, 2, 2, 2)
    image_size: ImageSize = 32
    image_channels: Count = 3
    classes: Count = 10

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Yield a problem for each violated rule between fields."""
        if fine("widths", "blocks") and len(self.blocks) != len(self.widths):
            yield Problem("blocks", f"must be integers, one per width ({len(self.widths)})")
        if sum(self.blocks) > MOST_LAYERS:
            yield Problem("blocks", f"must be at most {MOST_LAYERS} in total")
        if fine():
            yield from _too_large(self, "widths")


@dataclass(frozen=True, kw_only=True)
class StagedSettings:
    """Settings of the staged attention classifier, whose later stages have fewer positions and more channels.

    Attributes:
        heads: Number of heads in every layer, isotropic Gaussians. Their initial centres are the shifts nearest to 0.
        widths: Number of channels of each stage.
        layers: Number of attention layers of each stage, one number per width. Every stage after the first halves the
            height and width of the grid by max pooling.
        downsampling: Side in pixels of the square patch that becomes one position of the first stage. It must divide
            the image size.
        image_size: Side of the training images, in pixels. The model also accepts images of other sizes.
        image_channels: Number of image channels.
        classes: Number of classes.
    """

    kind: ClassVar[str] = "staged"

    heads: Count = 9
    widths: Counts = (64, 128, 192)
    layers: Counts = (1, 2, 2)
    downsampling: Count = 2
    image_size: ImageSize = 32
    image_channels: Count = 3
    classes: Count = 10

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Number of heads in each layer."""
        return (self.heads,) * sum(self.layers)

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Yield a problem for each violated rule between fields."""
        if fine("widths", "layers") and len(self.layers) != len(self.widths):
            yield Problem("layers", f"must be integers, one per width ({len(self.widths)})")
        if sum(self.layers) > MOST_LAYERS:
            yield Problem("layers", f"must be at most {MOST_LAYERS} in total")
        if fine("image_size", "downsampling") and self.image_size % self.downsampling:
            yield Problem("downsampling", f"must divide the image size ({self.image_size})")
        if fine():
            yield from _too_large(self, "widths")


ModelSettings = AttentionSettings | StagedSettings | ResNetSettings


def _too_large(settings: ModelSettings, name: str) -> Iterator[Problem]:
    from attnconv.models.operation_counts import parameters  # imports this module

    if (count := parameters(settings)) > MOST_PARAMETERS:
        requirement = f"must be small enough for a model of at most {MOST_PARAMETERS:,} parameters"
        yield Problem(name, requirement, fix=f"The model has {count:,} parameters.")
