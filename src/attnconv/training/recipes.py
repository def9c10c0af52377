"""Training recipes of the presets. This module does not import torch.

`paper`: the paper's hyperparameters, which are the defaults of the settings.
`modern`: a recipe for the small presets, which train in an hour or less on two CPU cores.
"""

from dataclasses import replace
from typing import Literal, get_args

from attnconv._util.errors import bad
from attnconv.data.settings import DataSettings
from attnconv.models.presets import preset_settings
from attnconv.models.settings import ResNetSettings
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, TrainSettings

RecipeName = Literal["paper", "modern"]


def default_recipe(preset: str) -> RecipeName:
    """Return the name of a preset's default recipe.

    Example:
        >>> default_recipe("quadratic"), default_recipe("quadratic-small")
        ('paper', 'modern')
    """
    return "modern" if preset.endswith(("-small", "-fast", "-digits")) else "paper"


def recipe(preset: str, name: RecipeName | None = None) -> RunSettings:
    """Return the settings of a training run for a preset.

    Args:
        preset: Name of the preset.
        name: `paper` or `modern`. The default is `default_recipe(preset)`.

    Raises:
        ValueError: If the preset or the recipe is unknown.

    Example:
        >>> settings = recipe("quadratic")
        >>> settings.train.epochs, settings.optim.learning_rate, settings.schedule.name
        (300, 0.1, 'cosine')
    """
    model, name = preset_settings(preset), name or default_recipe(preset)
    if name not in get_args(RecipeName):
        raise ValueError(bad("name", "must be paper or modern", repr(name)))
    digits, residual = model.image_channels == 1, isinstance(model, ResNetSettings)
    settings = RunSettings(preset=preset, model=model, data=DataSettings(name="digits" if digits else "cifar10"))
    if name == "paper":
        return replace(settings, schedule=ScheduleSettings(name="steps", warmup=0.0)) if residual else settings
    optim = OptimSettings(decay_vectors=False, label_smoothing=0.1)
    if residual:
        optim = replace(optim, nesterov=True, weight_decay=5e-4)
    else:
        optim = replace(optim, name="adamw", learning_rate=2e-3, weight_decay=0.05, clip=1.0, position_rate=10.0)
    train = TrainSettings(epochs=35, batch_size=24) if digits else TrainSettings(epochs=30, precision="bf16")
    # The augmentation is the paper's: short runs underfit, and stronger augmentation would reduce accuracy.
    return replace(settings, optim=optim, schedule=ScheduleSettings(warmup=0.1), train=train)
