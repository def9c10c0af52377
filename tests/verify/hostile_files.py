"""Random invalid files, by number: those that broke the first version of the library, and more.

A case writes a file or a folder, and defines how to read it and whether the result is correct.
"""

import contextlib
import io
import json
import os
import pickle
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from PIL import Image

from attnconv._util.settings import plain
from attnconv.cli import main as command
from attnconv.convert import recast
from attnconv.data.cifar import read_cifar
from attnconv.data.hub_parquet import read_parquet
from attnconv.data.image_files import read_folders, read_image
from attnconv.data.settings import DataSettings
from attnconv.models.checkpoint import About, read_checkpoint, save_recast, save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.settings import AttentionSettings, ResNetSettings
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings
from tests.data.making import pixels, png_chunk, png_of, small_cifar, write_hub_folder, write_parquet

_MODES = {
    "PNG": ("RGB", "L", "P", "RGBA"),
    "GIF": ("P", "L"),
    "WEBP": ("RGB", "RGBA"),
    **dict.fromkeys(("JPEG", "BMP", "TIFF", "PPM"), ("RGB", "L")),
}
_MODEL = AttentionSettings(layers=1, heads=2, width=4, mlp_width=4, image_size=4, classes=3)
_ABOUT: dict[str, Any] = {"classes": ("cat", "dog", "eel"), "mean": (0.5,) * 3, "std": (0.25,) * 3}
_SETTINGS = plain(RunSettings(preset="quadratic-digits", model=_MODEL))
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 10**12, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "9", [], {}, [[]]),
    *("\x1b[2J", "\udcff", "x" * 100_000, [3] * 1000, {"kind": "attention"}, {"a": {"b": {}}}),
)
_NAMES = (
    b"\xff\xfe",
    b"\x1b]0;x\x07",
    b"a\nb",
    b"-rf",
    b"..x",
    b"%s%n",
    b"$(touch executed)",
    b"`id`",
    "é\u202e".encode(),
)


@dataclass(frozen=True)
class Case:
    """Hostile file.

    Attributes:
        path: Path that an error must name.
        read: Function that reads the file.
        right: Function that checks whether the value read agrees with the file.
    """

    path: Path
    read: Callable[[], Any]
    right: Callable[[Any], bool]


