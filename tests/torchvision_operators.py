"""Lets torchvision, and timm and transformers which import it, load beside a CPU build of torch.

PyPI's torchvision holds a library that is linked to CUDA. Where that does not load, torchvision's Python code fails at
once, since it registers fake versions of operators that nobody has declared. Declared, they exist without a kernel:
boxes cannot be suppressed, and no model of images needs that. Users of such a pair of builds have the same failure;
the library itself declares nothing for others.
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
        What holds the declarations for as long as it lives; None where there is no need.
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
