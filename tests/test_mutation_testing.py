"""Mutation testing plants what it says: one small fault at a time, and nothing else changes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import nearest_tests  # pyright: ignore[reportMissingImports]
from harmless_faults import HARMLESS  # pyright: ignore[reportMissingImports]
from nearest_tests import PACKAGE, Record, distances, lines_of  # pyright: ignore[reportMissingImports]
from small_faults import faults_in  # pyright: ignore[reportMissingImports]

FAULTS = {
    "a = b < c": {"(b <= c)"},
    "a = b in c": {"(b not in c)"},
    "a = b + c": {"(b - c)", "(b)", "(c)"},
    "a = b and c": {"(b or c)", "(b)", "(c)"},
    "a = not b": {"(b)"},
    "a = 3": {"(4)", "(2)"},
    "a = True": {"(False)"},
    "a = f(b, c=d)": {"(f(c=d))", "(f(b))"},
    "f(b)": {"pass", "(f())"},
    "a.b = c": {"pass"},
    "a += b": {"pass"},
    "assert b < 3": set(),
    "raise ValueError(f'{b + 1}')": set(),
    "def f(a: 'b < 3') -> 3: ...": set(),
    "'b < 3'": set(),
    "WAIT_S = 3.0": set(),
    "for x in zip(b, strict=True): ...": {"(zip(strict=True))"},
    "def __repr__(self): return b < 3": set(),
}


@pytest.mark.shows(153)
@pytest.mark.parametrize(("line", "texts"), FAULTS.items(), ids=FAULTS.keys())
def test_every_kind_of_fault_is_planted_alone(line: str, texts: set[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"# a sign of two bytes before it: ü\n{line}\nend = b\n")
    faults = list(faults_in(path))
    assert {fault.text for fault in faults} == texts and len(faults) == len(texts)
    for fault in faults:
        assert fault.compiles() and fault.line == 2
        first, changed, last, _ = fault.planted(path.read_bytes()).decode().split("\n")
        assert first.endswith("ü") and changed != line and last == "end = b"
        assert fault.reads == (f"pass # {line}" if fault.text == "pass" else changed.strip())


@pytest.mark.shows(153)
def test_tests_lie_near_to_the_files_whose_names_they_use() -> None:
    of_executor = {test: files.get(PACKAGE / "runtime" / "executor.py", 99) for test, files in distances().items()}
    assert of_executor["tests/unit/runtime/test_executor.py"] == 1, "uses its names"
    assert of_executor["tests/dist/test_two_engines.py"] in (2, 3), "uses an engine, which uses them"
    assert of_executor["tests/schedule/test_partition.py"] > 3, "is about something else"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file of the package, of which three tests have been recorded."""
    path = tmp_path / "src" / "counted.py"
    path.parent.mkdir()
    path.write_text("LIMIT = 3\n\ndef count(n=1):\n    if n > LIMIT:\n        return LIMIT\n    return n\n")
    names = ["tests/unit/test_counted.py", "tests/dist/test_other.py"]
    for file in names:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    for name, value in {"ROOT": tmp_path, "PACKAGE": path.parent, "RECORDS": tmp_path}.items():
        monkeypatch.setattr(nearest_tests, name, value)
    monkeypatch.setattr(nearest_tests, "distances", lambda: {names[0]: {path: 1}, names[1]: {path: 3}})
    nearest_tests._reaching.cache_clear()
    nearest_tests._record.cache_clear()
    lines = lines_of(path)
    few, many, far = (
        f"{names[0]}::test_few",
        f"{names[0]}::test_many",
        f"{names[1]}::test_far",
    )
    reached = {
        names[0]: {lines[3]: {few, many}, lines[4]: {many}, lines[5]: {few}},
        names[1]: {lines[3]: {far}, lines[5]: {far}},
    }
    for file, seconds in ((names[0], {few: 2.0, many: 3.0}), (names[1], {far: 1.0})):
        nearest_tests.keep(file, Record.of(nearest_tests.digest_of(tmp_path / file), seconds, reached[file]))
    return path


def test_a_fault_is_put_to_the_tests_that_reach_its_line_the_nearest_files_first(recorded: Path) -> None:
    def tests(line: int, limit_s: float = 30.0) -> list[str]:
        return [test.partition("::test_")[2] for test in nearest_tests.nearest_tests(recorded, line, limit_s)]

    assert tests(4) == ["far", "few", "many"], "all that reach it, the quickest file's first"
    assert tests(5) == ["many"], "one alone reaches it"
    assert tests(4, limit_s=5.5) == ["few", "many"], "of a file that bears its name rather than of another"
    assert tests(3) == ["far", "few", "many"], "a default: whoever calls the function"
    assert tests(1) == ["far", "few", "many"], "a constant: whoever reaches a line that names it"
    recorded.write_text("# another line\n" + recorded.read_text())
    lines_of.cache_clear()
    assert tests(6) == ["many"], "where the line stands now"


def test_files_of_tests_are_recorded_again_when_they_have_changed(recorded: Path) -> None:
    assert nearest_tests.unrecorded() == []
    (recorded.parents[1] / "tests" / "dist" / "test_other.py").write_text("# changed")
    assert nearest_tests.unrecorded() == ["tests/dist/test_other.py"]


@pytest.mark.parametrize("file", HARMLESS)
def test_what_is_named_as_harmless_can_be_planted(file: str) -> None:
    possible = {fault.reads for fault in faults_in(PACKAGE / file)}
    assert HARMLESS[file].keys() - possible == set()
