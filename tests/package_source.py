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


def _name_of(function: ast.expr) -> str | None:
    """The last part of a called function's name."""
    return getattr(function, "attr", None) or getattr(function, "id", None)
