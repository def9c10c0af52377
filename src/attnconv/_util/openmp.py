"""Settings of OpenMP, which must be made before torch is imported."""

import os


def limit_spinning() -> None:
    """Let the threads of torch's Linux builds wait without spinning after some microseconds, unless the user decides.

    By default, they spin for milliseconds. If other processes use all cores, this slows small models down more than a
    second thread speeds them up (results/busy-machine).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
