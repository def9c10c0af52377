"""Figures and HTML reports of runs and audits.

`write_report` writes the report of a run, and `write_audit` the report of an audit. The functions `draw_...` return
matplotlib figures, which `save` writes as PNG, SVG and PDF files.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
