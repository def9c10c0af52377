from .evaluation import Metrics as Metrics, evaluate as evaluate
from .fitting import fit as fit
from .recipes import default_recipe as default_recipe, recipe as recipe
from .run_folder import RunFolder as RunFolder
from .run_recorder import DivergedError as DivergedError
from .settings import (
    OptimSettings as OptimSettings,
    RunSettings as RunSettings,
    ScheduleSettings as ScheduleSettings,
    SettingsError as SettingsError,
    TrainSettings as TrainSettings,
    problems as problems,
)
