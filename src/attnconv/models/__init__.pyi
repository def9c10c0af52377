from .checkpoint import (
    Checkpoint as Checkpoint,
    load_weights as load_weights,
    read_checkpoint as read_checkpoint,
    save_weights as save_weights,
)
from .classifiers import (
    AttentionClassifier as AttentionClassifier,
    ResNet as ResNet,
    StagedClassifier as StagedClassifier,
    build as build,
)
from .hub_upload import save_to_hub as save_to_hub
from .model_loader import LoadedModel as LoadedModel, load as load
from .operation_counts import flops_all as flops_all, flops_paper as flops_paper, parameters as parameters
from .presets import CATALOGUE as CATALOGUE, PRESETS as PRESETS, list_models as list_models
from .settings import (
    AttentionSettings as AttentionSettings,
    ModelSettings as ModelSettings,
    ResNetSettings as ResNetSettings,
    StagedSettings as StagedSettings,
)
