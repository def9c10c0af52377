"""Import rules of the library: its subpackages in order, and a check of all imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

# Lowest first. A subpackage may import from earlier lines and from itself.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_util"}),
    frozenset({"grid"}),
    frozenset({"operators"}),
    frozenset({"encodings"}),
    frozenset({"layers"}),
    frozenset({"theory"}),
    frozenset({"convert"}),
    frozenset({"models"}),
    frozenset({"data"}),
    frozenset({"training", "inspect"}),
    frozenset({"surgery"}),
    frozenset({"report"}),
    frozenset({"explorer", "paper"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
# The packages of the repository, lowest first, and their folders.
PACKAGES = {"attnconv": "src/attnconv", "benchmarks": "benchmarks", "experiments": "experiments", "tests": "tests"}
RANKS = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}


def room_of(path: Path, package: Path) -> str:
    """Return the first component below the package: `models/factory.py` is in `models`, `grid.py` in `grid`."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every module that a file imports, including in function bodies and for types."""
    own = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name != package.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == package.name:
            yield node.lineno, f"{package.name}.{node.attr}"  # `import attnconv`, then `attnconv.__version__`
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(own[: len(own) - node.level]) if node.level else ""
            base = ".".join(part for part in (parent, node.module) if part)
            if base == package.name:  # `from attnconv import grid`
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def violations(package: Path) -> list[str]:
    """Return every import that breaks the order, as `file:line: reason`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if path == package / "__init__.py":
            continue
        room = room_of(path, package)
        if room not in RANKS:
            found.append(f"{path.name}: add the subpackage {room!r} to tests/layering.py")
            continue
        for line, module in imported_modules(path, package):
            head, _, rest = module.partition(".")
            target = rest.partition(".")[0]
            if head != package.name or target == room or target.startswith("__"):  # __version__, __file__
                continue
            where = f"{path.relative_to(package)}:{line}"
            if target not in RANKS:
                found.append(f"{where}: imports {module!r}; import from the subpackage that defines it")
            elif RANKS[target] >= RANKS[room]:
                found.append(f"{where}: {room!r} may not import {target!r}")
    return found


def package_violations(root: Path) -> list[str]:
    """Return every import of a higher package of the repository, as `file:line: reason`."""
    names = list(PACKAGES)
    found = []
    for rank, (name, folder) in enumerate(PACKAGES.items()):
        for path in sorted((root / folder).rglob("*.py")):
            for line, module in imported_modules(path, root / folder):
                if module.partition(".")[0] in names[rank + 1 :]:
                    found.append(f"{path.relative_to(root)}:{line}: {name!r} may not import {module!r}")
    return found
