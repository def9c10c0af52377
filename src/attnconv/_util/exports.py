"""Lazy imports of public names, and error messages that name the extra of a missing package."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import lazy_loader

from attnconv._util.errors import bad

# Optional packages, each with the extra (group of optional dependencies) that installs it.
EXTRA_OF = {
    **dict.fromkeys(("PIL", "pyarrow", "rich", "sklearn"), "train"),
    **dict.fromkeys(("anyio", "starlette", "uvicorn"), "explore"),
    **dict.fromkeys(("jinja2", "matplotlib"), "report"),
    **dict.fromkeys(("onnx", "onnxscript"), "onnx"),
    **dict.fromkeys(("timm", "torchvision", "transformers"), "models"),
    "anywidget": "notebook",
    "huggingface_hub": "hub",
    "shtab": "app",
}


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from the public names in its stub `__init__.pyi`."""
    getter, names, public = lazy_loader.attach_stub(package, file)

    def getattribute(name: str) -> Any:
        try:
            return getter(name)
        except ModuleNotFoundError as error:
            if (wanted := missing(error)) is None:
                raise
            raise wanted from error

    return getattribute, names, public


def missing(error: ModuleNotFoundError, *, on_command_line: bool = False) -> ModuleNotFoundError | None:
    """Return an error that names the pip extra to install, or None if no extra contains the missing package.

    On the command line, the extra is usually `app`, which contains the requirements of all commands. timm requires
    torchvision, for which pip may replace the installed build of torch, so the suggested command pins torch.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    if on_command_line and extra in ("train", "report", "explore"):
        extra = "app"
    torch = f" torch=={version('torch')}" if extra == "models" else ""
    fix = f"Run: pip install 'attnconv[{extra}]'{torch}"
    return ModuleNotFoundError(bad(package, "must be installed", "no such package", fix), name=error.name)
