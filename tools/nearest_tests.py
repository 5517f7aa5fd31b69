"""How far tests lie from the files of the package, read from the names that files use; nothing is run."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "src" / "penstock", ROOT / "tests"


@cache
def _definitions() -> dict[str, set[Path]]:
    """The files of the package, and of what tests share, that define a class or function of a name."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in [*PACKAGE.rglob("*.py"), *(p for p in TESTS.rglob("*.py") if not p.name.startswith("test_"))]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name].add(path)
    return found


@cache
def _named(path: Path) -> set[Path]:
    """The files that define what this one imports, by its own name or as `module.name`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    known = {alias.asname or alias.name for alias in aliases}
    of_modules = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known
    }
    names = ({alias.name for alias in aliases} | of_modules) & _definitions().keys()
    return {other for name in names for other in _definitions()[name]}


@cache
def _registered() -> dict[Path, set[Path]]:
    """By file, those beside it that name it and that no file names: they register themselves there, as builders do."""
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    known = {other for path in files for other in _named(path) - {path}}
    found: dict[Path, set[Path]] = defaultdict(set)
    for path in set(PACKAGE.rglob("*.py")) - known:
        for other in _named(path):
            if other.parent == path.parent:
                found[other].add(path)
    return found


@cache
def distances() -> dict[str, dict[Path, int]]:
    """For each file of tests: 1 to a file whose names it uses, 2 where one of those does, and so on.

    A file that registers itself in another counts as used by that one.
    Those of commands are left out: they take long, and see little that the others do not.
    """
    every = {}
    for test in sorted(test for room in ("schedule", "unit", "dist") for test in (TESTS / room).rglob("test_*.py")):
        found, front = {test: 0}, {test}
        while front:
            front = {other for path in front for other in _named(path) | _registered()[path]} - found.keys()
            found |= dict.fromkeys(front, max(found.values()) + 1)
        every[str(test.relative_to(ROOT))] = found
    return every
