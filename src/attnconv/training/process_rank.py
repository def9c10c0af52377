"""Which of several processes this is, before Lightning has brought them together."""

import os
import time

from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

LONGEST = 1800.0  # seconds until a result must be there that another process measures


def is_first_process() -> bool:
    """Whether this is the process that writes: the only one, or the first that torchrun or Lightning started."""
    if "RANK" in os.environ:  # torchrun
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def await_result(folder: RunFolder) -> None:
    """Wait in the other processes until the first one has written a run's result.

    Args:
        folder: Of a training that is over.

    Raises:
        TimeoutError: Nothing is there after half an hour, as where machines do not share the folder.
    """
    end = time.monotonic() + LONGEST
    while folder.result() is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{folder.path} holds no result. All machines must see the same folder.")
        time.sleep(0.2)


def on_cpu(settings: RunSettings) -> bool:
    """Whether the run computes on the CPU."""
    import torch  # the command line asks for processes before it needs torch

    if settings.train.accelerator == "auto":
        return not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return settings.train.accelerator == "cpu"
