"""Heads as Gaussians over the shift delta = key - query, and the contours that hold a given part of their mass.

A quadratic head's probabilities are those of a Gaussian with centre Delta and covariance Sigma, sampled at the pixels
and renormalised (equation 18: Sigma = I / (2 alpha); equation 19: any Sigma). In two dimensions the squared Mahalanobis
distance from the centre is exponentially distributed with mean 2, hence the mass p lies within

    (delta - Delta)^T Sigma^-1 (delta - Delta)  <=  -2 ln(1 - p),

an ellipse with semi-axes sqrt(-2 ln(1 - p) lambda_i) along the eigenvectors of Sigma.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnconv._util.errors import bad

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeadGaussians:
    """The heads of one layer.

    Attributes:
        centres: (h, 2), row shift and column shift in pixels.
        covariances: (h, 2, 2), in pixels squared. Infinite for a head without any preference.

    Raises:
        ValueError: The shapes are not (h, 2) and (h, 2, 2).

    Example:
        >>> heads = HeadGaussians.of([[0, 1]], [[[0.5, 0], [0, 0.5]]])
        >>> heads.covariances.shape
        (1, 2, 2)
    """

    centres: FloatArray
    covariances: FloatArray

    def __post_init__(self) -> None:
        if self.centres.ndim != 2 or self.centres.shape[1] != 2:
            raise ValueError(bad("centres", "must have the shape (heads, 2)", self.centres.shape))
        wanted = (len(self.centres), 2, 2)
        if self.covariances.shape != wanted:
            raise ValueError(bad("covariances", f"must have the shape {wanted}", self.covariances.shape))

    @staticmethod
    def of(centres: Any, covariances: Any) -> "HeadGaussians":
        """From nested lists, arrays or tensors; None in a list becomes NaN."""
        return HeadGaussians(np.asarray(centres, dtype=np.float64), np.asarray(covariances, dtype=np.float64))


def percentile_radius(mass: float) -> float:
    """Mahalanobis radius that holds the part `mass` of a two-dimensional Gaussian: sqrt(-2 ln(1 - mass))."""
    return math.sqrt(-2.0 * math.log1p(-mass))


def contour(covariance: FloatArray, mass: float, *, longest: float = math.inf) -> tuple[float, float, float]:
    """The ellipse around a head's centre that holds `mass`: long and short semi-axis in pixels, and angle in radians.

    The angle is the long axis's, from columns towards growing rows. `longest` bounds the axes, since renderers lose
    their precision far outside a panel.
    """
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    lengths = percentile_radius(mass) * np.sqrt(np.clip(variances, 0.0, None))
    minor, major = (min(float(length), longest) for length in lengths)
    row, column = directions[:, 1]
    return major, minor, math.atan2(float(row), float(column))


def is_broken(centre: FloatArray, covariance: FloatArray) -> bool:
    """Whether a head has no place; an infinite covariance is legal: the head attends to all pixels alike."""
    return not np.isfinite(centre).all() or bool(np.isnan(np.diagonal(covariance)).any())


def why_hidden(centre: FloatArray, covariance: FloatArray, view: float) -> str:
    """Why a panel over [-view, view]^2 hides a head's centre or lies inside its 50 % contour; empty if neither."""
    if is_broken(centre, covariance):
        return "not a number"
    if np.abs(centre).max() > view:
        return "outside the view"
    if not np.isfinite(covariance).all():
        return "wider than the view"
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    corners = np.array([(-view, -view), (-view, view), (view, -view), (view, view)]) - centre
    lengths = percentile_radius(0.5) * np.sqrt(np.clip(variances, 1e-300, None))
    surrounded = (np.hypot(*((corners @ directions) / lengths).T) < 1.0).all()
    return "wider than the view" if surrounded else ""


def choose_view(layers: Collection[HeadGaussians], *, limit: float) -> float:
    """Half the side, in pixels, of a square panel for the heads of all layers; it ends on the edge of a pixel.

    Holds 97 % of the centres and the 50 % contour of three heads in four, at least 5 x 5 pixels, and at most `limit`.
    """
    centres = np.concatenate([heads.centres for heads in layers])
    covariances = np.concatenate([heads.covariances for heads in layers])
    finite = np.isfinite(centres).all(1) & np.isfinite(covariances).all((1, 2))
    if not finite.any():
        return max(2.5, min(limit, 7.5))
    far = np.abs(centres[finite]).max(1)
    deviation = np.sqrt(np.clip(np.diagonal(covariances[finite], axis1=1, axis2=2).max(1), 0.0, None))
    wanted = max(np.quantile(far, 0.97), np.quantile(far + percentile_radius(0.5) * deviation, 0.75))
    return max(2.5, min(limit, math.ceil(float(wanted) + 0.2) + 0.5))
