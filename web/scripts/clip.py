"""Join the screenshots of `clip.mjs` to `opening.gif`, and save the preview `opening.png`."""

import json
import sys
from pathlib import Path

from PIL import Image

STEP = 100  # milliseconds
REST = 3000
COLOURS = 220  # of the photograph and the outputs; the rest is for the heads


def main(folder: Path, target: Path) -> None:
    """Write both files."""
    frames = [Image.open(path).convert("RGB") for path in sorted(folder.glob("frame-*.png"))]
    heads = json.loads((folder / "colours.json").read_text())
    palette = joined(frames[:: len(frames) // 4]).quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    listed = palette.getpalette()[: 3 * COLOURS]
    for white in (0, 60, 150):  # the heads' colours, and the same on white
        listed += [round((part * (255 - white) + 255 * white) / 255) for head in heads for part in head]
    palette.putpalette([*listed, 255, 255, 255])
    reduced = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [STEP] * (len(frames) - 1) + [REST]
    clip, preview = target / "opening.gif", target / "opening.png"
    reduced[0].save(clip, save_all=True, append_images=reduced[1:], duration=durations, loop=0, optimize=True)
    Image.open(folder / "opening.png").convert("RGB").save(preview, optimize=True)
    for path in (clip, preview):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def joined(frames: list[Image.Image]) -> Image.Image:
    """Return all frames below each other, for a palette that suits all of them."""
    width, height = frames[0].size
    whole = Image.new("RGB", (width, height * len(frames)))
    for index, frame in enumerate(frames):
        whole.paste(frame, (0, index * height))
    return whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
