"""Reading the pickles of the official CIFAR archives without trusting them.

A pickle is a program; loading an unknown one runs whatever it names. These need three names of numpy only, and even
those are not given to the pickle: it gets stand-ins that remember shape, dtype and bytes and can do nothing else. Any
other name is refused before anything is called.
"""

import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from attnconv._util.errors import bad

# A damaged pickle can fail in as many ways as there are opcodes.
_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,  # a length above what the system can address
    MemoryError,  # or above what it has
    RecursionError,
)


class _Type:
    """Stands for ``numpy.dtype("u1")``: remembers the code, and only bytes will do."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("ascii", "replace") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Byte order, fields and alignment mean nothing for single bytes."""


class _Array:
    """Stands for ``numpy.ndarray``: remembers shape, dtype and content as they are unpickled."""

    shape: tuple[int, ...] = ()
    content: bytes = b""
    code: object = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        shape = tuple(int(side) for side in shape)
        if not isinstance(kind, _Type) or kind.code not in ("u1", "|u1") or fortran or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array is not made of bytes in row-major order")
        if min(shape, default=0) < 0 or math.prod(shape) != len(content):
            raise pickle.UnpicklingError(f"an array of shape {shape} comes with {len(content)} bytes")
        self.shape, self.content = shape, content

    def array(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.content, np.uint8).reshape(self.shape)


def _reconstruct(*_: object) -> _Array:
    return _Array()


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names above and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise _ForeignNameError(f"{module}.{name}")
        return _NAMES[module, name]


class _ForeignNameError(pickle.UnpicklingError):
    """The pickle names something that data has no use for."""


def read_pickle(content: bytes, path: str) -> dict[str, Any]:
    """Read a dictionary of lists, strings and byte arrays, executing nothing.

    Args:
        content: the pickle.
        path: its name, for messages.

    Returns:
        The dictionary with keys as strings and numpy arrays of bytes where the pickle has arrays.

    Raises:
        ValueError: if the pickle names anything but numpy's arrays, is damaged, or holds no dictionary.
    """
    try:
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _ForeignNameError as error:
        requirement = "must be a pickle of numbers and arrays"
        fix = "Nothing of it was executed. Fetch the file again from the data set's home."
        raise ValueError(bad(path, requirement, f"one that names {error}", fix)) from error
    except _DAMAGED as error:
        fix = "The file is damaged: fetch it again."
        raise ValueError(bad(path, "must be a whole pickle", f"{type(error).__name__}: {error}", fix)) from error
    if not isinstance(found, dict):
        raise ValueError(bad(path, "must hold a dictionary", type(found).__name__))
    return {_text(key): value.array() if isinstance(value, _Array) else value for key, value in found.items()}


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
