"""`attnconv evaluate CHECKPOINT`: accuracy and loss on a test set."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attnconv.cli.flag_errors import flags_of, positional_places
from attnconv.cli.parsing import parse
from attnconv.data.settings import DataSettings
from attnconv.training.settings import AcceleratorName, PrecisionName


@dataclass(frozen=True)
class Evaluate:
    """Arguments of `attnconv evaluate`."""

    checkpoint: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CHECKPOINT")]]
    """Run folder, weights file (.safetensors), or any other model that `attnconv.load` knows."""
    data: DataSettings = field(default_factory=DataSettings)
    """The images."""
    split: Literal["test", "validation"] = "test"
    """Measure the test set, or the images held out of the training set."""
    batch_size: int = 500
    """Images at once."""
    precision: PrecisionName = "32"
    """Numbers of 32 bits, bf16 in matrix products, or 64 bits."""
    accelerator: AcceleratorName = "auto"
    """Where to compute; auto takes a GPU if torch finds one."""


def run(words: Sequence[str]) -> int:
    """Measure and print."""
    examples = "attnconv evaluate runs/quadratic-digits\nattnconv evaluate best.safetensors --data.root PATH/TO/CIFAR"
    about = "Measure a model on a test set. The data default to those that the run was trained on."
    arguments = parse(Evaluate, "evaluate", words, about=about, examples=examples, default=_default(words))
    from attnconv.data.load_splits import load as load_data
    from attnconv.data.settings import problems
    from attnconv.models.model_loader import load as load_model
    from attnconv.training.evaluation import device_of, evaluate
    from attnconv.training.progress_bars import downloading
    from attnconv.training.run_checks import fit_problems, missing_accelerator
    from attnconv.training.settings import SettingsError

    wrong = problems(arguments.data)
    if arguments.batch_size < 1:
        wrong.append(f"--batch-size: must be at least 1, got {arguments.batch_size}.")
    wrong += missing_accelerator(arguments.accelerator)
    if wrong:
        raise SettingsError(wrong)
    loaded = load_model(arguments.checkpoint)
    with downloading() as progress:
        data = load_data(arguments.data, progress=progress)
    images = data.test if arguments.split == "test" else data.validation
    if wrong := fit_problems(loaded, data):
        raise SettingsError(wrong)
    found = evaluate(
        loaded.model,
        images,
        mean=loaded.mean or data.mean,
        std=loaded.std or data.std,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
        device=device_of(arguments.accelerator),
    )
    print(f"{loaded.source} on the {arguments.split} images of {arguments.data.name}:")
    print(f"accuracy {found.accuracy:.2%}, loss {found.loss:.4f}, {found.images} images")
    return 0


def _default(words: Sequence[str]) -> Evaluate | None:
    """For a run folder, or a weights file in one, the run's own data and precision."""
    from attnconv.training.run_folder import RunFolder

    flags = flags_of([("", Evaluate), ("data.", DataSettings)])
    for word in [words[place] for place in positional_places(words, flags)][:1]:
        folder = RunFolder.holding(Path(word))
        if folder is not None:
            settings = folder.settings()
            return Evaluate(word, data=settings.data, precision=settings.train.precision)
    return None
