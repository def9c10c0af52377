"""Run the code cells of a notebook in order, in one namespace, without Jupyter.

    python -m tests.notebook_cells NOTEBOOK [FOLDER]

As in Jupyter, the value of a cell's last expression is shown: printed, or if it is a figure, written as a PNG to
FOLDER, like the open figures of pyplot. Lines with magic commands (%) do nothing.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[tuple[str, str]]:
    """Return the identifier and the source of each code cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["id"], "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Execute a cell and return the value of its last statement, or None if it is not an expression."""
    plain = re.sub(r"^(\s*)%.*", r"\1pass", source, flags=re.MULTILINE)
    tree = ast.parse(plain, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def run(path: Path, folder: Path | None) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in code_cells(path):
        value = run_cell(source, f"{path.name}, cell {name}", namespace)
        figures = [plt.figure(number) for number in plt.get_fignums()]
        if isinstance(value, Figure):
            figures.append(value)
        elif value is not None:
            print(repr(value))
        for index, figure in enumerate(figures):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / f"{path.stem}-{name}-{index}.png", dpi=100)
        plt.close("all")


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
