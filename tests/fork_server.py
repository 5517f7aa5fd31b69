"""Processes forked from a server that has imported torch and the package once: they start in milliseconds.

`Forked` is one that is otherwise like any that `subprocess` starts: a pid, an environment, signals, pipes for what it
writes, and an interpreter that ends as interpreters do.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from typing import Any

# A tenth of a run's time else goes into looking for garbage among what was imported. This module is the first that the
# server imports, and what it forks inherits the thresholds.
gc.set_threshold(50_000, 20, 100)

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # each process has one

# What every rank or command would import itself, torch._dynamo at its first optimizer: seconds each.
_IMPORTED_ONCE = (
    __name__,
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "penstock.engine.engine",
    "penstock.cli.processes.train_worker",
    "pytest",
    "peft",
    "tests.forked_pages",
)


def fork_server() -> ForkServerContext:
    """Makes processes that inherit what the server has imported, and no state of the test's own process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED_ONCE])
    return context


def start() -> str:
    """Start the server now; its address, for other processes of a run to share it."""
    fork_server()
    forkserver.ensure_running()
    address = _server._forkserver_address
    assert address is not None
    return address


def share(address: str) -> None:
    """Have this process's ranks and programs forked by the server of another, which outlives it."""
    _server._forkserver_address = address
    # What forked processes inherit, and close; this server is kept alive by the one who started it.
    _server._forkserver_alive_fd = os.pipe()[1]
    _server.ensure_running = resource_tracker.ensure_running


class Forked:
    """A process that runs a function as a program, with the parts of `subprocess.Popen` that the tests use."""

    def __init__(self, program: Callable[..., object], *arguments: Any, environ: Mapping[str, str]) -> None:
        pipes = [os.pipe() for _ in range(2)]
        outputs = [DupFd(writer) for _, writer in pipes]
        server = fork_server()
        self._process = server.Process(target=_run, args=(program, arguments, dict(environ), outputs))
        self._process.start()
        for _, writer in pipes:
            os.close(writer)
        self._texts = ["", ""]
        self._readers = [
            threading.Thread(target=self._read, args=(number, reader), daemon=True)
            for number, (reader, _) in enumerate(pipes)
        ]
        for thread in self._readers:
            thread.start()

    def _read(self, number: int, reader: int) -> None:
        with open(reader, encoding="utf-8") as pipe:
            self._texts[number] = pipe.read()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that was written to standard output and to standard error, once nobody can write any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for waited_for in (*self._readers, self._process):
            waited_for.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._readers) or self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._texts[0], self._texts[1]


def run_command(arguments: Sequence[str]) -> int:
    """`python -m penstock` with these arguments."""
    from penstock.cli.main import main

    sys.argv = ["penstock", *arguments]
    return main()


def run_without_end(arguments: Sequence[str]) -> int:
    """The same, whose engine does the first that it is asked to score or generate again and again."""
    from penstock.engine import Engine

    def endlessly(method: Callable[..., object]) -> Callable[..., None]:
        def repeat(engine: Engine, *given: Any, **named: Any) -> None:
            while True:
                # Without a generation's listeners, which expect each answer once.
                method(engine, *given[:3], **named)

        return repeat

    for name in ("forward", "generate"):
        setattr(Engine, name, endlessly(getattr(Engine, name)))
    return run_command(arguments)


def run_script(path: str, arguments: Sequence[str]) -> int:
    """`python PATH` with these arguments."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
    return 0


def _run(
    program: Callable[..., object], arguments: Sequence[Any], environ: Mapping[str, str], outputs: Sequence[Any]
) -> None:
    gc.freeze()
    for number, output in enumerate(outputs, start=1):
        descriptor = output.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    # Known from before the variables were changed.
    tempfile.tempdir = None
    try:
        code = program(*arguments)
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    # multiprocessing would leave at once. An interpreter that ends calls what was registered, and waits for threads.
    ctypes.PyDLL(None).Py_Exit(code if isinstance(code, int) else int(code is not None))
