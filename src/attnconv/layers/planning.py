"""How a layer runs: by structure, as one dense matrix, or as shifts."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real
from attnconv.encodings.base import Encoding
from attnconv.operators.base import AttentionOperator
from attnconv.operators.kronecker import Kronecker

Backend: TypeAlias = Literal["auto", "reference", "dense", "structured"]
BACKENDS: tuple[str, ...] = get_args(Backend)
Plan: TypeAlias = Literal["dense", "structured", "shift"]


def check_running(attention_dropout: float, backend: str) -> None:
    """Refuse a probability outside [0, 1), and a backend that does not exist.

    Raises:
        ValueError: As said.
    """
    if not (is_real(attention_dropout) and 0 <= attention_dropout < 1):
        requirement = "must be a number of at least 0 and below 1"
        raise ValueError(bad("attention_dropout", requirement, repr(attention_dropout)))
    if backend not in BACKENDS:
        raise ValueError(bad("backend", f"must be one of {', '.join(BACKENDS)}", repr(backend)))


def has_two_forms(operator: AttentionOperator, pixels: Tensor) -> bool:
    """Whether the planner has a choice: small factors may be faster as one matrix; no question under a compiler."""
    known = not torch.compiler.is_compiling() and pixels.device.type != "meta"
    return known and isinstance(operator, Kronecker)


def anchor(encoding: Encoding) -> Tensor:
    """What hard heads hang their zero gradients on: every parameter where one is trained, else any one."""
    parameters = list(encoding.parameters())
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        return torch.cat([parameter.flatten() for parameter in parameters])
    return parameters[0]
