"""The payload that comes with the package: the model that `attnconv demo` trained, on four digits.

attnconv demo
attnconv explore --moments 12 --export shown      # shown/payload.safetensors is the file
"""

from pathlib import Path

FILE = Path(__file__).with_name("example.safetensors")


def example() -> bytes:
    """What `attnconv explore` shows where there is no model to show.

    Example:
        >>> from attnconv.explorer import read_payload
        >>> read_payload(example()).title
        'runs/demo'
    """
    return FILE.read_bytes()
