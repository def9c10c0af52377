"""Figures and HTML reports of runs and audits.

`write_report` writes the report of a run, and `write_audit` writes that of an audit. The `draw_...` functions return
matplotlib figures, which `save` writes as PNG, SVG and PDF files.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
