"""Which tests reach a line of the package, as a recorded run of them has shown, and which of those lie nearest.

How far a file of tests lies from one of the package is read from the names that files use.
"""

import ast
import hashlib
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "src" / "penstock", ROOT / "tests"
RECORDS = ROOT / "build" / "reached"
ROOMS = ("unit", "schedule", "dist", "e2e")  # of tests; the others look at the source, or at the tools
CASES = 3  # of a test with many, as many are kept for a line


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
    """
    every = {}
    for test in sorted(test for room in ROOMS for test in (TESTS / room).rglob("test_*.py")):
        found, front = {test: 0}, {test}
        while front:
            front = {other for path in front for other in _named(path) | _registered()[path]} - found.keys()
            found |= dict.fromkeys(front, max(found.values()) + 1)
        every[str(test.relative_to(ROOT))] = found
    return every


Line = tuple[str, str, int]  # a file, a line's text, and which of the file's lines with this text: numbers would shift


@cache
def lines_of(path: Path) -> list[Line]:
    """The names under which a file's lines are recorded."""
    seen, name = Counter[str](), str(path.relative_to(PACKAGE))
    lines = []
    for text in path.read_text().split("\n"):
        lines.append((name, text.strip(), seen[text.strip()]))
        seen[text.strip()] += 1
    return lines


class Record(NamedTuple):
    """What a run of one file of tests has shown."""

    digest: str  # of the file
    seconds: dict[str, float]  # that each test took which passed
    reached: dict[Line, tuple[str, ...]]

    @classmethod
    def of(cls, digest: str, seconds: dict[str, float], reached: dict[Line, set[str]]) -> "Record":
        """Of the tests that passed, and of one with many cases the quickest few that reach a line."""
        kept = {}
        for line, tests in reached.items():
            functions = Counter[str]()
            quick = []
            for test in sorted(tests & seconds.keys(), key=lambda test: (seconds[test], test)):
                functions[test.partition("[")[0]] += 1
                if functions[test.partition("[")[0]] <= CASES:
                    quick.append(test)
            kept[line] = tuple(quick)
        return cls(digest, seconds, kept)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def place_of(file: str) -> Path:
    return RECORDS / f"{file.replace('/', '.')}.pickle"


def keep(file: str, record: Record) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    place_of(file).write_bytes(pickle.dumps(tuple(record)))


def unrecorded() -> list[str]:
    """The files of tests that have changed since they were recorded, or never were; the quick rooms first."""
    found = []
    for file in sorted(distances(), key=lambda file: (ROOMS.index(file.split("/")[1]), file)):
        if not place_of(file).is_file() or pickle.loads(place_of(file).read_bytes())[0] != digest_of(ROOT / file):
            found.append(file)
    return found


@cache
def _reaching() -> dict[Line, list[str]]:
    found: dict[Line, list[str]] = defaultdict(list)
    for file in filter(lambda file: place_of(file).is_file(), distances()):
        for line, tests in _record(file).reached.items():
            found[line].extend(tests)
    return found


@cache
def _record(file: str) -> Record:
    return Record(*pickle.loads(place_of(file).read_bytes()))


@cache
def _statements(path: Path) -> list[ast.stmt]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]


def _lines_about(path: Path, number: int) -> Iterator[list[Line]]:
    """Lines of which a test should reach one that is to notice a fault in this line, the best ones first."""
    lines = lines_of(path)
    around = [node for node in _statements(path) if node.lineno <= number <= (node.end_lineno or 0)]
    around.sort(key=lambda node: node.lineno)
    statement, functions = around[-1], [node for node in around if isinstance(node, ast.FunctionDef)]
    if functions:
        body = getattr(statement, "body", [])
        if statement is not functions[-1]:
            yield [lines[number - 1]]
            yield lines[statement.lineno - 1 : body[0].lineno - 1 if body else statement.end_lineno]
        yield lines[functions[-1].body[0].lineno - 1 : functions[-1].end_lineno]
    # Run at the import: whoever reaches what is named there.
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    for name in [node.id for node in names if isinstance(node.ctx, ast.Store) and not functions]:
        word = re.compile(rf"\b{name}\b")
        for files in ([path], sorted(PACKAGE.rglob("*.py"))):
            yield [line for file in files for line in lines_of(file) if word.search(line[1])]
    yield lines


def nearest_tests(path: Path, number: int, limit_s: float) -> list[str]:
    """Tests that reach a line of a file and that took no longer than this together, from the nearest files first.

    Of each test the quickest case comes first, and the others after all tests. Those of a file follow each other.
    """
    tests = next((found for about in _lines_about(path, number) if (found := _that_reach(about))), [])
    seconds = {test: _record(test.partition("::")[0]).seconds[test] for test in tests}
    cases = Counter[str]()
    ranks = {}
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        file, function = test.partition("::")[0], test.partition("[")[0]
        distance = 0 if Path(file).stem == f"test_{path.stem}" else min(distances()[file].get(path, 9), 2)
        ranks[test] = (cases[function], distance, seconds[test], test)
        cases[function] += 1
    chosen = []
    for test in sorted(tests, key=ranks.__getitem__):
        if seconds[test] <= limit_s:
            chosen.append(test)
            limit_s -= seconds[test]
    of_files = defaultdict[str, float](float)
    for test in chosen:
        of_files[test.partition("::")[0]] += seconds[test]
    return sorted(chosen, key=lambda test: (of_files[test.partition("::")[0]], test.partition("::")[0], ranks[test]))


def _that_reach(lines: list[Line]) -> list[str]:
    return sorted({test for line in lines for test in _reaching().get(line, [])})
