"""Mutation testing: plants one small fault at a time in a copy of the package and prints those that no test notices.

A fault is judged by the tests that lie nearest to its file, the quick ones first. The same seed gives the same faults
in the same order; how many of them are judged depends on the time. See docs/testing.md.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # here once, for the tests run in forks of this process
import torch.distributed.checkpoint  # noqa: F401

from nearest_tests import PACKAGE, ROOT, distances
from small_faults import Fault, faults_in

FAR = 4  # Tests from here on have little to do with a file.
# A fault may send a test round in circles, or let it ask for all of the machine's memory.
TEST_LIMIT_S, LIMIT_S, MEMORY_LIMIT_BYTES = 60, 120, 8 << 30


def busyness() -> float:
    """About how many times as long things take as on a quiet machine, for which limits are given."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Report:
    """A plugin of pytest: keeps in a file which test failed first, and the seconds that each file's tests took."""

    def __init__(self, path: Path) -> None:
        self.path, self.failed, self.seconds = path, "", defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0.0)
        self.failed = self.failed or (report.nodeid if report.failed else "")
        self.path.write_text(json.dumps([self.failed, self.seconds]))

    pytest_collectreport = pytest_runtest_logreport


class Copy:
    """A copy of the repository in which one process plants faults and runs tests."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder) / str(os.getpid())
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        self.seconds: dict[str, float] = {}  # that each file of tests has taken
        self.sound: dict[str, bool] = {}  # whether a test passes without any fault

    def tests_for(self, fault: Fault) -> list[str]:
        """The nearest files of tests that fit into the time, quick ones first; the nearest bears the file's name."""
        chosen, left_s = [], LIMIT_S / 4
        near = {test: of[fault.path] for test, of in distances().items() if of.get(fault.path, FAR) < FAR}
        near |= dict.fromkeys((test for test in near if Path(test).stem == f"test_{fault.path.stem}"), 0)
        guessed = {test: self.seconds.get(test, 20.0 if "/dist/" in test else 4.0) for test in near}
        for test in sorted(near, key=lambda test: (near[test], guessed[test], test)):
            if guessed[test] <= left_s:
                chosen.append(test)
                left_s -= guessed[test]
        return sorted(chosen, key=lambda test: (guessed[test], test))

    def run(self, *arguments: str) -> str | None:
        """The first test that fails, in a process of its own; empty if all pass, None if they do not end in time."""
        (verdict := self.root / "verdict.json").write_text('["", {}]')
        if (child := os.fork()) == 0:
            os.setsid()
            os.chdir(self.root)
            os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            os.environ["PYTHONPATH"] = str(self.root / "src")
            sys.path[:0], sys.dont_write_bytecode = [str(self.root / "src"), str(self.root)], True
            options = ["-x", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S * busyness():.0f}"]
            os._exit(pytest.main([*options, *arguments], [Report(verdict)]))
        end, ended, status = time.monotonic() + LIMIT_S * busyness(), 0, 0
        try:
            while not ended and time.monotonic() < end:
                time.sleep(0.05)
                ended, status = os.waitpid(child, os.WNOHANG)
        finally:
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        failed, seconds = json.loads(verdict.read_text())
        if ended:
            self.seconds |= {} if failed else seconds
            return failed or ("before any test" if status else "")
        self.seconds |= {**seconds, list(seconds)[-1]: LIMIT_S} if seconds else {}
        return failed or None

    def judge(self, fault: Fault) -> tuple[str, int]:
        """What became of the fault, and how many files of tests it was put to."""
        target = self.root / fault.path.relative_to(ROOT)
        whole, failed, tests = target.read_text(), None, []
        for _ in range(3):
            tests = self.tests_for(fault)
            target.write_text(fault.source)
            unsound = [f"--deselect={test}" for test, sound in self.sound.items() if not sound]
            failed = self.run(*tests, *unsound) if tests else ""
            target.write_text(whole)
            # A test that fails without a fault too says nothing, and one that takes too long is left out now.
            if failed and "::" in failed and failed not in self.sound:
                self.sound[failed] = self.run(failed) == ""
            if failed is not None and self.sound.get(failed, True):
                return "caught" if failed else "survived", len(tests)
        return "undecided", len(tests)


own_copy = cache(Copy)  # one in each process of the pool


def judge(fault: Fault, folder: str) -> tuple[Fault, str, int]:
    return fault, *own_copy(folder).judge(fault)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant small faults; print those that no test notices.")
    parser.add_argument("--rooms", nargs="+", default=["schedule", "runtime", "engine", "model"], help="or files")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which faults are planted")
    parser.add_argument("--jobs", type=int, default=2, help="faults judged at a time")
    options = parser.parse_args()
    end, counts = time.monotonic() + 60 * options.minutes, Counter[tuple[str, str]]()
    files = {f for room in options.rooms for f in [PACKAGE / room, *(PACKAGE / room).rglob("*.py")] if f.is_file()}
    faults = [fault for path in sorted(files) for fault in faults_in(path)]
    random.Random(options.seed).shuffle(faults)
    print(f"{len(faults)} possible faults in {len(files)} files, {len(distances())} files of tests", flush=True)
    context, waiting = multiprocessing.get_context("fork"), (fault for fault in faults if fault.compiles())
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ProcessPoolExecutor(options.jobs, context) as pool:
        running = {pool.submit(judge, fault, folder) for _, fault in zip(range(options.jobs), waiting)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for fault, outcome, num_tests in (future.result() for future in done):
                counts.update((of, outcome) for of in (fault.path.relative_to(PACKAGE).parts[0], "all"))
                if outcome != "caught":
                    print(f"{outcome} ({num_tests} files of tests)  {str(fault).removeprefix(f'{ROOT}/')}", flush=True)
                if time.monotonic() < end and (following := next(waiting, None)):
                    running.add(pool.submit(judge, following, folder))
    for of in sorted({of for of, _ in counts}, key=lambda of: (of == "all", of)):
        caught, survived, undecided = (counts[of, outcome] for outcome in ("caught", "survived", "undecided"))
        print(f"{of}: {caught} of {caught + survived} caught; {undecided} undecided")


if __name__ == "__main__":
    main()
