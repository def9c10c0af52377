"""From settings, or the name of a preset, to a model with fresh parameters."""

from typing import Any

from torch import nn

from attnconv.models.classifier import AttentionClassifier
from attnconv.models.presets import preset_settings
from attnconv.models.resnet import ResNet
from attnconv.models.settings import AttentionSettings, ModelSettings


def build(settings: ModelSettings | str, **changes: Any) -> nn.Module:
    """A model with fresh parameters, drawn from torch's global generator, on the default device in the default dtype.

    Args:
        settings: settings, or the name of a preset.
        **changes: settings of the preset to change, as in `preset_settings`.

    Returns:
        The model in training mode: images (b, c, height, width) to logits (b, classes).

    Raises:
        ValueError: if no preset has this name, or if the settings are not legal.

    Example:
        >>> sum(parameter.numel() for parameter in build("quadratic-digits").parameters())
        174747
    """
    if isinstance(settings, str):
        settings = preset_settings(settings, **changes)
    if isinstance(settings, AttentionSettings):
        return AttentionClassifier(settings)
    return ResNet(settings)
