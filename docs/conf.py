"""Settings of the documentation: Sphinx with MyST pages, the furo theme, and an API reference from docstrings."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import attnconv  # noqa: E402

project = "attnconv"
author = "attnconv contributors"
copyright = "attnconv contributors"
release = version = attnconv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"attnconv {release}"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# README.md and CONTRIBUTING.md are included in pages here, and link to files as seen from the root.
suppress_warnings = ["myst.xref_missing"]

# The signature keeps the shapes: jaxtyping prints as Float[Tensor, 'b c height width'].
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as one list, like parameters
napoleon_use_rtype = False
add_module_names = False
default_role = "code"  # docstrings put `names` in single backticks

SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Yields):$")
SHARED = re.compile(r"^    (\w+(?:, \w+)+)(: .*(?:\n {5,}.*)*)", re.MULTILINE)
SHAPE = re.compile(r"(?<![\w*`\\])\*(?=[\w.])(?![^*\n]*\w\*)")


def plain_text(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Read docstrings as plain text: a formula set off by its indent is literal, `*sizes` is no emphasis.

    Names that share a description (`stride, padding: ...`) get an entry each: napoleon takes the first for a type.
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


def setup(app: Any) -> None:
    """Run before napoleon, which turns Google's sections into fields."""
    app.connect("autodoc-process-docstring", plain_text, priority=400)
