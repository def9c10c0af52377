"""Training: settings, recipes, the fit itself and the folder that a run leaves.

    from attnconv.training.fit import fit

    run = fit(attnconv.training.recipe("quadratic-digits"), "runs/digits")

Importing this package, its ``settings`` or its ``recipes`` does not import torch.
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.training.evaluate import Score as Score
    from attnconv.training.fit import make_trainer as make_trainer
    from attnconv.training.recipes import RECIPES as RECIPES
    from attnconv.training.recipes import default_recipe as default_recipe
    from attnconv.training.recipes import recipe as recipe
    from attnconv.training.recorder import DivergedError as DivergedError
    from attnconv.training.run_folder import RunFolder as RunFolder
    from attnconv.training.settings import OptimSettings as OptimSettings
    from attnconv.training.settings import RunSettings as RunSettings
    from attnconv.training.settings import ScheduleSettings as ScheduleSettings
    from attnconv.training.settings import SettingsError as SettingsError
    from attnconv.training.settings import TrainSettings as TrainSettings
    from attnconv.training.settings import problems as problems
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "DivergedError": "recorder",
            "OptimSettings": "settings",
            "RECIPES": "recipes",
            "RunFolder": "run_folder",
            "RunSettings": "settings",
            "ScheduleSettings": "settings",
            "Score": "evaluate",
            "SettingsError": "settings",
            "TrainSettings": "settings",
            "default_recipe": "recipes",
            "make_trainer": "fit",
            "problems": "settings",
            "recipe": "recipes",
        },
        submodules=("evaluate", "fit", "recipes", "run_folder", "settings"),
    )
