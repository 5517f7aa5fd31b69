"""Local workers of a command: started together, watched, and ended together.

The launcher imports for all of them, once, and forks: PyTorch costs seconds of a processor. So until the last worker is
started it has one thread and has not opened a GPU.
"""

import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess

from penstock.cli.main import CLOSED, FAILED, REFUSED, STOPPED, WORKER_DONE, say
from penstock.cli.processes.machine import check_processes
from penstock.cli.processes.meeting import LAUNCHER_PID, LOOPBACK, store_at

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# After a failure, or a second request to stop, nobody has anything left to save. The others find out by themselves and
# report where they were; the watchdogs of those that cannot do so within 4 s of being asked.
_REPORT_LIMIT_S, _END_LIMIT_S = 1.0, 7.0
# Workers that are not done in the time they have after a request to end report it and end by themselves.
_REPORT_LATE_S = 5.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # <linux/prctl.h>


@dataclass(frozen=True)
class WorkerCommand:
    """A command that runs in several processes.

    module: its `main` is what each worker calls. again: ends the sentence "the same command ...", printed when the
    run was stopped or a worker killed. imports: modules that every worker needs. shutdown_timeout_s: how long workers
    that are asked to stop may take to finish what they do, and save; one that hangs is killed then.
    """

    module: str
    again: str
    imports: tuple[str, ...]
    shutdown_timeout_s: float = 600.0


