"""What every test shares: one thread, GPU tests only where there is a GPU, and a record of what a run has shown."""

import gc
import os
import signal
from collections.abc import Generator
from typing import Any

# Set before torch is first imported, here and in the processes the tests start: sums must not depend on how many
# cores the machine has, and several ranks share them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

from tests import fork_server
from tests.covering import EVERY
from tests.subjects import ROOT, UNCHANGED, digest, record, recorded

# To try the lines of tests for a GPU, as far as these are given their device, where there is none.
GPU_TESTS_ON_CPU = os.environ.get("PENSTOCK_GPU_TESTS_ON_CPU") == "1"

# A shell starts what runs in its background with Ctrl-C ignored, and so would be what the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As in what the tests fork (tests/fork_server.py): a tenth of a run's time else goes into looking for garbage.
gc.set_threshold(50_000, 20, 100)

# An example's time says how busy the machine is, not whether it passes.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    # Of a run in several processes the first one hears of all tests.
    if given := getattr(config, "workerinput", None):
        fork_server.share(given["fork_server"])
    else:
        config.pluginmanager.register(Shown(config), "shown")
        if EVERY:
            config.pluginmanager.register(Subjects(), "subjects")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all processes of a run fork from one server, where each would import all that it has."""
    node.workerinput["fork_server"] = fork_server.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have reports name the statements that tests show; leave out those marked `gpu` where no CUDA device is found.

    And those whose subject is unchanged, unless every case is run.
    """
    known, found = recorded(), dict[str, str]()
    for item in items:
        for mark in item.iter_markers("shows"):
            item.user_properties.append(("shows", list(mark.args)))
        if subjects := [pattern for mark in item.iter_markers("subject") for pattern in mark.args]:
            file = item.path.relative_to(ROOT).as_posix()
            # Of one file all tests have the same.
            found[file] = found.get(file) or digest(item.path, subjects)
            item.user_properties.append(("subject", [file, found[file]]))
            if not EVERY and known.get(file) == found[file]:
                item.add_marker(pytest.mark.skip(reason=UNCHANGED))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            if GPU_TESTS_ON_CPU and "device" in getattr(item, "fixturenames", ()):
                continue
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Shown:
    """Leaves for `make promises` how each test ended that shows a statement, with the reasons of those skipped."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        #: test without its parameters -> outcome -> reasons, or nothing, for each of its cases
        self.tests: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (report.passed and report.when != "call") or not any(name == "shows" for name, _ in report.user_properties):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        outcomes = self.tests.setdefault(report.nodeid.partition("[")[0], {})
        outcome = "unchanged" if reason == UNCHANGED else report.outcome
        outcomes.setdefault(outcome, []).append(reason)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self.config, "cache", None)
        if cache is not None:
            cache.set("penstock/shown", self.tests)


class Subjects:
    """Notes in `tests/subjects.json` the files of tests with a subject that have all passed."""

    def __init__(self) -> None:
        #: test's file -> its digest, and whether all have passed so far
        self.files: dict[str, tuple[str, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "subject" and isinstance(value, list):
                file, found = value
                passed = self.files.get(file, (found, True))[1] and report.passed
                self.files[file] = found, passed

    def pytest_sessionfinish(self) -> None:
        record({file: found for file, (found, passed) in self.files.items() if passed})


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage walk through all that is imported, meanwhile and thousands of tests long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
