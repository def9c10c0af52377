"""`attnconv calibrate`: measure the constants of the planner (`attnconv.operators.planner`) on this machine."""

from dataclasses import asdict, dataclass
from typing import Literal

from attnconv._util.settings import Problem, SettingsError


@dataclass(frozen=True)
class Arguments:
    """Measure how fast this machine computes, in a few seconds, and keep it in the user's cache folder.

    Layers choose the faster form of position-only attention by these constants; without them, by typical ones.

    Examples:
        attnconv calibrate
        attnconv calibrate --device cuda

    Attributes:
        device: Device to measure.
    """

    device: Literal["cpu", "cuda"] = "cpu"


def run(arguments: Arguments) -> None:
    """Measure, print and store the constants."""
    import torch

    from attnconv.operators.planner import calibrate, keep

    if arguments.device == "cuda" and not torch.cuda.is_available():
        fix = "torch finds no GPU; pass --device cpu."
        raise SettingsError([Problem("--device", "must be a device that torch can use here", arguments.device, fix)])
    torch.set_flush_denormal(True)
    found = calibrate(arguments.device)
    path = keep(found, arguments.device)
    for name, value in asdict(found).items():
        print(f"{name:12} {value:.3g}")
    print(f"Calibration: {path}")
