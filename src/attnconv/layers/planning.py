"""How a layer runs: by structure, as one dense matrix, or as shifts."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real
from attnconv.encodings.base import Encoding

Backend: TypeAlias = Literal["auto", "reference", "dense", "structured"]
BACKENDS: tuple[str, ...] = get_args(Backend)
Plan: TypeAlias = Literal["dense", "structured", "shift"]


def check_running(attention_dropout: float, backend: str) -> None:
    """Check the dropout probability and the backend."""
    if not (is_real(attention_dropout) and 0 <= attention_dropout < 1):
        requirement = "must be a number of at least 0 and below 1"
        raise ValueError(bad("attention_dropout", requirement, repr(attention_dropout)))
    if backend not in BACKENDS:
        raise ValueError(bad("backend", f"must be one of {', '.join(BACKENDS)}", repr(backend)))


def anchor(encoding: Encoding) -> Tensor:
    """The tensor to which hard heads pass zero gradients: every parameter where one is trained, else any one."""
    parameters = list(encoding.parameters())
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        return torch.cat([parameter.flatten() for parameter in parameters])
    return parameters[0]
