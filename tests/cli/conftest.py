"""Fixtures shared by the tests of the commands."""

from pathlib import Path

import pytest

from attnconv.cli import main
from tests.cli.test_commands import TINY


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder trained by the command line."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", "quadratic-digits", *TINY, "--out", str(folder)])
    assert end.value.code == 0
    return folder
