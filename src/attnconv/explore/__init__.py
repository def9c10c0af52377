"""The explorer: a page that shows what the heads of a model do, its payload, and the ways in.

payload -> read_payload, attention_row     one file with the numbers that the page shows
export                                     a folder that opens from disk and can be hosted
example                                    the payload that comes with the package
explore                                    the page in a notebook
app, listen, server_for                    a server for this machine alone, which takes one's own images
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.explore.attending import attention_row as attention_row
    from attnconv.explore.building import Pictures as Pictures
    from attnconv.explore.building import payload as payload
    from attnconv.explore.exporting import export as export
    from attnconv.explore.moments import HeadShapes as HeadShapes
    from attnconv.explore.moments import Moment as Moment
    from attnconv.explore.moments import moments_of as moments_of
    from attnconv.explore.notebook import Explorer as Explorer
    from attnconv.explore.notebook import explore as explore
    from attnconv.explore.page import find_page as find_page
    from attnconv.explore.reading import Payload as Payload
    from attnconv.explore.reading import PayloadLayer as PayloadLayer
    from attnconv.explore.reading import read_payload as read_payload
    from attnconv.explore.server import app as app
    from attnconv.explore.server import listen as listen
    from attnconv.explore.server import server_for as server_for
    from attnconv.explore.session import Session as Session
    from attnconv.explore.shipped import example as example
    from attnconv.explore.uploads import read_upload as read_upload
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
