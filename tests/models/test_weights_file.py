"""Weights files: errors for pickles (without unpickling) and for truncated or damaged files."""

import io
import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from attnconv.models.checkpoint import read_weights


def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, {"format": "x"}))
    return path


def with_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


class Bomb:
    """Object that would create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_it_reads_metadata_and_tensors(tmp_path: Path) -> None:
    found = read_weights(a_file(tmp_path))
    assert found.metadata == {"format": "x"}
    assert torch.equal(found.tensors["a"], torch.arange(6.0))


def test_a_file_without_metadata_has_none(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    assert read_weights(path).metadata == {}


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint: .*got nothing at .*nowhere"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"checkpoint: .*got the folder "):
        read_weights(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"checkpoint: .*safetensors.*got "):
            read_weights(path)


def test_a_file_with_bytes_behind_its_end_is_refused(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    path.write_bytes(path.read_bytes() + b"xy")
    with pytest.raises(ValueError, match=r"checkpoint: .*safetensors.*got "):
        read_weights(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{no json",
        b'{"\xff": 1}',
        b"[" * 100_000,
        {"a": {"dtype": "F32"}},
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": ["x", "y"]}},
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"__metadata__": {"format": 1}},
        {"__metadata__": ["format"]},
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_wrong_header_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(ValueError, match=r"checkpoint: .*safetensors.*got "):
        read_weights(with_header(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("content", [b"this is a text and nothing else", bytes(100), b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint: .*safetensors.*got "):
        read_weights(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_refused_and_nothing_of_it_runs(tmp_path: Path, zipped: bool) -> None:
    path, trace = tmp_path / "weights.safetensors", tmp_path / "trace"
    torch.save({"a": Bomb(trace)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="got a pickle, which was not read"):
        read_weights(path)
    assert not trace.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert trace.exists(), "the pickle would have run"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_any_protocol_is_refused(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "weights.pkl"
    path.write_bytes(pickle.dumps({"a": [1.0]}, protocol))
    with pytest.raises(ValueError, match=r"got a pickle, which was not read"):
        read_weights(path)


def test_a_header_whose_length_reads_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    content = safetensors.torch.save({"a": torch.zeros(1)}, {"text": "x" * 800})
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((896).to_bytes(8, "little") + content[8 : 8 + length].ljust(896) + content[8 + length :])
    assert path.read_bytes()[:2] == b"\x80\x03"  # also the start of a pickle of protocol 3
    assert read_weights(path).tensors["a"].shape == (1,)


def test_the_refusal_of_a_pickle_says_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"torch\.load\('model\.pt', weights_only=True\).*save_weights"):
        read_weights(path)


def test_a_pickle_is_not_advised_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"torch\.load\('weights\.safetensors', weights_only=True\)"):
        read_weights(path)


def test_the_refusal_of_a_trainers_state_names_the_weights_beside_it(tmp_path: Path) -> None:
    beside = a_file(tmp_path)
    path = tmp_path / "state.ckpt"
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=re.escape(str(beside))):
        read_weights(path)
