"""Pickles of the official form are read; whatever else a pickle can do is refused and not done."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnconv.data.restricted_unpickler import read_pickle
from tests.data.making import pixels, python2_pickle


class Evil:
    """Calls a function when unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def read(content: bytes) -> dict[str, Any]:
    return read_pickle(content, "some.file")


def test_a_pickle_of_python_2() -> None:
    images = pixels(3)
    content = read(python2_pickle(images, [5, 0, 2]))
    assert content["labels"] == [5, 0, 2]
    assert content["data"].dtype == np.uint8
    np.testing.assert_array_equal(content["data"], images.reshape(3, -1))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_of_python_3(protocol: int) -> None:
    images = pixels(3).reshape(3, -1)
    content = pickle.dumps({b"data": images, "labels": [1, 2, 3]}, protocol=min(protocol, 4))
    np.testing.assert_array_equal(read(content)["data"], images)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_foreign_names_are_refused_and_nothing_runs(protocol: int, tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    for evil in (Evil(os.system, f"touch {witness}"), Evil(os.mkdir, str(witness)), Evil(eval, "1 + 1")):
        content = pickle.dumps({"data": evil}, protocol=protocol)
        with pytest.raises(ValueError, match=r"some\.file: must be a pickle of numbers and arrays, got one that names"):
            read(content)
    assert not witness.exists()


def test_the_message_says_which_name() -> None:
    with pytest.raises(ValueError, match=r"got one that names posix\.system\. Nothing of it was executed"):
        read(pickle.dumps(Evil(os.system, "true")))


def test_numpy_beyond_the_three_names_is_foreign() -> None:
    with pytest.raises(ValueError, match=r"names numpy\.fromfile"):
        read(b"\x80\x02cnumpy\nfromfile\n.")


@pytest.mark.parametrize("length", [0, 1, 50, 400, 9000])
def test_a_truncated_pickle(length: int) -> None:
    content = python2_pickle(pixels(3), [1, 2, 3])
    with pytest.raises(ValueError, match=r"some\.file: must be a whole pickle, got .*The file is damaged"):
        read(content[:length])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.int8), r"must be a whole pickle, got .*an array is not made of bytes in row-major order"),
        (
            np.asfortranarray(np.zeros((2, 3), np.uint8)),
            r"must be a whole pickle, got .*not made of bytes in row-major",
        ),
        (np.zeros((2, 3)), r"must be a whole pickle, got .*an array is not made of bytes"),
        (np.array([Evil(os.getcwd)]), r"must be a pickle of numbers and arrays, got one that names posix\.getcwd"),
    ],
)
def test_arrays_of_anything_but_bytes(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"some\.file: {message}"):
        read(pickle.dumps({"data": array}, protocol=4))


def test_an_array_that_lies_about_its_size() -> None:
    honest = python2_pickle(pixels(3), [1, 2, 3])
    lie = honest.replace(b"J\x03\x00\x00\x00J\x00\x0c\x00\x00", b"J\x04\x00\x00\x00J\x00\x0c\x00\x00", 1)
    assert lie != honest
    with pytest.raises(ValueError, match=r"array of shape \(4, 3072\) comes with 9216 bytes"):
        read(lie)


def test_a_length_that_no_system_can_address() -> None:
    with pytest.raises(ValueError, match=r"some\.file: must be a whole pickle, got OverflowError"):
        read(b"\x80\x05\x96" + b"\xff" * 8)


def test_no_dictionary() -> None:
    with pytest.raises(ValueError, match=r"some\.file: must hold a dictionary, got list"):
        read(pickle.dumps([1, 2]))
