"""A package's public names, imported when first used, and which extra brings a package that is missing."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import lazy_loader

from attnconv._util.errors import bad

# Packages that the core does without -> the extra that brings them.
EXTRA_OF = {
    **dict.fromkeys(("PIL", "pyarrow", "rich", "sklearn"), "train"),
    **dict.fromkeys(("anyio", "starlette", "uvicorn"), "explore"),
    **dict.fromkeys(("jinja2", "matplotlib"), "report"),
    **dict.fromkeys(("onnx", "onnxscript"), "onnx"),
    **dict.fromkeys(("timm", "torchvision", "transformers"), "models"),
    "anywidget": "notebook",
}


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package with its public names in the stub `__init__.pyi`."""
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
    """The error that names the extra to install; None where no extra brings the package.

    On the command line that is `app`, which brings what all commands need. timm needs torchvision, for which pip would
    replace a torch of another build: the torch that is installed is named too.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    if on_command_line and extra in ("train", "report", "explore"):
        extra = "app"
    torch = f" torch=={version('torch')}" if extra == "models" else ""
    fix = f"Run: pip install 'attnconv[{extra}]'{torch}."
    return ModuleNotFoundError(bad(package, "must be installed", "no package of that name", fix), name=error.name)
