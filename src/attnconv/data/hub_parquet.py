"""Read parquet files in the layout of the Hugging Face hub, such as `train-00000-of-00004.parquet`.

The columns are `img`, a struct of `bytes` (a PNG file) and `path`, and integer columns of labels. Since a small file
can decompress to many gigabytes, the numbers of rows and bytes are validated first, and a few rows are read at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from attnconv._util.errors import bad
from attnconv.data.image_files import PictureError, open_picture
from attnconv.data.image_set import ImageSet

LARGEST_ROW = 8192  # maximum mean size of a decompressed row in bytes; an image has 3,072 bytes of pixels
_AT_ONCE = 1 << 28  # maximum size in bytes of the rows in memory, even if one row had all bytes of its group


def read_parquet(folder: Path, labels: str, rows: dict[str, int]) -> dict[str, ImageSet] | None:
    """Read the splits, which must have the given numbers of `rows`; return None if there are no parquet files."""
    files = {split: sorted(folder.glob(f"{split}*.parquet")) for split in rows}
    if not any(files.values()):
        return None
    sets = {}
    for split, paths in files.items():
        _check_counts(folder, split, paths, labels, rows[split])
        images, numbers = zip(*(part for path in paths for part in _read(path, labels)), strict=True)
        pixels = torch.from_numpy(np.concatenate(images)).permute(0, 3, 1, 2).contiguous()
        sets[split] = ImageSet(pixels, torch.from_numpy(np.concatenate(numbers)))
    return sets


def _check_counts(folder: Path, split: str, paths: list[Path], labels: str, rows: int) -> None:
    """Validate the numbers of rows and bytes in the footers of a split's files before they are decompressed."""
    found = size = 0
    for path in paths:
        with _opened(path, labels) as file:
            for group in range(file.num_row_groups):
                found += file.metadata.row_group(group).num_rows
                size += _bytes(file, group)
    requirement, names = f"must contain {rows:,} rows of {split}", ", ".join(path.name for path in paths) or "no file"
    if found != rows:
        fix = "The download may be incomplete." if found < rows else ""
        raise ValueError(bad(str(folder), requirement, f"{found:,} in {names}", fix))
    if size > (most := rows * LARGEST_ROW):
        got = f"{size:,} in {names}"
        raise ValueError(bad(str(folder), f"{requirement} with at most {most:,} decompressed bytes", got))


def _bytes(file: pq.ParquetFile, group: int) -> int:
    """Return the decompressed size of the images in a row group, where each stored value counts once."""
    columns = [file.metadata.row_group(group).column(index) for index in range(file.metadata.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == "img.bytes")


@contextmanager
def _opened(path: Path, labels: str) -> Iterator[pq.ParquetFile]:
    """Open a parquet file, and convert errors from pyarrow in the block to `ValueError` with the file's name."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, KeyError) as error:
        requirement = f"must be a valid parquet file with images in the column 'img' and integers in {labels!r}"
        raise ValueError(
            bad(str(path), requirement, str(error), "If the file is damaged, download it again.")
        ) from error


def _read(path: Path, labels: str) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Yield the images and labels of a file, a few rows at a time."""
    row = 0
    with _opened(path, labels) as file:
        for group in range(file.num_row_groups):
            rows = max(1, min(1024, _AT_ONCE // max(1, _bytes(file, group))))
            columns = ["img.bytes", labels]
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                numbers = batch.column(labels).cast(pa.int64())
                if numbers.null_count:
                    requirement = f"must have a label in every row of {labels!r}"
                    raise ValueError(bad(str(path), requirement, f"{numbers.null_count} rows without a label"))
                contents = batch.column("img").field("bytes").cast(pa.binary()).to_pylist()
                pixels = [_decode(png, f"row {row + place} of {path}") for place, png in enumerate(contents)]
                yield np.stack(pixels), numbers.to_numpy(zero_copy_only=False)
                row += len(batch)


def _decode(content: bytes | None, name: str) -> npt.NDArray[np.uint8]:
    with open_picture(content or b"", name, formats=("PNG",)) as image:
        if image.mode != "RGB" or image.size != (32, 32):
            got = f"{image.mode} of {image.width} x {image.height}"
            raise PictureError(bad(name, "must be an RGB image of 32 x 32 pixels", got))
        return np.asarray(image)
