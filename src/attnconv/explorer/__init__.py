"""The explorer: a page that shows what the heads of a model do.

payload -> read_payload, attention_row     one file with the numbers that the page shows
export                                     a folder that opens from disk and can be hosted
example                                    the payload that comes with the package
explore, Selection                         the page in a notebook, and its selection
app, listen, server_for                    a server for this machine only, which accepts a visitor's images
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
