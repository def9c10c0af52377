"""The paper's figures from a run folder, as files and as one HTML page.

`write_report` does all of it for one run, `write_paper` the paper's whole set from several. The drawing functions take
plain arrays and give a matplotlib figure each, which `save` writes as PNG and SVG.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
