"""Run a notebook and write it as a Markdown page with its outputs: python docs/render_notebook.py NOTEBOOK FOLDER.

In workflows of GitHub, which name the repository in their environment, the page links to the notebook in Colab.
"""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("", "src")]
from tests.notebook_cells import run_cell  # noqa: E402


def render(path: Path, folder: Path) -> None:
    """Write NAME.md and its figures as PNG files to a folder."""
    parts, namespace = [], dict[str, Any](__name__="__main__")
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../").replace(".ipynb)", ".md)"))
            continue
        with redirect_stdout(io.StringIO()) as printed:
            value = run_cell(source, cell["id"], namespace)
        figures = [plt.figure(number) for number in plt.get_fignums()]
        if isinstance(value, Figure):
            figures.append(value)
        elif value is not None:
            printed.write(repr(value))
        parts.append(f"```python\n{source.removeprefix('%matplotlib inline').strip()}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for index, figure in enumerate(figures):
            name = f"{path.stem}-{cell['id']}-{index}.png"
            figure.savefig(folder / name, dpi=150)
            parts.append(f"![Figure drawn by the cell above]({name})")
        plt.close("all")
    repository, ref = (os.environ.get(name, "") for name in ("GITHUB_REPOSITORY", "GITHUB_REF_NAME"))
    if repository and ref:
        address = f"https://colab.research.google.com/github/{repository}/blob/{ref}/notebooks/{path.name}"
        badge = "https://colab.research.google.com/assets/colab-badge.svg"
        parts.insert(1, f"[![Open in Colab]({badge})]({address})")
    (folder / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    render(Path(sys.argv[1]), Path(sys.argv[2]))
