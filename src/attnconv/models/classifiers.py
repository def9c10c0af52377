"""Image classifiers: the attention model of the paper (section 4.1), a staged one that trains faster, and a ResNet.

The paper's classifier has these parts:

    positions   space to depth: a square of p x p pixels becomes one position with c p^2 channels (invertible)
    embedding   linear
    blocks      attention with a merged W^(h) per head (equation 11), a second linear layer, residual, layer norm;
                MLP with exact GELU, residual, layer norm
    head        mean over positions, linear

The hidden state is (b, height, width, c) in memory, the fastest layout for both linear and attention layers. Attention
layers accept and return (b, c, height, width) *views* of it.

The staged classifier has the layout of a small convolutional network, with an attention layer for each convolution:
stages with batch norm and GELU, and max pooling between them. It has no MLPs.

The baseline is the ResNet of He et al. (2015) with the usual stem for CIFAR: one 3x3 convolution with stride 1 and no
pooling. A 32 x 32 image therefore has 32 x 32 positions in the first stage and 4 x 4 in the last.
"""

from typing import Any, final

import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.settings import check
from attnconv.encodings import Encoding, encoding_named
from attnconv.encodings.quadratic import start_at_neighbours
from attnconv.layers import SelfAttention2d
from attnconv.models.presets import preset_settings
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings, StagedSettings


def build(settings: ModelSettings | str, **changes: Any) -> nn.Module:
    """Build a model with random initial parameters, sampled with torch's global generator.

    Args:
        settings: Settings, or the name of a preset.
        **changes: Settings that override the preset's, such as `classes=100`; ignored if `settings` is not a name.

    Returns:
        The model in training mode. It maps images (b, c, height, width) to logits (b, classes).

    Raises:
        ValueError: If the preset does not exist, or the settings are invalid.

    Example:
        >>> sum(parameter.numel() for parameter in build("quadratic-digits").parameters())
        174747
    """
    if isinstance(settings, str):
        settings = preset_settings(settings, **changes)
    if isinstance(settings, AttentionSettings):
        return AttentionClassifier(settings)
    return StagedClassifier(settings) if isinstance(settings, StagedSettings) else ResNet(settings)


