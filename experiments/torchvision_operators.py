"""Make torchvision importable with a CPU build of torch, as timm and transformers import it.

PyPI's torchvision contains a library that is linked to CUDA. If it does not load, importing torchvision fails, because
torchvision registers fake kernels of operators that are not declared. This module declares them, without kernels:
non-maximum suppression does not work, but no image classifier needs it. Users with such builds have the same failure;
attnconv does not declare operators of other libraries.
"""

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare_missing() -> torch.library.Library | None:
    """Declare the operators if torchvision is installed and cannot load its own.

    Returns:
        Library object that must be kept alive as long as the declarations are needed, or None if they are not needed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return None
    declared = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        declared.define(schema)
    return declared
