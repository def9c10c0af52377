"""`attnconv evaluate CHECKPOINT`: accuracy and loss on a test set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnconv._util.settings import Natural, Problem, SettingsError, plain
from attnconv.cli.parsing import Defaults, Positional
from attnconv.data.settings import DataSettings
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import AcceleratorName, PrecisionName


@dataclass(frozen=True)
class Arguments:
    """Measure a model on a test set.

    The data default to those that the run was trained on.

    Examples:
        attnconv evaluate runs/quadratic-digits
        attnconv evaluate best.safetensors --data.root PATH/TO/CIFAR

    Attributes:
        checkpoint: Run folder, weights file (.safetensors), or any other model that `attnconv.load` knows.
        data: The images.
        split: Measure the test set, or the images held out of the training set.
        batch_size: Images per batch.
        precision: Numbers of 32 bits, bf16 in matrix products, or 64 bits.
        accelerator: Device to compute on; auto takes a GPU if torch finds one.
    """

    checkpoint: Positional[str]
    data: DataSettings = field(default_factory=DataSettings)
    split: Literal["test", "validation"] = "test"
    batch_size: Natural = 500
    precision: PrecisionName = "32"
    accelerator: AcceleratorName = "auto"

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> Defaults:
        """For a run folder, or a weights file in one, the run's own data and precision."""
        folder = RunFolder.holding(Path(given["checkpoint"])) if "checkpoint" in given else None
        if folder is None:
            return {}, {}
        settings = folder.settings()
        return {"data": plain(settings.data), "precision": settings.train.precision}, {}


def run(arguments: Arguments) -> None:
    """Measure and print."""
    from attnconv.data.load_splits import load_data
    from attnconv.models.model_loader import load as load_model
    from attnconv.training.evaluation import device_of, evaluate
    from attnconv.training.progress_bars import downloading
    from attnconv.training.run_checks import missing_accelerator

    if wrong := missing_accelerator(arguments.accelerator):
        raise SettingsError(wrong)
    loaded = load_model(arguments.checkpoint)
    with downloading() as progress:
        data = load_data(arguments.data, progress=progress)
    known, held = loaded.settings, (data.test.channels, len(data.classes))
    if known is not None and held != (known.image_channels, known.classes):
        requirement = f"must have the {known.image_channels} channels and {known.classes} classes of {loaded.source}"
        fix = "Name the images that the model was trained on: data.name, data.root."
        raise SettingsError([Problem("--data", requirement, "{} and {}".format(*held), fix, data.source)])
    images = data.test if arguments.split == "test" else data.validation
    mean, std, device = loaded.mean or data.mean, loaded.std or data.std, device_of(arguments.accelerator)
    size, precision = arguments.batch_size, arguments.precision
    found = evaluate(loaded.model, images, mean=mean, std=std, batch_size=size, precision=precision, device=device)
    print(f"{loaded.source} on the {arguments.split} images of {arguments.data.name}:")
    print(f"accuracy {found.accuracy:.2%}, loss {found.loss:.4f}, {found.images} images")
