"""JSON from untrusted files."""

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """`json.loads`; every failure, also too deep nesting, is a `ValueError`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
