from .html_page import (
    export as export,
    find_page as find_page,
)
from .notebook import (
    Explorer as Explorer,
    Selection as Selection,
    explore as explore,
)
from .payload_format import (
    Payload as Payload,
    PayloadLayer as PayloadLayer,
    attention_row as attention_row,
    example as example,
    read_payload as read_payload,
)
from .payload_write import (
    HeadShapes as HeadShapes,
    Moment as Moment,
    Pictures as Pictures,
    moments_of as moments_of,
    payload as payload,
)
from .server import (
    app as app,
    listen as listen,
    server_for as server_for,
)
from .session import (
    Session as Session,
    read_upload as read_upload,
)
