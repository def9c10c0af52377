"""Explorer: an interactive page that shows a model's attention heads.

payload -> read_payload, attention_row, class_row     one file with the data that the page shows
export                                     a folder that opens from disk and can be hosted
example                                    the payload shipped with the package
explore, Selection                         the page in a notebook, and its current selection
app, listen, server_for                    a local server that accepts uploaded images
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
