"""Lazy re-exports: a package's public names without the price of importing them (PEP 562).

``import torch`` takes seconds and ``attnconv --help`` must not pay for it. A package therefore lists its public names
with the submodule that defines each, and the first access to a name imports that submodule. Explicit in both
directions: the mapping is written out for the interpreter, the ``TYPE_CHECKING`` imports beside it for type checkers
and editors, and a test holds the two equal.

    from typing import TYPE_CHECKING

    from attnconv._lazy import attach

    if TYPE_CHECKING:
        from attnconv.encodings.quadratic import Quadratic as Quadratic
    else:
        __getattr__, __dir__, __all__ = attach(__name__, {"Quadratic": "quadratic"})

The ``else`` matters: a module-level ``__getattr__`` seen by a type checker would make every misspelt name legal.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnconv._errors import bad


def attach(
    package: str, names: Mapping[str, str], *, submodules: Sequence[str] = (), extra: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package from a mapping of names to submodules.

    Args:
        package: the package's ``__name__``.
        names: public name -> module that defines it, relative to the package (``"quadratic"``, ``"encodings.base"``)
            or absolute (``"attnconv.encodings.base"``).
        submodules: submodules that are public themselves and are imported when first looked at.
        extra: names that the package defines eagerly and that belong to ``__all__`` as well.

    Returns:
        The three objects, in that order; assign them at the package's top level.

    Raises:
        ValueError: if a name is also the name of the submodule that defines it. Importing that submodule would bind the
            module over the name, so that its meaning depended on what was imported before.

    Example:
        >>> getattribute, directory, public = attach("attnconv", {"bad": "_errors"})
        >>> public, getattribute("bad").__module__
        (['bad'], 'attnconv._errors')
    """
    targets = {name: _absolute(package, module) for name, module in names.items()}
    for name, module in targets.items():
        if module == f"{package}.{name}":
            raise ValueError(
                bad("names", "a public name must differ from its submodule", f"{name!r} for {module}", "Rename one.")
            )
    public = sorted({*targets, *submodules, *extra})

    def getattribute(name: str) -> Any:
        if name in targets:
            value = getattr(importlib.import_module(targets[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # next time Python finds the name itself
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public} - {"TYPE_CHECKING", "attach"})

    return getattribute, directory, public


def _absolute(package: str, module: str) -> str:
    root = package.partition(".")[0]
    if module.partition(".")[0] == root:
        return module
    return f"{package}.{module.lstrip('.')}"
