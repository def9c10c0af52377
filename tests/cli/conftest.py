"""A run that the tests of the commands share."""

from pathlib import Path

import pytest

from attnconv.cli import main
from tests.cli.test_commands import TINY


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the command line trained."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", "quadratic-digits", *TINY, "--out", str(folder)])
    assert end.value.code == 0
    return folder