@final
class AttentionClassifier(nn.Module):
    """Attention classifier: space to depth, linear embedding, attention blocks, mean over positions, linear head.

    Only attention scores depend on positions, so the model accepts images of any size that is a multiple of
    `settings.downsampling`.

    Args:
        settings: Sizes, encoding, norms and dropout rates.

    Raises:
        ValueError: If the settings are invalid; the message lists all problems.

    Example:
        >>> import torch
        >>> settings = AttentionSettings(layers=1, heads=4, width=16, mlp_width=16)
        >>> AttentionClassifier(settings)(torch.zeros(2, 3, 8, 12)).shape
        torch.Size([2, 10])
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        check(settings, "settings")
        self.image_channels = settings.image_channels
        self.downsampling = settings.downsampling
        self.embedding = nn.Linear(settings.image_channels * settings.downsampling**2, settings.width)
        self.blocks = nn.Sequential(*(AttentionBlock(settings, heads) for heads in settings.heads_per_layer))
        # Post-norm blocks end with a norm; the output of pre-norm blocks is not normalised.
        pre_norm = settings.norm == "pre"
        self.norm = nn.LayerNorm(settings.width, settings.norm_epsilon) if pre_norm else nn.Identity()
        self.head = nn.Linear(settings.width, settings.classes)

    def forward(self, images: Tensor) -> Float[Tensor, "b classes"]:
        """Return the logits of images (b, c, height, width); height and width are multiples of `downsampling`."""
        check_shape(images, channels=self.image_channels, multiple=self.downsampling)
        hidden = self.embedding(space_to_depth(images, self.downsampling))
        hidden = self.norm(self.blocks(hidden))
        logits: Tensor = self.head(hidden.mean((1, 2)))
        return logits


@final
class AttentionBlock(nn.Module):
    """Block of attention and an MLP, each a residual branch with layer norm after the sum or before the branch.

    post (the paper)    x <- norm(x + branch(x))
    pre                 x <- x + branch(norm(x))
    """

    def __init__(self, settings: AttentionSettings, heads: int) -> None:
        super().__init__()
        width = settings.width
        self.pre_norm = settings.norm == "pre"
        self.attention = SelfAttention2d(
            width,
            width,
            heads,
            encoding=make_encoding(settings, heads),
            head_channels=settings.head_channels,
            attention_dropout=settings.attention_dropout,
        )
        self.output = nn.Linear(width, width)  # in the authors' code, but not in the paper's equations
        self.attention_norm = nn.LayerNorm(width, settings.norm_epsilon)
        self.mlp_in = nn.Linear(width, settings.mlp_width)
        self.mlp_out = nn.Linear(settings.mlp_width, width)
        self.mlp_norm = nn.LayerNorm(width, settings.norm_epsilon)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, hidden: Float[Tensor, "b height width c"]) -> Float[Tensor, "b height width c"]:
        if self.pre_norm:
            hidden = hidden + self._attention_branch(self.attention_norm(hidden))
            return hidden + self._mlp_branch(self.mlp_norm(hidden))
        hidden = self.attention_norm(hidden + self._attention_branch(hidden))
        normed: Tensor = self.mlp_norm(hidden + self._mlp_branch(hidden))
        return normed

    def _attention_branch(self, hidden: Tensor) -> Tensor:
        attended = self.attention(hidden.movedim(-1, 1)).movedim(1, -1)
        branch: Tensor = self.dropout(self.output(attended))
        return branch

    def _mlp_branch(self, hidden: Tensor) -> Tensor:
        branch: Tensor = self.dropout(self.mlp_out(F.gelu(self.mlp_in(hidden))))
        return branch


def space_to_depth(images: Float[Tensor, "b c height width"], side: int) -> Float[Tensor, "b rows columns channels"]:
    """Apply the invertible downsampling of Jacobsen et al. (2018), channels last.

    Channel c * side^2 + i * side + j of a position is channel c of the pixel in row i and column j of its patch.
    """
    squares = images.unflatten(-1, (-1, side)).unflatten(-3, (-1, side))  # (b, c, rows, side, columns, side)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(-3)


def make_encoding(settings: AttentionSettings, heads: int) -> Encoding:
    """Build the encoding of a layer with the given number of heads."""
    encoding = encoding_named(
        settings.encoding,
        settings.width,
        heads,
        2,
        key_channels=settings.key_channels,
        max_shift=settings.max_shift,
        positions=settings.image_size // settings.downsampling,
        centre_std=settings.centre_std,
        spread_std=settings.spread_std,
    )
    if settings.centres == "near":
        start_at_neighbours(encoding)
    return encoding


@final
class StagedClassifier(nn.Module):
    """Attention classifier in stages: linear embedding of patches, attention layers, mean over positions, linear head.

    Args:
        settings: Number of channels and layers of each stage, and number of heads.

    Raises:
        ValueError: If the settings are invalid; the message lists all problems.

    Example:
        >>> import torch
        >>> settings = StagedSettings(widths=(8, 16), layers=(1, 2))
        >>> StagedClassifier(settings)(torch.zeros(2, 3, 32, 24)).shape
        torch.Size([2, 10])
    """

    def __init__(self, settings: StagedSettings) -> None:
        super().__init__()
        check(settings, "settings")
        self.image_channels, self.downsampling = settings.image_channels, settings.downsampling
        before = settings.widths[0]
        self.embedding = nn.Linear(settings.image_channels * settings.downsampling**2, before, bias=False)
        self.norm = nn.BatchNorm2d(before)
        self.blocks = nn.Sequential()
        for stage, (width, layers) in enumerate(zip(settings.widths, settings.layers, strict=True)):
            for layer in range(layers):
                self.blocks.append(StagedBlock(before, width, settings.heads, pool=stage > 0 and layer == 0))
                before = width
        self.head = nn.Linear(before, settings.classes)

    def forward(self, images: Tensor) -> Float[Tensor, "b classes"]:
        """Return the logits of images (b, c, height, width); height and width are multiples of `downsampling`."""
        check_shape(images, channels=self.image_channels, multiple=self.downsampling)
        hidden = self.norm(self.embedding(space_to_depth(images, self.downsampling)).movedim(-1, 1))
        logits: Tensor = self.head(self.blocks(hidden).mean((2, 3)))
        return logits


@final
class StagedBlock(nn.Module):
    """y = gelu(norm(pool(attention(x)))), plus x if x and y have the same shape; pooling is optional."""

    def __init__(self, in_channels: int, out_channels: int, heads: int, *, pool: bool) -> None:
        super().__init__()
        self.attention = SelfAttention2d(in_channels, out_channels, heads, bias=False)
        start_at_neighbours(self.attention.encoding)
        self.pool = nn.MaxPool2d(2, ceil_mode=True) if pool else nn.Identity()
        self.norm = nn.BatchNorm2d(out_channels)
        self.residual = in_channels == out_channels and not pool

    def forward(self, x: Float[Tensor, "b c height width"]) -> Float[Tensor, "b d new_height new_width"]:
        branch = F.gelu(self.norm(self.pool(self.attention(x))))
        return x + branch if self.residual else branch


@final
class ResNet(nn.Module):
    """Residual network: stem, stages of basic blocks, mean over positions, linear head.

    Args:
        settings: Width and number of blocks of each stage, image channels and classes.

    Raises:
        ValueError: If the settings are invalid; the message lists all problems.

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
        """Return the logits of images (b, c, height, width) of any size."""
        check_shape(images, channels=self.image_channels)
        hidden = self.stages(F.relu(self.stem_norm(self.stem(images))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


@final
class BasicBlock(nn.Module):
    """Residual block relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))); only the first 3x3 convolution is strided."""

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


def check_shape(images: Tensor, *, channels: int, multiple: int = 1) -> None:
    """Raise an error for images with a wrong shape or dtype. Values are not read, so the check compiles away."""
    given: object = images
    if isinstance(given, torch.fx.Proxy):  # symbolic tracing, where the shape is unknown
        return
    if not images.is_floating_point():
        fix = "Scale uint8 images to [0, 1] and normalise them."
        raise TypeError(bad("images", "must be a floating-point tensor", str(images.dtype), fix))
    shape = tuple(images.shape)
    if images.ndim != 4 or shape[1] != channels or any(side == 0 or side % multiple for side in shape[2:]):
        fix = "Add a batch axis with images[None]." if images.ndim == 3 else ""
        sides = f" divisible by {multiple}" if multiple > 1 else ""
        requirement = f"must have shape (b, {channels}, height, width) with positive sides{sides}"
        raise ValueError(bad("images", requirement, f"shape {shape}", fix))
