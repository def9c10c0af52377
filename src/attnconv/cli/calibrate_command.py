"""`attnconv calibrate`: measure the constants of the planner (`attnconv.operators.planner`) on this machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from attnconv._util.errors import bad
from attnconv.cli.parsing import parse

_EXAMPLES = """\
attnconv calibrate
attnconv calibrate --device cuda
"""


@dataclass(frozen=True)
class Calibrate:
    """Arguments of `attnconv calibrate`."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure."""


def run(words: Sequence[str]) -> int:
    """Measure, print, keep."""
    about = (
        "Measure the constants from which layers choose the faster form of position-only attention, in a few seconds, "
        "and keep them in the user's cache folder. Without a calibration, typical constants are used."
    )
    arguments = parse(Calibrate, "calibrate", words, about=about, examples=_EXAMPLES)
    import torch

    from attnconv.operators.planner import calibrate, keep
    from attnconv.training.settings import SettingsError

    if arguments.device == "cuda" and not torch.cuda.is_available():
        fix = "torch finds no GPU; pass --device cpu."
        raise SettingsError([bad("--device", "must be a device that torch can use here", arguments.device, fix)])
    torch.set_flush_denormal(True)
    found = calibrate(arguments.device)
    path = keep(found, arguments.device)
    for name, value in asdict(found).items():
        print(f"{name:12} {value:.3g}")
    print(f"Calibration: {path}")
    return 0
