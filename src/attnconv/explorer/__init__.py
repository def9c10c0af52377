"""The explorer: a page that shows what the heads of a model do, its payload, and the ways in.

payload -> read_payload, attention_row     one file with the numbers that the page shows
export                                     a folder that opens from disk and can be hosted
example                                    the payload that comes with the package
explore, Selection                         the page in a notebook, and what is looked at there
app, listen, server_for                    a server for this machine alone, which takes one's own images
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.explorer.attending import attention_row as attention_row
    from attnconv.explorer.building import Pictures as Pictures
    from attnconv.explorer.building import payload as payload
    from attnconv.explorer.exporting import export as export
    from attnconv.explorer.moments import HeadShapes as HeadShapes
    from attnconv.explorer.moments import Moment as Moment
    from attnconv.explorer.moments import moments_of as moments_of
    from attnconv.explorer.notebook import Explorer as Explorer
    from attnconv.explorer.notebook import explore as explore
    from attnconv.explorer.page import find_page as find_page
    from attnconv.explorer.reading import Payload as Payload
    from attnconv.explorer.reading import PayloadLayer as PayloadLayer
    from attnconv.explorer.reading import read_payload as read_payload
    from attnconv.explorer.selection import Selection as Selection
    from attnconv.explorer.server import app as app
    from attnconv.explorer.server import listen as listen
    from attnconv.explorer.server import server_for as server_for
    from attnconv.explorer.session import Session as Session
    from attnconv.explorer.shipped import example as example
    from attnconv.explorer.uploads import read_upload as read_upload
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Explorer": "notebook",
            "HeadShapes": "moments",
            "Moment": "moments",
            "Payload": "reading",
            "PayloadLayer": "reading",
            "Pictures": "building",
            "Selection": "selection",
            "Session": "session",
            "app": "server",
            "attention_row": "attending",
            "example": "shipped",
            "explore": "notebook",
            "export": "exporting",
            "find_page": "page",
            "listen": "server",
            "moments_of": "moments",
            "payload": "building",
            "read_payload": "reading",
            "read_upload": "uploads",
            "server_for": "server",
        },
    )
