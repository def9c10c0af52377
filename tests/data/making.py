"""Small data sets in the formats of the real ones."""

import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from attnconv.data.cifar import CIFARS, Cifar, Remote

Bytes = npt.NDArray[np.uint8]


def pixels(rows: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)


def python2_pickle(images: Bytes, labels: list[int], key: str = "labels") -> bytes:
    """Return Python 2's protocol-2 pickle of {'data': array, 'labels': list}, the format of the official archives."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    flat = images.reshape(len(images), -1)
    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    )
    array += b"(" + number(1) + number(flat.shape[0]) + number(flat.shape[1]) + b"\x86" + kind + b"\x89"
    array += text(flat.tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key.encode()) + numbers + b"u."


def png(image: Bytes) -> bytes:
    """Return a (3, height, width) image as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, "PNG")
    return file.getvalue()


def small_cifar(name: str = "cifar10") -> tuple[Cifar, dict[str, bytes]]:
    """Return the metadata and the pickles (by name) of a data set with 12 + 8 training images and 10 test images."""
    real = CIFARS[name]
    key = f"{real.labels}s"
    sizes = {"data_batch_1": 12, "data_batch_2": 8, "test_batch": 10}
    files = {
        member: python2_pickle(pixels(rows, seed), [row % 10 for row in range(rows)], key)
        for seed, (member, rows) in enumerate(sizes.items())
    }
    test = {"test_batch": hashlib.md5(files["test_batch"]).hexdigest()}
    train = {name: hashlib.md5(content).hexdigest() for name, content in files.items() if name not in test}
    facts = dataclasses.replace(real, train=train, test=test, rows={"train": 20, "test": 10})
    return with_archive(facts, tar_gz(real.folder, files)), files


def with_archive(facts: Cifar, archive: bytes) -> Cifar:
    """Return the same metadata with the size and checksum of another archive."""
    remote = Remote(facts.archive.url, len(archive), hashlib.sha256(archive).hexdigest())
    return dataclasses.replace(facts, archive=remote)


def tar_gz(folder: str, files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(target.getvalue(), mtime=0)  # the same bytes every time


def write_parquet(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[int | None],
    *,
    column: str = "label",
    image: str = "img",
) -> None:
    rows = [{"bytes": content, "path": f"{row}.png"} for row, content in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(rows, kind), column: pa.array(labels, pa.int64())})
    pq.write_table(table, path)


def write_hub_folder(folder: Path, *, column: str = "label") -> None:
    """Write the images of `small_cifar` in the Hugging Face layout: two training files and one test file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    for seed, (name, rows) in enumerate(zip(names, (12, 8, 10), strict=True)):
        images = [png(image) for image in pixels(rows, seed)]
        write_parquet(folder / f"{name}.parquet", images, [row % 10 for row in range(rows)], column=column)


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(
    width: int, height: int, *, depth: int = 8, colour: int = 2, rows: int | None = None, interlaced: bool = False
) -> bytes:
    """Return a white PNG, possibly with missing rows; `colour` is 0 for grey, 2 for RGB, 3 for palettes, 6 for RGBA."""
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    rows = height if rows is None else rows
    pack, row = zlib.compressobj(1), b"\0" + b"\xff" * -(-width * bits // 8) if rows else b""
    data = b"".join(pack.compress(row) for _ in range(rows)) + pack.flush()
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    palette = png_chunk(b"PLTE", bytes(768)) if colour == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + head + palette + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
