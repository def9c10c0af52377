"""Data of a run folder that figures need: accuracy curves, heads after every epoch, images."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load_data
from attnconv.inspect.capture import attention_operators
from attnconv.models.model_loader import LoadedModel
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import SPLITS, Curve
from attnconv.report.head_centres import HeadGaussians
from attnconv.training.run_folder import RunFolder

IMAGES = 100  # test images over which attention that depends on images is averaged, as in the paper
PLACES = ((0.5, 0.5), (0.25, 0.75))  # the two queries of Figures 6 and 7, as parts of height and width
ZOOM = 7  # pixels, as in Figure 5
PAPER_LAYER = 4  # the layer of Figure 3

History = list[list[tuple[int, HeadGaussians]]]  # layer by layer: epochs and the heads at their ends

_loaded = lru_cache(maxsize=1)(load_data)  # the runs of one study share their images


def run_name(run: RunFolder) -> str:
    """The folder's name, also for the path `.`."""
    return run.path.resolve().name


def curves_of(run: RunFolder) -> list[Curve]:
    """The accuracy of a run, one curve for each measured split; raises a ValueError if no epoch is complete."""
    lines = run.metrics()
    if not lines:
        fix = "Wait for the first line of metrics.jsonl."
        raise ValueError(bad("run", "must have completed an epoch", str(run.path), fix))
    curves = []
    for split in SPLITS:
        points = {line["epoch"]: line["accuracy"] for line in lines if line["split"] == split}
        if points:
            curves.append(Curve(run_name(run), split, list(points), list(points.values())))
    return curves


def heads_of(run: RunFolder) -> History:
    """The layers whose heads have centres, from the initialisation (epoch 0) on."""
    history: dict[str, list[tuple[int, HeadGaussians]]] = {}
    for line in run.heads():
        for layer in line["layers"]:
            heads = HeadGaussians(layer["centres"], layer["covariance"])
            history.setdefault(layer["name"], []).append((line["epoch"], heads))
    return list(history.values())


def positions_of(run: RunFolder) -> tuple[int, int]:
    """Rows and columns of positions that the run's attention sees."""
    model = run.settings().model
    assert isinstance(model, AttentionSettings)
    side = model.image_size // model.downsampling
    return side, side


def test_data(run: RunFolder) -> Splits:
    """The images of a run; nothing is downloaded for a figure."""
    return _loaded(replace(run.settings().data, download=False))


def normalised(images: Tensor, loaded: LoadedModel, data: Splits) -> Tensor:
    """Images as the model was trained on them."""
    dtype = next(loaded.model.parameters()).dtype
    return normalise(images, loaded.mean or data.mean, loaded.std or data.std).to(dtype)


def images_for(run: RunFolder, loaded: LoadedModel) -> tuple[Tensor, bool]:
    """Images (n, c, height, width) to average attention over, and whether it depends on them.

    If it does, these are the first test images, else one blank image.
    """
    model, dtype = run.settings().model, next(loaded.model.parameters()).dtype
    blank = torch.zeros(2, model.image_channels, model.image_size, model.image_size, dtype=dtype)
    if all(operator.batch == 1 for operator in attention_operators(loaded.model, blank).values()):
        return blank[:1], False
    data = test_data(run)
    return normalised(data.test.images[:IMAGES], loaded, data), True
