"""`attnconv evaluate MODEL`: measure the accuracy and the loss of a model on a test set."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnconv._util.settings import Fine, Natural, Problem, SettingsError, plain
from attnconv.cli.image_inputs import own_size
from attnconv.cli.parsing import Defaults, Positional
from attnconv.data.settings import DataSettings
from attnconv.models.presets import PRESETS
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import AcceleratorName, PrecisionName

if TYPE_CHECKING:
    from attnconv.data.image_set import Splits
    from attnconv.models.model_loader import LoadedModel


@dataclass(frozen=True)
class Arguments:
    """Measure the accuracy and the loss of a model.

    For a run, the data options and --precision default to the settings of the run, and for a preset, the data set
    defaults to that of its recipe; for other models, they default to the values below. --data-limit affects only
    training images, and therefore has no effect here.

    Examples:
        attnconv evaluate runs/quadratic-digits
        attnconv evaluate best.safetensors --data-root data

    Attributes:
        model: Preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or
            package.module:function.
        data: Data set and its splits.
        image_size: Images are scaled and cropped to a square of this side, in pixels (image folders only). The default
            is the model's image size.
        split: test: the test set. validation: the training images held out for validation.
        batch_size: Images per batch.
        precision: 32: float32. 64: float64. bf16: mixed precision, with matrix products in bfloat16; float32 on devices
            that emulate bfloat16 (CPUs without AVX-512 and GPUs older than Ampere).
        accelerator: Device to compute on; auto selects a GPU if there is one.
    """

    model: Positional[str]
    image_size: Natural | None = None
    data: DataSettings = field(default_factory=DataSettings)
    split: Literal["test", "validation"] = "test"
    batch_size: Natural = 500
    precision: PrecisionName = "32"
    accelerator: AcceleratorName = "auto"

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> Defaults:
        """Return the data settings of a preset, or those and the precision of the run that contains the model."""
        model = given.get("model", "")
        if model in PRESETS:
            return {"data": plain(recipe(model).data)}, {}
        folder = RunFolder.holding(Path(model)) if model else None
        if folder is None:
            return {}, {}
        settings = folder.settings()
        return {"data": plain(settings.data), "precision": settings.train.precision}, {}

    def conflicts(self, _: Fine) -> Iterator[Problem]:
        if self.image_size is not None and self.data.name != "folder":
            yield Problem("image_size", "must be omitted unless --data-name is folder")


def run(arguments: Arguments) -> None:
    """Evaluate the model and print the metrics."""
    from attnconv.data.load_splits import load_data
    from attnconv.models.model_loader import load as load_model
    from attnconv.training.evaluation import device_of, evaluate
    from attnconv.training.progress_bars import downloading, working
    from attnconv.training.run_checks import check_images, missing_accelerator

    if wrong := missing_accelerator(arguments.accelerator):
        raise SettingsError(wrong)
    loaded = load_model(arguments.model)
    with downloading() as progress:
        image_size = arguments.image_size or own_size(loaded)[0]
        data = load_data(arguments.data, image_size=image_size, progress=progress)
    if mismatch := next(_mismatches(loaded, data), None):
        raise SettingsError([mismatch])
    folder = None if arguments.model in PRESETS else RunFolder.holding(Path(arguments.model))
    if folder is not None and arguments.image_size is None and arguments.data == folder.settings().data:
        check_images(folder, data)  # new images change the random split of a folder into sets
    images = data.test if arguments.split == "test" else data.validation
    mean, std, device = loaded.mean or data.mean, loaded.std or data.std, device_of(arguments.accelerator)
    size, precision = arguments.batch_size, arguments.precision
    with working(f"Evaluating {arguments.model}"):
        found = evaluate(loaded.model, images, mean=mean, std=std, batch_size=size, precision=precision, device=device)
    print(f"{loaded.source} on the {arguments.split} images of {arguments.data.name}:")
    print(f"accuracy {found.accuracy:.2%}, loss {found.loss:.4f}, {found.images} images")


def _mismatches(loaded: "LoadedModel", data: "Splits") -> Iterator[Problem]:
    """Yield how the images differ from those that the model was trained on."""
    fix = "Select the data set that the model was trained on with --data-name and --data-root."
    known, shape = loaded.settings, (data.test.channels, len(data.classes))
    if known is not None and shape != (known.image_channels, known.classes):
        requirement = f"must match {loaded.source} (channels: {known.image_channels}, classes: {known.classes})"
        yield Problem("--data-name", requirement, "{} and {}".format(*shape), fix, data.source)
    requirement = f"must have the classes of {loaded.source}"
    if loaded.classes and len(loaded.classes) != len(data.classes):
        got = f"{len(data.classes)} classes instead of {len(loaded.classes)}"
        yield Problem("--data-name", requirement, got, fix, data.source)
    for before, now in zip(loaded.classes, data.classes, strict=False):
        if known is not None and before != now:  # other libraries have their own names for the classes of ImageNet
            yield Problem("--data-root", requirement, f"{now!r} instead of {before!r}", fix, data.source)
