"""Mutation testing: plants one small fault at a time in a copy of the package and prints those that no test notices.

A fault is judged by the tests that lie nearest to its file, the quick ones first. The same seed gives the same faults
in the same order; how many of them are judged depends on the time. See docs/testing.md.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from harmless_faults import is_harmless
from nearest_tests import PACKAGE, ROOT, Line, Record, digest_of, distances, keep, lines_of, nearest_tests, unrecorded
from small_faults import Fault, faults_in

NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED
# A fault may send a test round in circles, or let it ask for all of the machine's memory.
TEST_LIMIT_S, LIMIT_S, RECORD_LIMIT_S, MEMORY_LIMIT_BYTES = 60, 120, 900, 8 << 30
# What tests import and what takes long is here once, for the tests run in forks of this process.
IMPORTED = (
    "hypothesis torch._dynamo torch.distributed.checkpoint transformers peft trl httpx starlette.testclient uvicorn"
)
for name in [*IMPORTED.split(), "openai", "datasets", "matplotlib.pyplot", "rich.console"]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def busyness() -> float:
    """About how many times as long things take as on a quiet machine, for which limits are given."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Report:
    """A plugin of pytest: runs these tests in this order, and keeps in a file which of them failed first."""

    def __init__(self, path: Path, tests: list[str]) -> None:
        self.path, self.failed, self.places = path, "", {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")
        self.path.write_text(self.failed)

    pytest_collectreport = pytest_runtest_logreport


class Notes:
    """A plugin of pytest: keeps in a folder which lines each test reaches and how long it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds, self.tests = folder, defaultdict[str, float](float), [""]
        self.begin("collection")
        spec = importlib.util.spec_from_file_location("reached", folder.parent / "tools/reached/sitecustomize.py")
        assert spec and spec.loader
        os.environ |= {"PENSTOCK_REACHED": str(folder)}
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        self.reached = module.reached

    def begin(self, name: str) -> None:
        (self.folder / "now").write_text(name)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin(str(len(self.tests)))
        self.tests.append(nodeid)
        self.reached.begin()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration / busyness() if report.passed else math.inf
        (self.folder / "tests").write_text(json.dumps([self.tests, self.seconds]))


class Copy:
    """A copy of the repository in which one process plants faults and runs tests."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder) / str(os.getpid())
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "runs", "build", "__pycache__"))
        self.sound: dict[str, bool] = {}  # whether a test passes without any fault

    def fork(self, limit_s: float, make: Callable[[], Any], *arguments: str) -> int | None:
        """Run pytest with the plugin that `make` gives, in a process of its own: its status, or None past the limit."""
        if (child := os.fork()) == 0:
            os.setsid()
            os.chdir(self.root)
            os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            os.environ["PYTHONPATH"] = os.pathsep.join([str(self.root / "src"), str(self.root / "tools/reached")])
            sys.path[:0], sys.dont_write_bytecode = [str(self.root / "src"), str(self.root)], True
            sys.modules["__main__"].__file__ = None  # Or each rank that a test starts would import this module first.
            os._exit(pytest.main(["-p", "no:cacheprovider", *arguments], [make()]))
        end, ended, status = time.monotonic() + limit_s * busyness(), 0, 0
        try:
            while not ended and time.monotonic() < end:
                time.sleep(0.05)
                ended, status = os.waitpid(child, os.WNOHANG)
        finally:
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) if ended else None

    def run(self, tests: list[str]) -> str | None:
        """The first of these tests that fails; empty if all pass, None if they do not end in time."""
        (verdict := self.root / "verdict").write_text("")
        files = sorted({test.partition("::")[0] for test in tests})
        limit = f"--timeout={TEST_LIMIT_S * busyness():.0f}"
        status = self.fork(LIMIT_S, lambda: Report(verdict, tests), "-x", limit, *files)
        if failed := verdict.read_text():
            return failed
        return None if status is None else "before any test" if status not in (0, NO_TESTS) else ""

    def record(self, file: str) -> None:
        """Run a file of tests to see which lines each of them reaches."""
        (folder := self.root / "reached").mkdir()
        self.fork(
            RECORD_LIMIT_S, lambda: Notes(folder), "-m", "not subject and not gpu", f"--timeout={TEST_LIMIT_S}", file
        )
        tests, seconds = [], {}
        if (written := folder / "tests").is_file():
            tests, seconds = json.loads(written.read_text())
        reached, paths = defaultdict[Line, set[str]](set), sorted(PACKAGE.rglob("*.py"))
        for number, test in enumerate(tests):
            if (notes := folder / str(number)).is_file():
                for place, line in set(struct.iter_unpack("<HH", notes.read_bytes())):
                    reached[lines_of(paths[place])[line - 1]].add(test)
        passed = {test: took for test, took in seconds.items() if took < math.inf}
        keep(file, Record.of(digest_of(self.root / file), passed, reached))
        shutil.rmtree(folder)

    def judge(self, fault: Fault, tests: list[str]) -> str:
        """What became of the fault."""
        target = self.root / fault.path.relative_to(ROOT)
        whole, failed = target.read_bytes(), None
        for _ in range(3):
            sound = [test for test in tests if self.sound.get(test, True)]
            target.write_bytes(fault.planted(whole))
            failed = self.run(sound) if sound else ""
            target.write_bytes(whole)
            # A test that fails without a fault too says nothing; if all take too long, half of them may not.
            if failed is None:
                tests = tests[: len(tests) // 2]
            elif "::" in failed and failed not in self.sound:
                self.sound[failed] = self.run([failed]) == ""
            if failed is not None and self.sound.get(failed, True):
                return "caught" if failed else "survived"
        return "undecided"


own_copy = cache(Copy)  # one in each process of the pool


def judge(fault: Fault, limit_s: float, folder: str) -> tuple[Fault, int, str]:
    tests = nearest_tests(fault.path, fault.line, limit_s)
    return fault, len(tests), own_copy(folder).judge(fault, tests)


def record(file: str, folder: str) -> str:
    own_copy(folder).record(file)
    return file


def results(pool: ProcessPoolExecutor, jobs: int, calls: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """What these calls give, so many at a time; the next one is looked for when it can begin."""
    running: set[Future[Any]] = set()
    while True:
        running |= {pool.submit(*call) for call in islice(calls, jobs - len(running))}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant small faults; print those that no test notices.")
    parser.add_argument("--rooms", nargs="+", default=["schedule", "runtime", "engine", "model"], help="or files")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to go on")
    parser.add_argument("--record", type=float, default=120.0, help="for how many minutes, before, to record tests")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a fault's tests may take together")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which faults are planted")
    parser.add_argument("--jobs", type=int, default=2, help="faults judged at a time")
    options = parser.parse_args()
    files = {f for room in options.rooms for f in [PACKAGE / room, *(PACKAGE / room).rglob("*.py")] if f.is_file()}
    faults = [fault for path in sorted(files) for fault in faults_in(path)]
    random.Random(options.seed).shuffle(faults)
    context, counts = multiprocessing.get_context("fork"), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ProcessPoolExecutor(options.jobs, context) as pool:
        end, left = time.monotonic() + 60 * options.record, unrecorded()
        print(f"{len(distances()) - len(left)} of {len(distances())} files of tests are recorded", flush=True)
        for file in results(pool, options.jobs, ((record, file, folder) for file in left if time.monotonic() < end)):
            print(f"recorded {file}", flush=True)
        judged = [fault for fault in faults if not is_harmless(fault)]
        print(f"{len(judged)} possible faults in {len(files)} files, ", end="")
        print(f"without {len(faults) - len(judged)} that are known as harmless", flush=True)
        end = time.monotonic() + 60 * options.minutes
        calls = (
            (judge, fault, options.seconds, folder) for fault in judged if time.monotonic() < end and fault.compiles()
        )
        for number, (fault, num_tests, outcome) in enumerate(results(pool, options.jobs, calls), start=1):
            counts.update((of, outcome) for of in (fault.path.relative_to(PACKAGE).parts[0], "all"))
            if outcome != "caught":
                print(f"{number}: {outcome} ({num_tests} tests)  {str(fault).removeprefix(f'{ROOT}/')}", flush=True)
            elif number % 10 == 0:
                print(f"{number}", flush=True)
    for of in sorted({of for of, _ in counts}, key=lambda of: (of == "all", of)):
        caught, survived, undecided = (counts[of, outcome] for outcome in ("caught", "survived", "undecided"))
        print(f"{of}: {caught} of {caught + survived} caught; {undecided} undecided")


if __name__ == "__main__":
    main()
