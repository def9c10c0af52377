"""The architecture of a model: frozen dataclasses of plain values, free of torch.

The same values are flags of the command line and are stored in `settings.json` and in every checkpoint.
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
    """The paper's classifier: space to depth, linear embedding, attention blocks, mean over positions, linear head.

    Attributes:
        encoding: Positional encoding, by its name in the library.
        layers: Number of blocks, at least 1.
        heads: Heads of every layer, or one number for each layer (as pruning leaves them), each at least 1.
        width: Channels of the hidden state.
        mlp_width: Channels between the two linear maps of each block's MLP.
        downsampling: Side of the square of pixels that becomes one position; it divides the image's sides.
        dropout: Rate on each residual branch, from 0 up to but not including 1.
        attention_dropout: Rate on the attention probabilities. Above 0 the layers run on dense matrices.
        norm: Layer normalisation after each residual sum ("post", the paper) or before each branch ("pre").
        norm_epsilon: The constant that layer normalisation adds to the variance.
        head_channels: Channels of each head's value (factored W_val W_out); None merges both into one matrix.
        key_channels: Channels of each head's query and key, where an encoding has them; None takes the width.
        max_shift: Largest shift in the tables of learned relative encodings, in positions.
        centres: Initial centres of quadratic heads: random around the query's position (normal, the paper), or one at
            each of the nearest shifts, with twice the spread (near): nine heads are a 3 x 3 kernel.
        centre_std: Initial deviation of the centres of quadratic encodings, in positions.
        spread_std: Initial deviation of their spreads around 1.
        image_size: Side of the images the model is made for, in pixels. It accepts images of other sizes as well.
        image_channels: Channels of the images.
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
        """Number of heads of each layer, first to last."""
        return (self.heads,) * self.layers if isinstance(self.heads, int) else self.heads

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Rules between the fields."""
        per_layer = isinstance(self.heads, tuple) and fine("heads", "layers")
        if per_layer and len(self.heads_per_layer) != self.layers:
            yield Problem("heads", f"must be one number, or one for each of the {self.layers} layers")
        if self.centres == "near" and fine("encoding") and not self.encoding.startswith("quadratic"):
            yield Problem("centres", f"must be normal for encoding {self.encoding}, whose heads have no centres")
        if fine("image_size", "downsampling") and self.image_size % self.downsampling:
            yield Problem("downsampling", f"must divide the image size {self.image_size}")
        # Each axis takes an equal part of a query's vector, or of a position's, which also needs sines and cosines.
        if self.encoding == "absolute-sinusoidal" and self.width % 4:
            yield Problem("width", f"must be a multiple of 4 for encoding {self.encoding}")
        if self.encoding == "learned-content" and self.key_channels is not None and self.key_channels % 2:
            yield Problem("key_channels", f"must be even for encoding {self.encoding}")
        if fine():
            yield from _too_large(self, "width")


@dataclass(frozen=True, kw_only=True)
class ResNetSettings:
    """The residual network for small images: a 3x3 stem, stages of basic blocks, mean over positions, linear head.

    Attributes:
        widths: Channels of each stage; every stage after the first halves the image.
        blocks: Number of basic blocks in each stage, one number for each width.
        image_size: Side of the images the model is made for, in pixels. It accepts images of other sizes as well.
        image_channels: Channels of the images.
        classes: Number of classes.
    """

    kind: ClassVar[str] = "resnet"

    widths: Counts = (64, 128, 256, 512)
    blocks: Counts = (2, 2, 2, 2)
    image_size: ImageSize = 32
    image_channels: Count = 3
    classes: Count = 10

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Rules between the fields."""
        if fine("widths", "blocks") and len(self.blocks) != len(self.widths):
            yield Problem("blocks", f"must be one number for each of the {len(self.widths)} widths")
        if sum(self.blocks) > MOST_LAYERS:
            yield Problem("blocks", f"must be at most {MOST_LAYERS} in all")
        if fine():
            yield from _too_large(self, "widths")


ModelSettings = AttentionSettings | ResNetSettings


def _too_large(settings: ModelSettings, name: str) -> Iterator[Problem]:
    from attnconv.models.operation_counts import parameters  # which imports this module

    if (count := parameters(settings)) > MOST_PARAMETERS:
        requirement = f"must be such that the model has at most {MOST_PARAMETERS:,} parameters"
        yield Problem(name, requirement, fix=f"It has {count:,}.")
