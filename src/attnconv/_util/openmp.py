"""Settings of OpenMP, which must be made before torch is imported."""

import os


def limit_spinning() -> None:
    """Let the threads of torch's Linux builds wait without spinning after some microseconds, unless the user decides.

    By default, they spin for milliseconds. If other processes use all cores, a small model then trains up to 15 times
    more slowly than with one thread.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
