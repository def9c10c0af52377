"""Sphinx configuration: MyST pages, the furo theme, an API reference from docstrings, and executed notebooks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import attnconv  # noqa: E402
from attnconv.explorer.html_page import BUILT  # noqa: E402

project = "attnconv"
author = "attnconv contributors"
copyright = "attnconv contributors"
release = version = attnconv.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas without an internet connection
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"attnconv {release}"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
# CONTRIBUTING.md and CHANGELOG.md are included in pages, but their links are relative to the root of the repository.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": "__init__, __new__, extra_repr",
}
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # list attributes in the same way as parameters
napoleon_use_rtype = False
add_module_names = False
default_role = "code"  # names in docstrings are in single backticks

SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Yields):$")
SHARED = re.compile(r"^    (\w+(?:, \w+)+)(: .*(?:\n {5,}.*)*)", re.MULTILINE)
SHAPE = re.compile(r"(?<![\w*`\\])\*(?=[\w.])(?![^*\n]*\w\*)")


def plain_text(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: indented formulas become literal blocks, and `*sizes` is escaped.

    Names that share a description (`stride, padding: ...`) get separate entries, because napoleon expects one name.
    """
    text = SHARED.sub(
        lambda entry: "\n".join(f"    {name}{entry[2]}" for name in entry[1].split(", ")), "\n".join(lines)
    )
    result: list[str] = []
    in_section = in_formula = False
    for line in text.split("\n"):
        in_section = in_section or SECTION.match(line) is not None
        indented = line.startswith("    ")
        if indented and not in_section and not in_formula and result and result[-1] == "":
            result += ["::", ""]
            in_formula = True
        if line and not indented:
            in_formula = False
        result.append(line if in_formula or ">>>" in line else SHAPE.sub(r"\\*", line))
    lines[:] = result


def render_notebooks(_app: Any) -> None:
    """Run each notebook in a separate process and write it as a page with its outputs."""
    folder = ROOT / "docs" / "notebooks"
    folder.mkdir(exist_ok=True)
    script, environment = ROOT / "docs" / "render_notebook.py", {**os.environ, "MPLBACKEND": "Agg"}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        subprocess.run([sys.executable, script, path, folder], check=True, env=environment)


def write_page(app: Any, error: Exception | None) -> None:
    """Write the explorer's page with its models into the documentation, which is then a complete site."""
    if error is None and app.tags.has("page"):
        subprocess.run([sys.executable, ROOT / "docs" / "write_page.py", Path(app.outdir) / "page"], check=True)


def setup(app: Any) -> None:
    """Register the rendering of notebooks, the page, and the docstring filter, which must run before napoleon."""
    if BUILT.is_file():
        app.tags.add("page")
    app.connect("builder-inited", render_notebooks)
    app.connect("build-finished", write_page)
    app.connect("autodoc-process-docstring", plain_text, priority=400)
