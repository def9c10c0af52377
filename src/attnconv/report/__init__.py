"""Figures of runs, models and audits, and HTML pages that hold them.

`write_report` writes the report of a run, `write_audit` that of an audit. Functions `draw_...` take plain arrays and
return a matplotlib figure, which `save` writes as PNG and SVG.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
