"""Configuration shared by all tests: threads, denormals, hypothesis, options and the shared data folder."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from experiments.torchvision_operators import declare_missing

ROOT = Path(__file__).resolve().parent.parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # The import hook makes every process recompile the modules imported after it, without Python's cached bytecode.
    # Importing matplotlib before the hook avoids this. Every worker needs matplotlib; a single test rarely does.
    import matplotlib.figure  # noqa: F401

# Shells start background jobs with SIGINT ignored, and the processes that tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per worker: the tensors are small, and xdist already uses all cores.
torch.set_num_threads(1)
np.finfo(np.float64), np.finfo(np.float32)  # numpy 1 measures denormals here, and warns if they are flushed
torch.set_flush_denormal(True)

TORCHVISION = declare_missing()  # registered for the whole session

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("fixed", derandomize=True, print_blob=True, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("explore", derandomize=False, print_blob=True, **_COMMON)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnconv")
    group.addoption(
        "--verify-scale",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of `make verify` to run: 1 measures every claim at full scale, 0.1 is a fixed tenth",
    )


def pytest_configure(config: pytest.Config) -> None:
    scale = config.getoption("--verify-scale")
    if not 0.0 < scale <= 1.0:
        raise pytest.UsageError(f"--verify-scale: must be in (0, 1], got {scale}. Use 1 for the full measurement.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in tests/verify and tests/compile, and skip GPU tests if there is no GPU."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        parts = item.path.relative_to(ROOT).parts if item.path.is_relative_to(ROOT) else ()
        for tier in ("verify", "compile"):
            if parts[:2] == ("tests", tier):
                item.add_marker(tier)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache folder, so that the user's decoded images and calibration of the planner have no effect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def verify_scale(request: pytest.FixtureRequest) -> float:
    """Return the fraction of the full measurement (cases, epochs or repetitions) that a verify test performs."""
    return float(request.config.getoption("--verify-scale"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the project's folder of shared data sets, `../shared/data` next to the checkout, or skip the test."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder ../shared/data does not exist")
    return folder


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Disable the import hook's type checks, for tests that pass invalid arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed the global generator for each test, and restore the default dtype after it."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
