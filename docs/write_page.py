"""Write the explorer's page with the trained models of the documentation: python docs/write_page.py FOLDER.

The models come from `docs/write_models.py`. The page must have been built (`make page`). It opens on its article, and
loads a model when it is selected, also from disk.
"""

import json
import runpy
import sys
from pathlib import Path

from attnconv.explorer import export, read_payload

SCRIPT = runpy.run_path(str(Path(__file__).with_name("write_models.py")))


def main(folder: str) -> Path:
    """Write the page, and return its path."""
    runs = {Path(shown.run).name: shown for shown in SCRIPT["SHOWN"]}
    models = {name: shown.file.read_bytes() for name, shown in runs.items()}
    about = {name: describe(models[name], SCRIPT["RUNS"] / shown.run) for name, shown in runs.items()}
    return export(None, folder, models=models, about=about)


def describe(content: bytes, run: Path) -> str:
    """Describe a model and its training in one line."""
    layers, result = read_payload(content).layers, json.loads((run / "result.json").read_text(encoding="utf-8"))
    epochs, accuracy = result["last"]["epoch"], result["last"]["test"]["accuracy"]
    size = f"{len(layers)} × {layers[0].heads} heads, {result['parameters'] / 1e6:.2f} M parameters"
    return f"{size}, trained on CIFAR-10 for {epochs} epochs, test accuracy {accuracy:.1%}"


if __name__ == "__main__":
    print(main(sys.argv[1]))
