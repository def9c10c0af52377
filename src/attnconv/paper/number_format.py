"""Numbers of several runs as tables show them: mean and deviation, in their unit."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["share", "points", "number", "minutes"]
MAGNITUDES = 1000.0  # largest over least from which a mean says nothing


def spoken(values: Sequence[float], unit: Unit) -> str:
    """Mean and sample deviation in a unit; the range where numbers are of other magnitudes; a dash for no values.

    Args:
        values: One for each run.
        unit: Unit to print; shares and points are fractions of 1.

    Example:
        >>> spoken([0.8, 0.9], "share"), spoken([0.012], "points"), spoken([3.0, 7e12], "number")
        ('85.0 ± 7.1 %', '+1.20 points', '3.00 to 7e+12')
    """
    if not values:
        return "-"
    least, largest = min(values), max(values)
    if unit == "number" and 0 < least * MAGNITUDES < largest:
        return f"{_rounded(least, unit)} to {_rounded(largest, unit)}"
    scale, ending = {"share": (100, " %"), "points": (100, " points")}.get(unit, (1, ""))
    mean = scale * statistics.fmean(values)
    sign = "+" if unit == "points" and mean > 0 else ""
    spread = ""
    if len(values) > 1 and all(map(math.isfinite, values)):
        spread = f" ± {_rounded(scale * statistics.stdev(values), unit)}"
    return f"{sign}{_rounded(mean, unit)}{spread}{ending}"


def _rounded(value: float, unit: Unit) -> str:
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "unknown"
    if unit == "number":
        return f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:.2f}" if unit == "points" else f"{value:.1f}"
