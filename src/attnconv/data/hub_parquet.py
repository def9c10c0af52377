"""A folder of parquet files in the layout of the Hugging Face hub: ``train-00000-of-00004.parquet`` and so on.

Columns: ``img``, a struct of ``bytes`` (a PNG file) and ``path``, and integer columns of labels. The PNGs are decoded
by Pillow on one thread: at 32 x 32 pixels a second thread only waits for the first (measured on two cores: 43 us an
image with one thread, 76 us with two).

A file of some kilobytes can unpack to many gigabytes. What its footer says of rows and bytes is therefore read first,
and rows are unpacked a few at a time, since the format can store one value for many of them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from attnconv._util.errors import bad
from attnconv.data.cifar_pickles import PIXELS
from attnconv.data.decoded_cache import Tensors, file_digest
from attnconv.data.image_decoding import PictureError, open_picture

LARGEST_ROW = 8192
"""The most bytes that a row of a split may unpack to, on average: the pixels of an image are 3,072."""
_AT_ONCE = 1 << 28
"""The most bytes that rows may have that are unpacked together, if each were as large as all of its group."""

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.parquet")

Files = dict[str, list[Path]]


def parquet_files(folder: Path) -> Files | None:
    """The parquet files of a folder by split.

    Args:
        folder: where to look.

    Returns:
        ``train`` and ``test`` with their files in order; None if the folder holds no parquet file.

    Raises:
        ValueError: if a split or one of its numbered files is missing.
    """
    files = {split: sorted(folder.glob(f"{split}*.parquet")) for split in ("train", "test")}
    if not any(files.values()):
        return None
    for split, paths in files.items():
        if not paths:
            requirement = f"must hold {split}-*.parquet beside the other files"
            raise ValueError(bad(str(folder), requirement, "a folder without it", "The folder is half downloaded."))
        missing = sorted(_expected(paths) - {path.name for path in paths})
        if missing:
            requirement = f"must hold all {len(_expected(paths))} files of {split}"
            got = f"a folder without {', '.join(missing)}"
            raise ValueError(bad(str(folder), requirement, got, "The folder is half downloaded."))
    return files


def _expected(paths: list[Path]) -> set[str]:
    """Names of all files of a split, as the names that are there count them."""
    shards = [found for path in paths if (found := _SHARD.fullmatch(path.name)) is not None]
    totals = {(found["split"], int(found["total"])) for found in shards}
    return {f"{split}-{number:05d}-of-{total:05d}.parquet" for split, total in totals for number in range(total)}


def check_parquet(files: Files) -> str:
    """Checksums of the files, which say what is in them."""
    return " ".join(file_digest(path) for paths in files.values() for path in paths)


def read_parquet(files: Files, labels: str, rows: dict[str, int]) -> Tensors:
    """Read images and labels.

    Args:
        files: the files by split, from `parquet_files`.
        labels: name of the column of labels (``label``, ``fine_label``, ``coarse_label``).
        rows: how many images each split must have.

    Returns:
        ``train_images``, ``train_labels``, ``test_images``, ``test_labels``.

    Raises:
        ValueError: if a file is damaged, lacks a column, holds an image that cannot be decoded or is not 32 x 32 RGB,
            or a split has another number of rows.
    """
    tensors: Tensors = {}
    for split, paths in files.items():
        _check_counts(split, paths, labels, rows[split])
        parts = [part for path in paths for part in _read(path, labels)]
        # height, width, channels as PNG has it -> channels first
        images = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).permute(0, 3, 1, 2).contiguous()
        numbers = torch.from_numpy(np.concatenate([numbers for _, numbers in parts]))
        tensors |= {f"{split}_images": images, f"{split}_labels": numbers}
    return tensors


def _check_counts(split: str, paths: list[Path], labels: str, rows: int) -> None:
    """Compare what the footers say of rows and bytes with what a split must have, before anything is unpacked."""
    found = size = 0
    for path in paths:
        with _opened(path, labels) as file:
            for group in range(file.num_row_groups):
                found += file.metadata.row_group(group).num_rows
                size += _bytes(file, group)
    folder, names = str(paths[0].parent), ", ".join(path.name for path in paths)
    requirement = f"must hold {rows:,} rows of {split}"
    if found != rows:
        raise ValueError(bad(folder, requirement, f"{found:,} in {names}"))
    if size > (most := rows * LARGEST_ROW):
        raise ValueError(bad(folder, f"{requirement} that unpack to {most:,} bytes at most", f"{size:,} in {names}"))


def _bytes(file: pq.ParquetFile, group: int) -> int:
    """What the images of a group of rows unpack to, each stored value counted once."""
    columns = [file.metadata.row_group(group).column(index) for index in range(file.metadata.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == "img.bytes")


@contextmanager
def _opened(path: Path, labels: str) -> Iterator[pq.ParquetFile]:
    """A parquet file that has both columns; pyarrow's errors become a `ValueError` with the file's name."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            for name, fits, kind in (
                ("img", _is_image, "a struct of bytes and path"),
                (labels, pa.types.is_integer, "integers"),
            ):
                index = schema.get_field_index(name)
                if index < 0:
                    raise ValueError(bad(str(path), f"must have the column {name!r}", f"{', '.join(schema.names)}"))
                if not fits(got := schema.field(index).type):
                    raise ValueError(bad(str(path), f"must have {kind} in the column {name!r}", str(got)))
            yield file
    except (pa.ArrowException, OSError) as error:
        fix = "The file is half downloaded or damaged: fetch it again."
        raise ValueError(bad(str(path), "must be a whole parquet file", str(error), fix)) from error


def _is_image(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    content = kind.field("bytes").type
    return bool(pa.types.is_binary(content) or pa.types.is_large_binary(content))


def _read(path: Path, labels: str) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images and labels of a file, some rows at a time."""
    row = 0
    with _opened(path, labels) as file:
        for group in range(file.num_row_groups):
            rows = max(1, min(1024, _AT_ONCE // max(1, _bytes(file, group))))
            columns = ["img.bytes", labels]
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                numbers = batch.column(labels)
                if numbers.null_count:
                    requirement = f"must have a label in every row of {labels!r}"
                    raise ValueError(bad(str(path), requirement, f"{numbers.null_count} without"))
                contents = batch.column("img").field("bytes").to_pylist()
                pixels = [_decode(png, f"row {row + place} of {path}") for place, png in enumerate(contents)]
                yield np.stack(pixels), np.asarray(numbers.to_numpy(zero_copy_only=False), np.int64)
                row += len(batch)


def _decode(content: bytes | None, name: str) -> npt.NDArray[np.uint8]:
    """Decode a PNG file into (height, width, channels)."""
    if content is None:
        raise ValueError(bad(name, "must hold an image", "nothing"))
    channels, height, width = PIXELS
    try:
        with open_picture(content, name, formats=("PNG",)) as image:
            if image.mode == "RGB" and image.size == (width, height):
                return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, channels)
            got = f"{image.mode} of {image.size[0]} x {image.size[1]}"
    except PictureError as error:
        raise ValueError(f"{error} Fetch the file again.") from error
    raise ValueError(bad(name, f"must be an RGB image of {width} x {height} pixels", got))
