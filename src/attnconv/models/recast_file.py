"""Recast networks as files: the weights of `recast(model)`, and which model that was.

The header (see `weights_file`) holds

    model         {"settings": ..} of a preset or checkpoint, or {"spec": "torchvision:resnet18"}
    alpha, only   the arguments of `recast`
    classes, mean, std    as in a checkpoint

To read one, the architecture is built afresh, recast, and given the weights. Nothing in a file is executed: where the
model came from a user's function (`package.module:function`), the file is rejected with the line that loads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attnconv._util.errors import bad
from attnconv._util.settings import plain
from attnconv.convert import plan_shifts, recast
from attnconv.models.checkpoint import About, fresh, load_tensors, read_about
from attnconv.models.classifiers import build
from attnconv.models.library_models import LIBRARIES, library_model
from attnconv.models.settings import ModelSettings, model_settings
from attnconv.models.weights_file import WeightsFile, check_version, weights_content, write_weights

FORMAT = "attnconv-recast"


def save_recast(
    path: str | Path,
    model: nn.Module,
    origin: str | ModelSettings,
    *,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
    about: dict[str, tuple[Any, ...]] | None = None,
) -> None:
    """Write a recast network atomically; `alpha` and `only` are those of `recast`.

    `origin` is what was recast: settings of a model of this library, or the argument of `load`. `about` holds
    `classes`, `mean` and `std` where they are known.
    """
    source = {"spec": origin} if isinstance(origin, str) else {"settings": plain(origin)}
    description = {"model": source, "alpha": alpha, "only": None if only is None else list(only)}
    description |= About(**(about or {}))._asdict()
    # Copies: the format has no two names for one tensor, and shared weights are shared again when they are loaded.
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    write_weights(path, weights_content(tensors, FORMAT, description))


def rebuild(file: WeightsFile) -> tuple[nn.Module, ModelSettings | None, About]:
    """Rebuild a recast network; returns it with its settings (None for models of libraries), classes and normalisation.

    Raises `ValueError` for a file that was made from a user's function, does not fit its model, or is damaged.
    """
    check_version(file)
    source, origin = file.value("model", dict), file.source
    alpha, only = file.value("alpha", float, int, type(None)), file.value("only", list, type(None))
    spec, given, settings = source.get("spec"), source.get("settings"), None
    library, _, name = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if isinstance(given, dict):
        settings = model_settings(given, origin=origin)
    elif library not in LIBRARIES:
        fix = f"Load it with: model = attnconv.recast(YOUR_MODEL, alpha={alpha}, only={only}); "
        fix += f"model.load_state_dict(safetensors.torch.load_file({Path(origin).name!r}))."
        requirement = "must name a model of a library; no function is called"
        raise ValueError(bad("checkpoint", requirement, repr(spec), fix, origin=origin))
    about = read_about(file, settings)
    base = fresh(lambda: build(settings) if settings else library_model(library, name)[0], file.tensors)
    model = recast(base, alpha=alpha, only=only)
    load_tensors(model, file.tensors, origin=origin)
    plan_shifts(model)
    return model, settings, about
