"""Moments of a training, from the centres and covariances that a run folder keeps of every epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.value_checks import whole
from attnconv.training.run_folder import RunFolder


@final
@dataclass(frozen=True, eq=False)
class HeadShapes:
    """The heads of one layer: score = -1/2 (d - centre)^T precision (d - centre).

    Attributes:
        centres: (row, column) in tokens.
        precision: In 1 / token^2.
    """

    centres: Float64[Tensor, "h 2"]
    precision: Float64[Tensor, "h 2 2"]


@final
@dataclass(frozen=True, eq=False)
class Moment:
    """One moment of a training.

    Attributes:
        name: On the page, such as `epoch 3`.
        layers: The heads of each layer by its name, where they have centres.
    """

    name: str
    layers: Mapping[str, HeadShapes]


def moments_of(run: RunFolder, count: int = 24) -> tuple[Moment, ...]:
    """At most `count` moments of a run: the first, the last, and between them ever longer steps.

    Raises:
        ValueError: `count` is below 1.
    """
    from attnconv.report.head_centres import choose_epochs

    count = whole("count", count, 1)
    recorded = {line["epoch"]: line["layers"] for line in run.heads() if line["layers"]}
    moments = []
    for epoch in choose_epochs(sorted(recorded), count) if recorded else ():
        heads = {
            layer["name"]: HeadShapes(
                torch.tensor(layer["centres"], dtype=torch.float64),
                torch.linalg.inv(torch.tensor(layer["covariance"], dtype=torch.float64)),
            )
            for layer in recorded[epoch]
            if len(layer["centres"][0]) == 2
        }
        moments.append(Moment(f"epoch {epoch}", heads))
    return tuple(moments)
