"""The package's source as the tests of its structure read it: each file parsed once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"
FILES = sorted(PACKAGE.glob("*/**/*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Every module that a file imports, anywhere in it, as (line, absolute dotted name)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = ["penstock", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            # "from penstock import schedule" names the room in the alias, not in the module.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name_of(node.func) in ("import_module", "__import__"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            names = [own.value for own in given if isinstance(own, ast.Constant) and isinstance(own.value, str)]
            yield from ((node.lineno, name) for name in names)


@cache
def names_of(path: Path, library: str) -> frozenset[str]:
    """Every name of a library that a file uses or imports, dotted from the library on: `torch.cuda.graph`."""
    places, found = {}, set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            own = {alias.asname or library: alias.name if alias.asname else library for alias in node.names}
            whole = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            own = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            whole = list(own.values())
        else:
            continue
        places |= {name: place for name, place in own.items() if place.partition(".")[0] == library}
        found |= {name for name in whole if name.partition(".")[0] == library}
    for node in ast.walk(tree_of(path)):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in places:
            found.add(".".join([places[node.id], *parts]))
    return frozenset(found)


def _name_of(function: ast.expr) -> str | None:
    """The last part of a called function's name."""
    return getattr(function, "attr", None) or getattr(function, "id", None)
