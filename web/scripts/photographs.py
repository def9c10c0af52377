"""Crop the page's photographs and write `src/core/photographData.ts`.

pip download scikit-image==0.25.2 --no-deps    # a wheel is a zip archive
python web/scripts/photographs.py PATH/TO/skimage/data
"""

import base64
import io
import sys
from pathlib import Path

from PIL import Image

SIZE = 64
QUALITY = 92
# name: file, and the crop (left, top, right, bottom) in its pixels
CROPS = {
    "cat": ("chelsea.png", (60, 0, 360, 300)),
    "astronaut": ("astronaut.png", (100, 0, 340, 240)),
    "coffee": ("coffee.png", (80, 20, 460, 400)),
}
TARGET = Path(__file__).parents[1] / "src/core/photographData.ts"


def webp(path: Path, crop: tuple[int, int, int, int]) -> str:
    """Return a crop as a WebP file in base64."""
    image = Image.open(path).convert("RGB").crop(crop).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=QUALITY, method=6)
    return base64.b64encode(file.getvalue()).decode()


def main(folder: Path) -> None:
    """Write one line per photograph."""
    lines = [f'  {name}:\n    "{webp(folder / file, crop)}",' for name, (file, crop) in CROPS.items()]
    head = "/** WebP files in base64, written by scripts/photographs.py; photographs.ts names the photographers. */\n"
    TARGET.write_text(head + "export const FILES = {\n" + "\n".join(lines) + "\n} as const;\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
