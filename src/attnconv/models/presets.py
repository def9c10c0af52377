"""Presets: the models of the paper, and small models that train on two CPU cores.

A preset defines only the architecture. `attnconv.training.recipes` has training settings under the same names.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnconv._util.errors import did_you_mean
from attnconv._util.settings import Problem, SettingsError, plain, read
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings, StagedSettings


@dataclass(frozen=True)
class Preset:
    """Settings of a model, with a one-line description."""

    settings: ModelSettings
    description: str


_PAPER = AttentionSettings()

# 8 x 8 positions of 48 channels, for dozens of CIFAR-10 epochs per hour on two CPU cores. Pre-norm blocks train with a
# higher learning rate from the first step, and training is too short to need dropout.
_SMALL = AttentionSettings(
    layers=4, width=128, mlp_width=256, downsampling=4, dropout=0.0, norm="pre", norm_epsilon=1e-5, max_shift=7
)

# Greyscale images of 8 x 8 pixels; every pixel is a position.
_DIGITS = replace(_SMALL, layers=3, width=64, mlp_width=128, downsampling=1, image_size=8, image_channels=1)

CATALOGUE: Mapping[str, Preset] = {
    "resnet18": Preset(ResNetSettings(), "Baseline of the paper: ResNet-18 for 32 x 32 images."),
    "quadratic": Preset(_PAPER, "Model of the paper: 6 layers of 9 heads, each an isotropic Gaussian."),
    "quadratic-generalized": Preset(
        replace(_PAPER, encoding="quadratic-generalized"), "Model of the paper with full-covariance Gaussian heads."
    ),
    "learned": Preset(
        replace(_PAPER, encoding="learned"), "Model of the paper with a learned relative encoding that ignores content."
    ),
    "learned-content": Preset(
        replace(_PAPER, encoding="learned-content"),
        "Model of the paper with a learned relative encoding, and queries and keys computed from content.",
    ),
    "quadratic-16-heads": Preset(replace(_PAPER, heads=16), "Model of the paper with 16 heads per layer."),
    "quadratic-small": Preset(
        _SMALL, "Small model for two CPU cores: 4 layers of 9 isotropic Gaussian heads on 8 x 8 positions."
    ),
    "quadratic-generalized-small": Preset(
        replace(_SMALL, encoding="quadratic-generalized"), "Small model with full-covariance Gaussian heads."
    ),
    "learned-small": Preset(
        replace(_SMALL, encoding="learned"), "Small model with a learned relative encoding that ignores content."
    ),
    "learned-content-small": Preset(
        replace(_SMALL, encoding="learned-content"),
        "Small model with a learned relative encoding, and queries and keys computed from content.",
    ),
    "quadratic-16-heads-small": Preset(replace(_SMALL, heads=16), "Small model with 16 heads per layer."),
    "quadratic-fast": Preset(
        StagedSettings(), "Small model in three stages: 5 attention layers of 9 heads that start as 3 x 3 kernels."
    ),
    "resnet-small": Preset(
        ResNetSettings(widths=(32, 64, 128), blocks=(1, 1, 1)),
        "ResNet baseline with fewer FLOPs than quadratic-small.",
    ),
    "quadratic-digits": Preset(_DIGITS, "3 layers of 9 isotropic Gaussian heads for scikit-learn's 8 x 8 digits."),
    "resnet-digits": Preset(
        ResNetSettings(widths=(32, 64), blocks=(1, 1), image_size=8, image_channels=1),
        "ResNet baseline for scikit-learn's 8 x 8 digits.",
    ),
}

PRESETS: Mapping[str, ModelSettings] = {name: preset.settings for name, preset in CATALOGUE.items()}


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the presets, for `attnconv.load`.

    Args:
        pattern: Shell-style wildcard pattern that the names must match.

    Example:
        >>> list_models("*-digits")
        ['quadratic-digits', 'resnet-digits']
    """
    return fnmatch.filter(PRESETS, pattern)


def preset_settings(name: str, **changes: Any) -> ModelSettings:
    """Return the settings of a preset, with changes; raise `SettingsError` for unknown names and invalid values."""
    if name in PRESETS:
        settings: ModelSettings = read(ModelSettings, {**plain(PRESETS[name]), **changes})
        return settings
    fix = did_you_mean(name, PRESETS) or f"The presets are {', '.join(PRESETS)}."
    raise SettingsError([Problem("preset", "must be the name of a preset", repr(name), fix)])
