"""Moments of a training, from what a run folder keeps of them: centres and covariances after every epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.errors import bad
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
        name: What the page calls it, as `epoch 3`.
        layers: Name of each layer whose heads have centres -> its heads.
    """

    name: str
    layers: Mapping[str, HeadShapes]


def moments_of(run: RunFolder, count: int = 24) -> tuple[Moment, ...]:
    """At most `count` moments of a run: the first, the last, and between them ever longer steps.

    Args:
        run: The run folder.
        count: Most moments, at least 1.

    Returns:
        Moments in order; none for a run whose heads have no centres.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(bad("count", "must be at least 1", count))
    from attnconv.report.centres_over_training import choose_epochs

    lines = {line["epoch"]: line["layers"] for line in run.heads() if line["layers"]}
    chosen = choose_epochs(sorted(lines), count) if lines else []
    moments = []
    for epoch in chosen:
        layers = {}
        for layer in lines[epoch]:
            covariance = torch.tensor(layer["covariance"], dtype=torch.float64)
            centres = torch.tensor(layer["centres"], dtype=torch.float64)
            if centres.shape[1] == 2:
                layers[layer["name"]] = HeadShapes(centres, torch.linalg.inv(covariance))
        moments.append(Moment(f"epoch {epoch}", layers))
    return tuple(moments)
