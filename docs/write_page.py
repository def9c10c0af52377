"""Write the explorer's page with the trained models of the documentation: python docs/write_page.py FOLDER.

The models come from `docs/write_models.py`. The page must have been built (`make page`). It opens on its article, and
loads a model when it is selected, also from disk.
"""

import sys
from pathlib import Path

from attnconv.explorer import example, export

MODELS = Path(__file__).resolve().parent / "models"


def main(folder: str) -> Path:
    """Write the page, and return its path."""
    stored = {name: (MODELS / f"{name}.safetensors").read_bytes() for name in ("learned", "learned-content")}
    return export(None, folder, models={"quadratic": example(), **stored})


if __name__ == "__main__":
    print(main(sys.argv[1]))
