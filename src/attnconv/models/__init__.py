"""Models: the paper's classifier, the residual network beside it, named presets, checkpoints and the loader.

`attnconv.models.load.load` is also `attnconv.load`.
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.models.checkpoint import Checkpoint as Checkpoint
    from attnconv.models.checkpoint import read_checkpoint as read_checkpoint
    from attnconv.models.checkpoint import restore as restore
    from attnconv.models.checkpoint import save_weights as save_weights
    from attnconv.models.classifier import AttentionClassifier as AttentionClassifier
    from attnconv.models.counts import flops_all as flops_all
    from attnconv.models.counts import flops_paper as flops_paper
    from attnconv.models.counts import parameters as parameters
    from attnconv.models.load import LoadedModel as LoadedModel
    from attnconv.models.presets import CATALOGUE as CATALOGUE
    from attnconv.models.presets import PRESETS as PRESETS
    from attnconv.models.resnet import ResNet as ResNet
    from attnconv.models.settings import AttentionSettings as AttentionSettings
    from attnconv.models.settings import ModelSettings as ModelSettings
    from attnconv.models.settings import ResNetSettings as ResNetSettings
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "AttentionClassifier": "classifier",
            "AttentionSettings": "settings",
            "CATALOGUE": "presets",
            "Checkpoint": "checkpoint",
            "LoadedModel": "load",
            "ModelSettings": "settings",
            "PRESETS": "presets",
            "ResNet": "resnet",
            "ResNetSettings": "settings",
            "flops_all": "counts",
            "flops_paper": "counts",
            "parameters": "counts",
            "read_checkpoint": "checkpoint",
            "restore": "checkpoint",
            "save_weights": "checkpoint",
        },
        submodules=("build", "checkpoint", "classifier", "counts", "load", "presets", "resnet", "settings", "tables"),
    )
