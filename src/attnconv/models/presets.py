"""The named models: the paper's, with the paper's hyper-parameters, and small ones that train on two CPU cores.

A name stands for an architecture only; `attnconv.training.recipes` has its training under the same name.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnconv._util.errors import did_you_mean
from attnconv._util.settings import Problem, SettingsError, plain, read
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings


@dataclass(frozen=True)
class Preset:
    """A model with a description of one sentence."""

    settings: ModelSettings
    description: str


_PAPER = AttentionSettings()

# 8 x 8 positions of 48 channels: an hour on two CPU cores is some dozens of epochs of CIFAR-10. The norm stands before
# each branch, which trains at a higher rate from the first step, and the run is too short to need dropout.
_SMALL = AttentionSettings(
    layers=4, width=128, mlp_width=256, downsampling=4, dropout=0.0, norm="pre", norm_epsilon=1e-5, max_shift=7
)

# Grey images of 8 x 8 pixels: every pixel is a position.
_DIGITS = replace(_SMALL, layers=3, width=64, mlp_width=128, downsampling=1, image_size=8, image_channels=1)

CATALOGUE: Mapping[str, Preset] = {
    "resnet18": Preset(ResNetSettings(), "The residual network the paper compares with: ResNet-18 for 32 x 32 images."),
    "quadratic": Preset(
        _PAPER, "The paper's model: six layers of nine heads, each a round Gaussian with a centre and a spread."
    ),
    "quadratic-generalized": Preset(
        replace(_PAPER, encoding="quadratic-generalized"),
        "The paper's model with heads whose Gaussians may be ellipses (a full covariance).",
    ),
    "learned": Preset(
        replace(_PAPER, encoding="learned"),
        "The paper's model with learned scores for each row shift and each column shift.",
    ),
    "learned-content": Preset(
        replace(_PAPER, encoding="learned-content"),
        "The paper's model with learned relative positions and with queries and keys from the content.",
    ),
    "quadratic-16-heads": Preset(replace(_PAPER, heads=16), "The paper's model with sixteen heads in each layer."),
    "quadratic-small": Preset(_SMALL, "Four layers of nine round Gaussians on 8 x 8 positions, for two CPU cores."),
    "quadratic-generalized-small": Preset(
        replace(_SMALL, encoding="quadratic-generalized"), "The small model with ellipses for heads."
    ),
    "learned-small": Preset(
        replace(_SMALL, encoding="learned"), "The small model with learned row and column shifts, no content."
    ),
    "learned-content-small": Preset(
        replace(_SMALL, encoding="learned-content"), "The small model with learned shifts and content."
    ),
    "quadratic-16-heads-small": Preset(replace(_SMALL, heads=16), "The small model with sixteen heads in each layer."),
    "resnet-small": Preset(
        ResNetSettings(widths=(32, 64, 128), blocks=(1, 1, 1)),
        "A residual network with about as many operations as quadratic-small.",
    ),
    "quadratic-digits": Preset(_DIGITS, "Three layers of nine round Gaussians for scikit-learn's 8 x 8 digits."),
    "resnet-digits": Preset(
        ResNetSettings(widths=(32, 64), blocks=(1, 1), image_size=8, image_channels=1),
        "A residual network for scikit-learn's 8 x 8 digits.",
    ),
}

PRESETS: Mapping[str, ModelSettings] = {name: preset.settings for name, preset in CATALOGUE.items()}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the presets, which `attnconv.load` accepts.

    Args:
        pattern: Only names that match, with the wildcards of a shell.

    Example:
        >>> list_models("*-digits")
        ['quadratic-digits', 'resnet-digits']
    """
    return fnmatch.filter(PRESETS, pattern)


def preset_settings(name: str, **changes: Any) -> ModelSettings:
    """Settings of a preset, with changes. Raises `SettingsError` for unknown names and illegal values."""
    if name in PRESETS:
        settings: ModelSettings = read(ModelSettings, {**plain(PRESETS[name]), **changes})
        return settings
    fix = did_you_mean(name, PRESETS) or f"The presets are {', '.join(PRESETS)}."
    raise SettingsError([Problem("preset", "must be the name of a preset", repr(name), fix)])
