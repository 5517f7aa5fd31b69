"""A statement counts as shown if all its tests ran and passed in one run; what was not shown says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from promises import Record, verdict  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

pytestmark = pytest.mark.shows(1)

@pytest.mark.shows(2)
@pytest.mark.parametrize("case", ["passes", "skips"])
def test_one(case):
    if case == "skips":
        pytest.skip("this machine has no wings")

@pytest.fixture
def missing():
    pytest.importorskip("no_such_module", reason="make setup installs it")

@pytest.mark.shows(3)
def test_two(missing):
    raise AssertionError("not reached")

class TestMore:
    @pytest.mark.shows(4)
    def test_three(self):
        raise AssertionError("it fails")

    @pytest.mark.shows(5)
    def test_four(self):
        assert True
"""


MARKERS = "    shows: statements\n    gpu: needs one\n    subject: files\n"


# These tests start no ranks.
NO_SERVER = "def start() -> str:\n    return ''\n\ndef share(address: str) -> None: ...\n"


def copy_conftest(folder: Path) -> None:
    """What all tests share, into a folder with other tests."""
    (folder / "tests").mkdir(exist_ok=True)
    for name in ("__init__.py", "conftest.py", "covering.py", "subjects.py"):
        (folder / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (folder / "tests" / "fork_server.py").write_text(NO_SERVER)


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_a_run_leaves_how_each_test_that_shows_a_statement_ended(tmp_path: Path, processes: list[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_made_up.py").write_text(TESTS)
    copy_conftest(tmp_path)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{MARKERS}")
    command = [sys.executable, "-m", "pytest", "-q", "tests", *processes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 failed, 2 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    run: Record = json.loads((tmp_path / ".pytest_cache/v/penstock/shown").read_text())
    one, two, three, four = (
        f"tests/test_made_up.py::{name}"
        for name in ("test_one", "test_two", "TestMore::test_three", "TestMore::test_four")
    )
    assert run == {
        one: {"passed": [""], "skipped": ["this machine has no wings"]},
        two: {"skipped": ["make setup installs it"]},
        three: {"failed": [""]},
        four: {"passed": [""]},
    }
    assert [verdict(tests, run).word for tests in ([one], [two], [three, four], [four])] == [
        "in part",
        "skipped",
        "failed",
        "shown",
    ]


@pytest.mark.parametrize(
    ("outcomes", "word", "forgiven"),
    [
        ({"a": {"passed": [""]}, "b": {"passed": ["", ""]}}, "shown", True),
        ({"a": {"passed": [""]}}, "in part", False),
        ({}, "not run", False),
        ({"a": {"passed": [""]}, "b": {"failed": [""], "passed": [""]}}, "failed", False),
        ({"a": {"passed": [""]}, "b": {"skipped": ["needs a CUDA device"]}}, "in part", True),
        (
            {"a": {"skipped": ["network namespaces need root"]}, "b": {"skipped": ["NO CHROMIUM FOUND: x"]}},
            "skipped",
            True,
        ),
        ({"a": {"unchanged": ["unchanged since it passed"]}, "b": {"passed": [""]}}, "shown", True),
        ({"a": {"skipped": ["needs a CUDA device"]}}, "skipped", False),
        ({"a": {"passed": [""]}, "b": {"skipped": ["make test-some-thing installs it"]}}, "in part", True),
        ({"a": {"passed": [""]}, "b": {"skipped": ["make setup installs it"]}}, "in part", False),
        (
            {"a": {"skipped": ["needs a CUDA device"]}, "b": {"skipped": ["make setup installs it"]}},
            "skipped",
            False,
        ),
    ],
)
def test_only_what_a_machine_lacks_excuses_a_statement(outcomes: Record, word: str, forgiven: bool) -> None:
    found = verdict(["a", "b"], outcomes)
    assert (found.word, found.forgiven) == (word, forgiven)
    assert found.word == "shown" or found.why
    assert verdict([], outcomes).word == "open" and not verdict([], outcomes).forgiven


ABOUT = """
import pytest
from tests.helper import ANSWER

pytestmark = pytest.mark.subject("pages/**/*.txt")

@pytest.mark.shows(1)
@pytest.mark.parametrize("number", [1, 2])
def test_about(number):
    assert ANSWER == 42
"""


def test_what_has_passed_is_left_out_until_its_subject_or_the_test_itself_changes(tmp_path: Path) -> None:
    """The record is written where every case is run, by any number of processes, for files that pass whole alone."""
    copy_conftest(tmp_path)
    (tmp_path / "tests" / "test_about.py").write_text(ABOUT)
    (tmp_path / "tests" / "helper.py").write_text("ANSWER = 41\n")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "one.txt").write_bytes(b"one\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{MARKERS}")

    def run(*options: str, every: bool = False) -> str:
        # Compiled files are told apart by seconds and sizes, which here are equal.
        environ = {**os.environ, "PENSTOCK_EVERY_CASE": "1" if every else "", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environ)
        return done.stdout

    assert "2 failed" in run(every=True) and "2 failed" in run()
    (tmp_path / "tests" / "helper.py").write_text("ANSWER = 42\n")
    assert "2 passed" in run(), "nothing is noted of what failed"
    assert "2 passed" in run("-n", "2", every=True)
    assert "2 skipped" in run()
    (tmp_path / "pages" / "one.txt").write_bytes(b"one\r\n")
    assert "2 skipped" in run(), "only the ends of lines differ"
    assert "2 passed" in run(every=True), "where every case is run it runs"
    for path in ("pages/one.txt", "tests/helper.py", "pages/more.txt"):
        before = (tmp_path / path).read_text() if (tmp_path / path).exists() else None
        (tmp_path / path).write_text("ANSWER = 42  # as before\n")
        assert "2 passed" in run(), path
        (tmp_path / path).unlink() if before is None else (tmp_path / path).write_text(before)
        assert "2 skipped" in run(), path
