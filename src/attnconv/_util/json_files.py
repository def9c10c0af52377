"""JSON from files that nobody vouches for."""

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """`json.loads`, of which every failure is a `ValueError`.

    Raises:
        ValueError: The text is no JSON, its bytes are not UTF-8, or it nests deeper than Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
