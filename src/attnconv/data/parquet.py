"""A folder of parquet files in the layout of the Hugging Face hub: ``train-00000-of-00004.parquet`` and so on.

Columns: ``img``, a struct of ``bytes`` (a PNG file) and ``path``, and integer columns of labels. The PNGs are decoded
by Pillow on one thread: at 32 x 32 pixels a second thread only waits for the first (measured on two cores: 43 us an
image with one thread, 76 us with two).
"""

import io
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from attnconv._errors import bad
from attnconv.data.cache import Tensors, file_digest
from attnconv.data.official import PIXELS

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
        tables = [_read_table(path, labels) for path in paths]
        total = sum(len(table) for table in tables)
        if total != rows[split]:
            got = f"{total:,} in {', '.join(path.name for path in paths)}"
            raise ValueError(bad(str(paths[0].parent), f"must hold {rows[split]:,} rows of {split}", got))
        pixels = [_decode(table.column("img"), path) for table, path in zip(tables, paths, strict=True)]
        numbers = [_labels(table.column(labels), path, labels) for table, path in zip(tables, paths, strict=True)]
        # height, width, channels as PNG has it -> channels first
        images = torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).contiguous()
        tensors |= {f"{split}_images": images, f"{split}_labels": torch.from_numpy(np.concatenate(numbers))}
    return tensors


def _read_table(path: Path, labels: str) -> pa.Table:
    fix = "The file is half downloaded or damaged: fetch it again."
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
                if not fits(schema.field(index).type):
                    got = str(schema.field(index).type)
                    raise ValueError(bad(str(path), f"must have {kind} in the column {name!r}", got))
            return file.read(columns=["img", labels], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(bad(str(path), "must be a whole parquet file", str(error), fix)) from error


def _is_image(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    content = kind.field("bytes").type
    return bool(pa.types.is_binary(content) or pa.types.is_large_binary(content))


def _decode(column: pa.ChunkedArray, path: Path) -> npt.NDArray[np.uint8]:
    """Decode a column of PNG files into (rows, height, width, channels)."""
    channels, height, width = PIXELS
    pixels = []
    for row, content in enumerate(entry for chunk in column.chunks for entry in chunk.field("bytes").to_pylist()):
        name = f"row {row} of {path}"
        if content is None:
            raise ValueError(bad(name, "must hold an image", "nothing"))
        try:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                if image.mode != "RGB" or image.size != (width, height):
                    got = f"{image.mode} of {image.size[0]} x {image.size[1]}"
                    raise ValueError(bad(name, f"must be an RGB image of {width} x {height} pixels", got))
                pixels.append(image.tobytes())
        except (OSError, SyntaxError) as error:  # Pillow says SyntaxError for a broken PNG
            raise ValueError(bad(name, "must be a PNG image", str(error), "Fetch the file again.")) from error
    return np.frombuffer(b"".join(pixels), np.uint8).reshape(-1, height, width, channels)


def _labels(column: pa.ChunkedArray, path: Path, name: str) -> npt.NDArray[np.int64]:
    if column.null_count:
        raise ValueError(bad(str(path), f"must have a label in every row of {name!r}", f"{column.null_count} without"))
    return np.asarray(column.to_numpy(), np.int64)
