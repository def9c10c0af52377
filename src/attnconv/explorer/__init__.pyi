from .html_page import export as export, find_page as find_page
from .notebook import Explorer as Explorer, Selection as Selection, explore as explore
from .payload_format import (
    Payload as Payload,
    PayloadLayer as PayloadLayer,
    example as example,
    read_payload as read_payload,
)
from .payload_rows import attention_row as attention_row, class_row as class_row
from .payload_write import (
    Pictures as Pictures,
    Snapshot as Snapshot,
    payload as payload,
    snapshots_of as snapshots_of,
)
from .server import app as app, listen as listen, server_for as server_for
from .session import Session as Session, read_upload as read_upload
