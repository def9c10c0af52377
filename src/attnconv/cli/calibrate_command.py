"""`attnconv calibrate`: measure the constants of the planner (`attnconv.operators.planner`) on this machine."""

from dataclasses import asdict, dataclass
from typing import Literal

from attnconv._util.settings import SettingsError


@dataclass(frozen=True)
class Arguments:
    """Measure the speed of this machine in a few seconds, and save the result in the user's cache folder.

    Layers whose attention depends only on positions use the result to choose the faster of two algorithms: one uses the
    dense attention matrix, the other a structured form of it. Without a calibration, the layers assume typical speeds.

    Examples:
        attnconv calibrate
        attnconv calibrate --accelerator cuda

    Attributes:
        accelerator: Device to measure.
    """

    accelerator: Literal["cpu", "cuda"] = "cpu"


def run(arguments: Arguments) -> None:
    """Measure, print and save the constants."""
    import torch

    from attnconv.operators.planner import calibrate, keep
    from attnconv.training.run_checks import missing_accelerator

    if wrong := missing_accelerator(arguments.accelerator):
        raise SettingsError(wrong)
    torch.set_flush_denormal(True)
    found = calibrate(arguments.accelerator)
    path = keep(found, arguments.accelerator)
    for name, value in asdict(found).items():
        print(f"{name:12} {value:.3g}")
    print(f"Calibration: {path}")
