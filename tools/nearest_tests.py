"""How far tests lie from the files of the package, read from the names that files use; nothing is run."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "src" / "penstock", ROOT / "tests"


@cache
def _definitions() -> dict[str, set[Path]]:
    """The files of the package, and of what tests share, that define a name."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in [*PACKAGE.rglob("*.py"), *(p for p in TESTS.rglob("*.py") if not p.name.startswith("test_"))]:
        for node in ast.parse(path.read_text()).body:
            found[getattr(node, "name", "")].add(path)
    return found


@cache
def _used(path: Path) -> set[Path]:
    names = {str(getattr(n, "id", getattr(n, "attr", ""))) for n in ast.walk(ast.parse(path.read_text()))}
    return {other for name in names & _definitions().keys() for other in _definitions()[name]}


@cache
def distances() -> dict[str, dict[Path, int]]:
    """For each file of tests: 1 to a file whose names it uses, 2 where one of those does, and so on.

    Those of commands are left out: they take long, and see little that the others do not.
    """
    every = {}
    for test in sorted(test for room in ("schedule", "unit", "dist") for test in (TESTS / room).rglob("test_*.py")):
        found, front = {test: 0}, {test}
        while front:
            front = {other for path in front for other in _used(path)} - found.keys()
            found |= dict.fromkeys(front, max(found.values()) + 1)
        every[str(test.relative_to(ROOT))] = found
    return every
