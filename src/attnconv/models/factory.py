"""Build a model from its settings or the name of a preset."""

from typing import Any

from torch import nn

from attnconv.models.classifier import AttentionClassifier
from attnconv.models.presets import preset_settings
from attnconv.models.resnet import ResNet
from attnconv.models.settings import AttentionSettings, ModelSettings


def build(settings: ModelSettings | str, **changes: Any) -> nn.Module:
    """Build a model with fresh parameters, drawn from torch's global generator.

    Args:
        settings: Settings, or the name of a preset.
        **changes: Settings in place of the preset's own, such as `classes=100`.

    Returns:
        The model in training mode: images (b, c, height, width) to logits (b, classes).

    Raises:
        ValueError: No preset has this name, or the settings are not legal.

    Example:
        >>> sum(parameter.numel() for parameter in build("quadratic-digits").parameters())
        174747
    """
    if isinstance(settings, str):
        settings = preset_settings(settings, **changes)
    if isinstance(settings, AttentionSettings):
        return AttentionClassifier(settings)
    return ResNet(settings)