def launch(
    command: WorkerCommand,
    arguments: Sequence[str],
    num_workers: int,
    num_threads: int,
    check: Callable[[], object] | None = None,
) -> int:
    """Start the workers of a command on this machine, wait for them, and return the exit code of the command.

    `arguments` are those of the command, which the workers read again. `check` may refuse to start them; what it
    imports they need not import again.

    A signal that asks to end is passed on as SIGTERM, which lets the workers of a training run finish their step, save
    and end well. Where one fails, stands still then, or is asked twice, or the command's time to end is over, all have
    ended within ten seconds. They meet at a store in this process, and neither it nor they listen anywhere but on the
    loopback.

    Raises: ConfigError for more workers than this machine can hold.
    """
    check_processes(num_workers)
    with _environment_kept(), socket.create_server((LOOPBACK, 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        os.environ |= _environment(num_workers, num_threads, port)
        with _interrupted_at_once():
            if check is not None:
                check()
            context = _context(command.imports)
        shared = (command.module, arguments, os.getpid(), listener if isinstance(context, ForkContext) else None)
        processes = [context.Process(target=_work, args=(rank, *shared)) for rank in range(num_workers)]
        workers = _Workers(processes, command.shutdown_timeout_s)
        with _signals_caught() as signals:
            try:
                workers.start(signals)
                # Its thread would not survive a fork, so it starts last.
                store = store_at(listener)
                workers.watch(signals)
                del store
            finally:
                workers.kill()
        return workers.exit_code(command.again)


def _environment(num_workers: int, num_threads: int, port: int) -> dict[str, str]:
    """The variables of all workers; users' settings of the number of threads stand."""
    usual = {
        "OMP_NUM_THREADS": str(num_threads),
        # NumPy's library would start threads when it is imported.
        "OPENBLAS_NUM_THREADS": "1",
        # A store that has gone would leave pages of C++ frames beside the sentence that says who has gone.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # One queue of work for each stream on a GPU: each group of ranks has one of its own.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        # Microbatches of other lengths would leave a GPU's memory in pieces.
        usual["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {
        **{name: os.environ.get(name, value) for name, value in usual.items()},
        "GLOO_SOCKET_IFNAME": _INTERFACE,
        "NCCL_SOCKET_IFNAME": _INTERFACE,
        "WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # What torch's rendezvous reads: no worker opens a store, all join the launcher's.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        LAUNCHER_PID: str(os.getpid()),
    }


def _context(imports: Sequence[str]) -> ForkContext | SpawnContext:
    """Import the modules and fork; or start anew, where this process has done what does not survive a fork."""
    if sys.platform == "linux" and _can_fork():
        for name in imports:
            importlib.import_module(name)
        # Importing PyTorch's compiler makes a folder for what it compiles; here it has compiled nothing.
        if (caches := sys.modules.get("torch._inductor.runtime.cache_dir_utils")) is not None:
            with suppress(OSError):
                os.rmdir(caches.cache_dir())
        if _can_fork():
            # A collection would walk through all that was imported, in the middle of some step, while others wait.
            gc.freeze()
            return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def _can_fork() -> bool:
    """Return whether this process has a single thread, and no GPU open."""
    torch = sys.modules.get("torch")
    return len(os.listdir("/proc/self/task")) == 1 and not (torch and torch.cuda.is_initialized())


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore this process's environment, which workers inherit: it may launch again, and is no worker itself."""
    environ = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= environ


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process, which has started nothing yet: raised in an import it may get lost in C code."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _signals_caught() -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of signals that ask to end can be read, while they do nothing else."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        wakeup_before = signal.set_wakeup_fd(writer.fileno())
        before = {number: signal.signal(number, lambda *_: None) for number in _STOPS}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep signals that ask to end waiting: a worker that inherits this process's handlers must not be lost on them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Workers:
    #: rank -> its process
    processes: Sequence[BaseProcess]
    #: how long they may go on once they are asked to end
    shutdown_timeout_s: float
    #: the first signal by which this process was asked to end
    stopped_by: signal.Signals | None = None
    #: ranks that this process had to kill, and those that it has asked to end
    killed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    #: when the workers that are left are asked to end, and when they are killed, in seconds of the monotonic clock
    _ask_at: float = math.inf
    _kill_at: float = math.inf
    #: True once some worker has ended without being done
    _has_failed: bool = False

    def start(self, signals: socket.socket) -> None:
        """Start one after the other, until all run or a signal asks to end."""
        for process in self.processes:
            if wait([signals], 0):
                break
            with _signals_held():
                process.start()

    def watch(self, signals: socket.socket) -> None:
        """Wait until all workers have ended, and see to it that they do once one has failed."""
        while alive := self._alive():
            now = time.monotonic()
            # The sentinel of a worker that left processes of its own may stay silent, hence the limit.
            limit_s = max(0.0, min(self._ask_at - now, self._kill_at - now, _POLL_S))
            ready = wait([*(self.processes[rank].sentinel for rank in alive), signals], limit_s)
            if signals in ready:
                for number in signals.recv(64):
                    limit_s = self.shutdown_timeout_s + _REPORT_LATE_S if self.stopped_by is None else _END_LIMIT_S
                    self.stopped_by = self.stopped_by or signal.Signals(number)
                    self._kill_at = min(self._kill_at, time.monotonic() + limit_s)
                    self._ask()
            now = time.monotonic()
            if not self._has_failed and any(process.exitcode not in (None, WORKER_DONE) for process in self.processes):
                self._has_failed = True
                self._ask_at = min(self._ask_at, now + _REPORT_LIMIT_S)
                self._kill_at = min(self._kill_at, now + _END_LIMIT_S)
            if now >= self._ask_at:
                self._ask_at = math.inf
                self._ask()
            if now >= self._kill_at:
                self.kill()

    def kill(self) -> None:
        """Kill the workers that are left, with what they have started."""
        for rank in self._alive():
            process = self.processes[rank]
            assert process.pid is not None
            self.killed.add(rank)
            # It leads a group of its own, unless it has only just been started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def exit_code(self, again: str) -> int:
        """The exit code of the command; reports workers that could not explain themselves."""
        ended = [process.exitcode for process in self.processes]
        if all(code == WORKER_DONE for code in ended):
            return 0
        # One that some library ended with code 0 is not done.
        codes = [0 if code in (None, WORKER_DONE) else code or STOPPED for code in ended]
        for rank, code in enumerate(codes):
            who = f"rank {rank} (process {self.processes[rank].pid})"
            if ended[rank] == 0:
                say(f"{who} was ended with code 0 before its work was done; the same command {again}")
            elif rank in self.killed:
                say(f"{who} did not end when asked to and was killed; the same command {again}")
            elif code < 0 and (code != -signal.SIGTERM or rank not in self.asked):
                say(f"{who} was killed by {signal.Signals(-code).name}; the same command {again}")
        # Those of a run that was stopped have said so, and have saved.
        are_stopped = len(set(codes)) == 1 and codes[0] > REFUSED
        if self.stopped_by is not None:
            if not are_stopped:
                say(f"stopped by {self.stopped_by.name}; the same command {again}")
            return 128 + self.stopped_by
        if are_stopped:
            return codes[0]
        # A mistake that one worker has reported, or whose reader has gone, makes the others fail as well.
        return next((code for code in (REFUSED, CLOSED) if code in codes), FAILED)

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.pid and process.exitcode is None]

    def _ask(self) -> None:
        self.asked.update(self._alive())
        for rank in self._alive():
            process = self.processes[rank]
            assert process.pid is not None
            process.terminate()
            # One that stands still (SIGSTOP) would not hear of it; after a failure it is what the others wait for.
            if self.stopped_by is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)


# ---- in the workers


def _work(rank: int, module: str, arguments: Sequence[str], launcher: int, inherited: socket.socket | None) -> None:
    """Run the command as the worker of this rank, in a session of its own: Ctrl-C reaches the launcher alone."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    _follow(launcher, rank)
    os.setsid()
    if inherited is not None:
        inherited.close()
    # Whatever this process has put in their place before it was forked.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from penstock.cli.main import run_as_script

    sys.exit(run_as_script(importlib.import_module(module).main, list(arguments)) or WORKER_DONE)


def _follow(launcher: int, rank: int) -> None:
    """Be killed when the launcher dies, so that no worker is left behind; Linux alone can do this."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What `ps` and `top` show, where all forked processes have the launcher's command line.
    libc.prctl(_PR_SET_NAME, f"penstock-{rank}".encode())
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