def harmed(content: bytes, draw: random.Random) -> bytes:
    """Truncate the content, flip bits, remove, repeat, zero or replace parts, or insert an extreme number."""
    place, other = sorted((draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
    match draw.randrange(8):
        case 0:
            return content[:place]
        case 1 | 2:
            changed = bytearray(content)
            for _ in range(draw.choice((1, 1, 1, 2, 8))):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)
        case 3:
            return content[:place] + content[other:]
        case 4:
            return content[:other] + content[place:]
        case 5:
            return content[:place] + bytes(other - place) + content[other:]
        case 6:
            number = draw.choice((0, 1, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1))
            return content[:place] + struct.pack(draw.choice("<>") + "I", number) + content[place + 4 :]
        case _:
            return content[:place] + draw.randbytes(draw.choice((1, 4, 100))) + content[place:]


def mistyped(value: Any, draw: random.Random) -> Any:
    """Replace, remove or rename one value of a JSON value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        match draw.randrange(6):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {f"{name}x" if name == key else name: part for name, part in value.items()}
            case _:
                return {**value, key: mistyped(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], mistyped(value[place], draw), *value[place + 1 :]][: draw.choice((None, None, -1))]
    return draw.choice(_VALUES)


def as_text(value: Any, draw: random.Random) -> str:
    """Return JSON as text, possibly truncated or nested too deeply."""
    text = json.dumps(value)
    match draw.randrange(12):
        case 0:
            return draw.choice(("[", '{"":')) * 100_000
        case 1:
            return text[: draw.randrange(len(text))]
        case 2:
            return text.replace("1", "1" * 5000)
        case _:
            return text


def picture(folder: Path, draw: random.Random) -> Case:
    """Damage an image of any format. PNGs have checksums, so a PNG that is read must be unchanged."""
    image = Image.fromarray(pixels(1, draw.randrange(100))[0].transpose(1, 2, 0)[: draw.choice((1, 7, 32))].copy())
    form, file = draw.choice(list(_MODES)), io.BytesIO()
    image.convert(draw.choice(_MODES[form])).save(file, form)
    path, whole = folder / f"x.{draw.choice(('png', 'jpg', form.lower()))}", file.getvalue()
    path.write_bytes(whole)
    before = read_image(path, (6, 8))
    path.write_bytes(harmed(whole, draw))
    return Case(path, lambda: read_image(path, (6, 8)), lambda found: form != "PNG" or torch.equal(found, before))


def bomb(folder: Path, draw: random.Random) -> Case:
    """Return a small image file of a huge size, with missing rows or 16 bits per channel, or that starts a program."""
    sides = draw.choice(((1, 49_999_999), (49_999_999, 1), (2**31 - 1, 2**31 - 1), (9000, 9000), (65_535, 65_535)))
    path = folder / "x.png"
    match draw.randrange(7):
        case 0:
            content = png_of(*sides, rows=0, colour=draw.choice((0, 2, 3, 6)))
        case 1:
            content = png_of(64, 64, rows=draw.randrange(64), interlaced=draw.random() < 0.3)
        case 2:
            content = png_of(64, 64, depth=16, colour=draw.choice((0, 2, 4, 6)))
        case 3:
            content = (
                b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(executed) (w) file closefile\n%%EOF"
            )
        case 4:  # text that decompresses to gigabytes
            text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000), 1))
            content = png_of(8, 8)[:33] + text + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")
        case 5:
            gif = struct.pack("<6sHHBBB", b"GIF89a", 65_535, 65_535, 0x80, 0, 0) + bytes(6)
            content = (
                gif + b"," + struct.pack("<HHHHB", 0, 0, *draw.choice(((65_535, 65_535), (1, 1))), 0) + b"\2\2\x4c\1\0;"
            )
        case _:
            head = struct.pack(
                "<2sIIIIiiHH", b"BM", 100, 0, 54, 40, *draw.choice(((40_000, 40_000), (1, 2**31 - 1))), 1, 24
            )
            content = head + bytes(40)
    path.write_bytes(content)
    return Case(path, lambda: read_image(path, 8), lambda _: False)


def independent(path: Path) -> dict[str, bytes]:
    """Read the bytes of each tensor of a safetensors file, following the specification of the format."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: content[start + first : start + last] for name, (first, last) in places.items()}


def same(path: Path, found: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors are those of the file, bit for bit, and finite."""
    wanted = independent(path)
    return wanted.keys() == found.keys() and all(
        bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) == wanted[name] and bool(tensor.isfinite().all())
        for name, tensor in found.items()
    )


def with_metadata(path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    with safetensors.safe_open(path, "pt") as file:
        metadata = change(dict(file.metadata()))
    path.write_bytes(safetensors.torch.save(safetensors.torch.load_file(path), metadata))


def hostile_weights(path: Path, draw: random.Random) -> None:
    """Damage a weights file: its bytes, entries of its header, or its metadata."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    match draw.randrange(4):
        case 0:
            path.write_bytes(harmed(content, draw))
        case 1:  # within the header, whose length stays correct
            head = harmed(content[8:end], draw)
            path.write_bytes(len(head).to_bytes(8, "little") + head + content[end:])
        case 2:
            head = as_text(mistyped(json.loads(content[8:end]), draw), draw).encode("utf-8", "surrogatepass")
            path.write_bytes(len(head).to_bytes(8, "little") + head + content[end:])
        case _:

            def change(metadata: dict[str, str]) -> dict[str, str]:
                name = draw.choice([name for name, text in metadata.items() if text[:1] in "[{"])
                return {**metadata, name: as_text(mistyped(json.loads(metadata[name]), draw), draw)}

            with_metadata(path, change)


def checkpoint(folder: Path, draw: random.Random) -> Case:
    path = folder / "weights.safetensors"
    save_weights(path, build(_MODEL), _MODEL, extra={"epoch": 3}, **_ABOUT)
    hostile_weights(path, draw)
    return Case(path, lambda: read_checkpoint(path), lambda found: same(path, dict(found.tensors)))


def recast_weights(folder: Path, draw: random.Random) -> Case:
    settings = ResNetSettings(widths=(4,), blocks=(1,), image_size=4, classes=3)
    path = folder / "recast.safetensors"
    save_recast(path, recast(build(settings).eval()), settings, about=About(**_ABOUT))
    hostile_weights(path, draw)
    if draw.random() < 0.2:
        with contextlib.suppress(safetensors.SafetensorError, OSError, TypeError):  # damaged too much to be read
            spec = json.dumps({"spec": draw.choice(("os:abort", "builtins:breakpoint", "../x:y", ""))})
            with_metadata(path, lambda metadata: {**metadata, "model": spec})
    return Case(path, lambda: load(path), lambda found: same(path, found.model.state_dict()))


def prediction(folder: Path, draw: random.Random) -> Case:
    """Run `attnconv predict` with a hostile model: percentages that sum to 100 or an error, no control characters."""
    path, image = folder / "weights.safetensors", folder / "x.png"
    save_weights(path, build(_MODEL), _MODEL, **_ABOUT)
    hostile_weights(path, draw)
    image.write_bytes(png_of(4, 4))

    def read() -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command(["predict", str(image), str(path)])
            except SystemExit as end:
                status = end.code
        assert all(line.isprintable() for line in (out.getvalue() + err.getvalue()).split("\n"))
        if status:
            raise ValueError(err.getvalue())
        return out.getvalue()

    def right(text: str) -> bool:
        return abs(sum(float(line.split("%")[0]) for line in text.splitlines()[1:]) - 100) < 0.1

    return Case(path, read, right)


def run_folder(folder: Path, draw: random.Random) -> Case:
    """Damage a file of a run, or change its values."""
    line = {"step": 3, "epoch": 1, "split": "train", "loss": 0.5, "accuracy": 0.2, "lr": 0.1, "seconds": 1.0}
    heads = {"name": "a", "centres": [[0.0, 1.0]], "covariance": [[[1.0, 0.0], [0.0, 1.0]]]}
    run = RunFolder(folder)
    name, value, read = draw.choice(
        (
            ("metrics.jsonl", line, run.metrics),
            ("heads.jsonl", {"epoch": 0, "layers": [heads]}, run.heads),
            ("result.json", {"last": {"test": {"accuracy": 0.5}}}, run.result),
            ("settings.json", {"format": 1, "settings": _SETTINGS}, run.settings),
        )
    )
    path, end = folder / name, "\n" if name.endswith("l") else ""
    content = (as_text(mistyped(value, draw), draw) + end).encode("utf-8", "surrogatepass")
    path.write_bytes(content if draw.random() < 0.6 else harmed((json.dumps(value) + end).encode(), draw))

    def right(found: Any) -> bool:
        text = path.read_bytes()
        if name.endswith("l"):
            return bool(found == [json.loads(row) for row in text[: text.rfind(b"\n") + 1].splitlines()])
        return name == "settings.json" or repr(found) == repr(json.loads(text))

    return Case(path, read, right)


def parquet(folder: Path, draw: random.Random) -> Case:
    """Damage a Parquet file, or change its number of rows or its decoded size. PNGs have checksums."""
    write_hub_folder(folder)
    path, rows = folder / "test-00000-of-00001.parquet", {"train": 20, "test": 10}
    match draw.randrange(6):
        case 0:
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            count = draw.choice((0, 9, 11, 3_000_000))
            pq.write_table(pa.table({"img": pa.nulls(count, kind), "label": pa.nulls(count, pa.int64())}), path)
        case 1:
            value = draw.choice(
                (b"", bytes(70_000), bytes(300_000), png_of(1, 49_999_999, rows=0), png_of(4000, 4000, rows=9))
            )
            write_parquet(path, [value] * 10, [0] * 10)
        case _:
            path.write_bytes(harmed(path.read_bytes(), draw))
    wanted = torch.from_numpy(pixels(10, 2))
    return Case(
        path, lambda: read_parquet(folder, "label", rows), lambda found: torch.equal(found["test"].images, wanted)
    )


class _Bomb:
    """Function that a malicious pickle calls when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


def cifar(folder: Path, draw: random.Random) -> Case:
    """Damage one of the archive's pickles, or replace it by a program; its checksum then differs."""
    facts, files = small_cifar()
    member = draw.choice(list(files))
    (folder / facts.folder).mkdir()
    for name, content in files.items():
        (folder / facts.folder / name).write_bytes(content)
    path = folder / facts.folder / member
    path.write_bytes(harmed(files[member], draw) if draw.random() < 0.5 else _program(draw))
    settings = DataSettings(name="cifar10", root=str(folder), download=False)
    unharmed = path.read_bytes() == files[member]
    return Case(path, lambda: read_cifar(facts, settings), lambda _: unharmed)


def _program(draw: random.Random) -> bytes:
    calls: tuple[tuple[Any, ...], ...] = (
        (os.system, "touch executed"),
        (exec, "open('executed', 'w')"),
        (eval, "open('executed', 'w')"),
        (open, "executed", "w"),
        (os.mkdir, "executed"),
        (__import__, "antigravity"),
        (torch.hub.load, "x/y", "z"),
    )
    protocol = draw.randrange(2, 6)
    content = pickle.dumps({"data": _Bomb(*draw.choice(calls[:1] + calls[2:])), "labels": [1]}, protocol)
    return harmed(content, draw) if draw.random() < 0.2 else content


def names(folder: Path, draw: random.Random) -> Case:
    """Name classes and files such that shells, terminals or decoders could misread them; one file may be damaged."""
    for split, count in (("train", 3), ("test", 1)):
        for name in draw.sample(_NAMES, 2) if split == "train" else ():
            for number in range(count):
                path = folder / split / os.fsdecode(name) / os.fsdecode(b"%d" % number + draw.choice(_NAMES) + b".png")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png_of(4, 4))
    broken = draw.random() < 0.5
    if broken:
        path.write_bytes(harmed(png_of(4, 4), draw)[:60])
    settings = DataSettings(name="folder", root=str(folder))

    def right(found: Any) -> bool:
        return not broken and "".join(found[1]).isprintable() and len(found[0]["train"]) == 5

    return Case(Path("data.root"), lambda: read_folders(settings, 4), right)


KINDS: dict[Callable[[Path, random.Random], Case], int] = {
    picture: 30, bomb: 8, checkpoint: 18, recast_weights: 6, prediction: 6, run_folder: 12, parquet: 10, cifar: 7,
    names: 3,
}  # fmt: skip


def drawn(seed: int, number: int, folder: Path) -> Case:
    """Write the case with this number below the folder."""
    draw = random.Random(f"{seed}/{number}")
    (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
    (home := folder / f"{number}-{kind.__name__}").mkdir()
    return kind(home, draw)
