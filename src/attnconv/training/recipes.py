"""Default training of each preset, free of torch.

`paper`: the paper's hyper-parameters, which are the defaults of the settings, with warm-up at every iteration, not once
per epoch as in the paper's code.
`modern`: for the small presets, whose budget is an hour, or a minute, on two CPU cores.
"""

from dataclasses import replace
from typing import Literal

from attnconv.data.settings import DataSettings
from attnconv.models.presets import preset_settings
from attnconv.models.settings import ResNetSettings
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, TrainSettings

RecipeName = Literal["paper", "modern"]


def default_recipe(preset: str) -> RecipeName:
    """The recipe of a preset.

    Example:
        >>> default_recipe("quadratic"), default_recipe("quadratic-small")
        ('paper', 'modern')
    """
    return "modern" if preset.endswith(("-small", "-digits")) else "paper"


def recipe(preset: str, name: RecipeName | None = None) -> RunSettings:
    """All settings of a run of a preset.

    Args:
        preset: Its name.
        name: The recipe; None for the preset's default.

    Raises:
        ValueError: There is no such preset.

    Example:
        >>> settings = recipe("quadratic")
        >>> settings.train.epochs, settings.optim.learning_rate, settings.schedule.name
        (300, 0.1, 'cosine')
    """
    model = preset_settings(preset)
    digits, residual = model.image_channels == 1, isinstance(model, ResNetSettings)
    settings = RunSettings(preset=preset, model=model, data=DataSettings(name="digits" if digits else "cifar10"))
    if (name or default_recipe(preset)) == "paper":
        return replace(settings, schedule=ScheduleSettings(name="steps", warmup=0.0)) if residual else settings
    if residual:
        optim = OptimSettings(nesterov=True, weight_decay=5e-4, decay_vectors=False, label_smoothing=0.1)
    else:
        optim = OptimSettings(
            name="adamw",
            learning_rate=2e-3,
            weight_decay=0.05,
            decay_vectors=False,
            clip=1.0,
            label_smoothing=0.1,
            position_rate=10.0,
        )
    train = TrainSettings(epochs=30, precision="bf16")
    if digits:
        train = TrainSettings(epochs=50, batch_size=50)
    # Augmentation stays the paper's: so short a run underfits, and stronger changes would cost accuracy.
    return replace(settings, optim=optim, schedule=ScheduleSettings(warmup=0.1), train=train)


def table_rows(settings: RunSettings) -> dict[str, str]:
    """The rows of the paper's Table 2 that are about training; `preset_tables.hyper_parameters` has the others."""
    return {
        "number of epochs": str(settings.train.epochs),
        "batch size": str(settings.train.batch_size),
        "learning rate": f"{settings.optim.learning_rate:g}",
        "weight decay": f"{settings.optim.weight_decay:g}",
        "momentum": f"{settings.optim.momentum:g}",
        "cosine decay": "yes" if settings.schedule.name == "cosine" else "no",
        "linear warm up ratio": f"{settings.schedule.warmup:g}",
    }
