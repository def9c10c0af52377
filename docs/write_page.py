"""Write the explorer's page with the trained models of the documentation: python docs/write_page.py FOLDER.

The models come from `docs/write_models.py`. The page must have been built (`make page`). It opens on its article, and
loads a model when it is selected, also from disk.
"""

import sys
from pathlib import Path

from attnconv.explorer import example, export, read_payload

MODELS = Path(__file__).resolve().parent / "models"
ACCURACY = {"quadratic": 84.1, "learned": 82.7, "learned-content": 70.4}  # of the runs in `results`, in percent


def main(folder: str) -> Path:
    """Write the page, and return its path."""
    stored = {name: (MODELS / f"{name}.safetensors").read_bytes() for name in ("learned", "learned-content")}
    models = {"quadratic": example(), **stored}
    about = {name: describe(content, ACCURACY[name]) for name, content in models.items()}
    return export(None, folder, models=models, about=about)


def describe(content: bytes, accuracy: float) -> str:
    """Describe a model in one line."""
    layers = read_payload(content).layers
    return f"Trained on CIFAR-10, test accuracy {accuracy}%, {len(layers)} × {layers[0].heads} heads"


if __name__ == "__main__":
    print(main(sys.argv[1]))
