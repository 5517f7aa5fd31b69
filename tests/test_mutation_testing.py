"""Mutation testing plants what it says: one small fault at a time, and nothing else changes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from nearest_tests import PACKAGE, distances  # pyright: ignore[reportMissingImports]
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
        first, changed, last, _ = fault.source.split("\n")
        assert first.endswith("ü") and changed != line and last == "end = b"


@pytest.mark.shows(153)
def test_tests_lie_near_to_the_files_whose_names_they_use() -> None:
    of_executor = {test: files.get(PACKAGE / "runtime" / "executor.py", 99) for test, files in distances().items()}
    assert of_executor["tests/unit/runtime/test_executor.py"] == 1, "uses its names"
    assert of_executor["tests/dist/test_two_engines.py"] in (2, 3), "uses an engine, which uses them"
    assert of_executor["tests/schedule/test_partition.py"] > 3, "is about something else"


def test_tests_lie_near_to_what_registers_itself_where_no_file_names_it() -> None:
    of_builder = {
        test: files.get(PACKAGE / "schedule" / "builders" / "zero_bubble.py", 99) for test, files in distances().items()
    }
    assert of_builder["tests/schedule/test_builders.py"] == 2, "uses the registry"
    assert of_builder["tests/schedule/test_zero_bubble.py"] == 3, "uses a helper that does"
    assert of_builder["tests/schedule/test_partition.py"] > 3, "is about something else"
