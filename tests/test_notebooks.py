"""The committed notebooks: no outputs, a format with readable diffs, valid links, and the code that runs them.

`tests/verify/test_notebooks.py` runs them.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebook_cells import code_cells, run_cell

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "audit-your-own-vit",
        "from-cnn-to-attention-and-back",
        "theorem-in-ten-minutes",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestAsCommitted:
    def test_no_cell_has_outputs_or_was_counted(self, path: Path) -> None:
        cells = [cell for cell in _read(path)["cells"] if cell["cell_type"] == "code"]
        assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []

    def test_keys_are_sorted_and_nothing_is_said_of_a_machine(self, path: Path) -> None:
        content = _read(path)
        assert (
            path.read_text(encoding="utf-8") == json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        )
        assert content["metadata"] == {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        assert [cell["id"] for cell in content["cells"] if cell["metadata"]] == []

    def test_cells_are_few_and_have_names_of_their_own(self, path: Path) -> None:
        names = [cell["id"] for cell in _read(path)["cells"]]
        assert len(set(names)) == len(names)
        assert 5 <= len(code_cells(path)) <= 12

    def test_links_to_files_lead_somewhere(self, path: Path) -> None:
        words = [cell for cell in _read(path)["cells"] if cell["cell_type"] == "markdown"]
        targets = re.findall(r"\]\(([^)#]+)", "".join(line for cell in words for line in cell["source"]))
        assert [target for target in targets if not (path.parent / target).exists()] == []

    def test_readme_and_quick_start_name_it(self, path: Path) -> None:
        for page in ("README.md", "docs/quickstart.md"):
            assert f"notebooks/{path.name})" in (ROOT / page).read_text(encoding="utf-8")


class TestRunner:
    def test_the_last_expression_is_the_value_and_magics_are_left_out(self) -> None:
        namespace: dict[str, Any] = {}
        assert run_cell("%matplotlib inline\na = 2", "first", namespace) is None
        assert run_cell("b = a + 1\nb", "second", namespace) == 3

    def test_a_cell_that_fails_ends_the_run_with_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.ipynb"
        cells = [{"cell_type": "code", "id": "claim", "source": ["one = 1\n", "assert one == 2"]}]
        path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
        command = [sys.executable, "-m", "tests.notebook_cells", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.returncode == 1
        assert "broken.ipynb, cell claim" in result.stderr
        assert "AssertionError" in result.stderr


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
