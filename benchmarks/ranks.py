"""Ranks of a benchmark or test: processes on this machine that meet over the loopback interface and answer calls."""

import ctypes
import enum
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

LOOPBACK = "127.0.0.1"
_LIMIT_S = 1800.0
_END_S = 5.0
_DIED = "died with exit code"
_SILENCE_S = 2.0
"""How long to wait for the death of another rank once one has failed: a rank that died is the cause."""

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29  # <linux/prctl.h>
_IMPORTED_ONCE = ["penstock.engine.engine", "torch.distributed.pipelining"]


class RankFailed(RuntimeError):
    """A rank raised, died or was too slow; the message says which and why. All ranks have ended."""


class _Task(enum.Enum):
    """A rank's tasks; `PREPARE` calls a function whose result each `TURN` calls, and `LAST` is a call and the end."""

    CALL = "call"
    LAST = "last"
    PREPARE = "prepare"
    TURN = "turn"
    END = "end"


class Team:
    """Separate processes that answer calls, all at once, until the `with` block ends.

    Imports are made once for all of them, by the server that `context` forks them from. So each starts quickly, and
    many processes on few cores do not drive each other's copies out of the caches, which cost 0.4% of an emulated step.

    With `join` they are joined by torch.distributed. If one fails, all are ended at once and its traceback is reported.

    Raises:
        RankFailed: by every call, for a rank that failed or took longer than `limit_s`.
    """

    #: the processes, and a pipe to each
    _processes: list[BaseProcess]
    _pipes: list[Connection]
    #: the longest that a call may take
    _limit_s: float
    #: where the ranks meet
    _store: Any

    def __init__(
        self,
        num_ranks: int,
        *,
        join: bool = True,
        limit_s: float = _LIMIT_S,
        context: ForkServerContext | None = None,
    ) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._limit_s = limit_s
        self._processes = []
        self._pipes = []
        if context is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_IMPORTED_ONCE)
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            place = (rank, num_ranks, self._store.port if join else None, limit_s)
            process = context.Process(target=_rank_main, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        # A rank stopped before it has begun could outlive the process that began the benchmark.
        try:
            self._hear_all()
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.wake()
            for pipe in self._pipes:
                _send(pipe, (_Task.END, None, ()))
            for process in self._processes:
                process.join(timeout=10)
        self._kill()

    def _kill(self) -> None:
        """Kill the ranks and what they may have started; each leads its own session, so nothing else can be hit."""
        for process in self._processes:
            process.kill()
            if process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def outcomes(self, function: Callable[..., Any], *arguments: Any, grace_s: float | None = None) -> "list[Outcome]":
        """Call `function(rank, *arguments)` on every rank for the last time, and tell how each has ended by itself.

        `grace_s`: kill those that still run so long after the first failure, instead of after the limit.
        """
        answers: dict[int, _Answer] = {}
        try:
            for pipe in self._pipes:
                with suppress(BrokenPipeError):
                    _send(pipe, (_Task.LAST, function, arguments))
            deadline = time.monotonic() + self._limit_s
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
            while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]  # it was made of these
                    try:
                        answers[rank] = _receive(self._pipes[rank])
                    except (EOFError, ConnectionError):
                        answers[rank] = _Answer(failure=_DIED)
                    if answers[rank].failure is not None and grace_s is not None:
                        deadline = min(deadline, time.monotonic() + grace_s)
            for rank, process in enumerate(self._processes):
                # A rank that has answered still takes its process group down.
                process.join(timeout=_END_S if rank in answers else 0)
        finally:
            self._kill()
        late = _Answer(failure=f"had not ended after {self._limit_s:g} s and was killed")
        found = [answers.get(rank, late) for rank in range(len(self._processes))]
        codes = [process.exitcode for process in self._processes]
        return [
            Outcome(rank, own.value, f"{_DIED} {code}" if own.failure == _DIED else own.failure, code)
            for rank, (own, code) in enumerate(zip(found, codes, strict=True))
        ]

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on every rank; returns the results by rank."""
        return self._ask(_Task.CALL, function, arguments)

    def prepare(self, function: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        """Have `function(rank, *arguments)` make the callable of each turn, in place of the one before.

        The one before is closed first, if it has a `close`.
        """
        self._ask(_Task.PREPARE, function, arguments)

    def turn(self) -> list[Any]:
        """Call what was prepared, all ranks starting together; returns the results by rank."""
        return self._ask(_Task.TURN, None, ())

    def sleep(self) -> None:
        """Stop the processes where they are: even a waiting process group wakes a hundred times a second."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let stopped processes continue."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def _ask(self, task: _Task, function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            try:
                _send(pipe, (task, function, arguments))
            except BrokenPipeError:
                raise self._failure(rank) from None
        return self._hear_all()

    def _hear_all(self) -> list[Any]:
        deadline = time.monotonic() + self._limit_s
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                raise RankFailed(f"rank {late} of the benchmark gave no result in {self._limit_s:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]  # it was made of these
                answers[rank] = self._answer(rank, waiting.values())
        return [answers[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int, unheard: Iterable[int]) -> Any:
        answer = self._heard(rank)
        if answer.failure is None:
            return answer.value
        # A peer complains as soon as a rank has failed, and may be read first; a rank that dies is silent.
        answers = {rank: answer} | {
            other: self._heard(other) for other in unheard if self._pipes[other].poll(_SILENCE_S)
        }
        first = min(answers, key=lambda rank: answers[rank].failed_at_s)
        raise RankFailed(f"rank {first} of the benchmark failed:\n{answers[first].failure}")

    def _heard(self, rank: int) -> "_Answer":
        try:
            return _receive(self._pipes[rank])
        except (EOFError, ConnectionError):
            raise self._failure(rank) from None

    def _failure(self, rank: int) -> RankFailed:
        self._processes[rank].join(timeout=5)
        return RankFailed(f"rank {rank} of the benchmark died with exit code {self._processes[rank].exitcode}")


def on_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 900.0, join: bool = True
) -> list[Any]:
    """Call `function(rank, *arguments)` in separate processes; return the results by rank.

    Raises:
        RankFailed: a rank failed or took longer than `limit_s`; all processes have ended.
    """
    with Team(num_ranks, join=join, limit_s=limit_s) as team:
        return team.call(function, *arguments)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with the text of its error; `exit_code` is negative for a signal."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None


Turn = Callable[[], Any]
Prepare = Callable[..., Turn]


@dataclass(frozen=True)
class Job:
    """Several engines to compare; `prepare(side, rank, *arguments)` makes a side's turn."""

    sides: tuple[str, ...]
    arguments: tuple[Any, ...]


def in_turns(sides: Sequence[str], num_ranks: int, prepare: Prepare, *arguments: Any, num_rounds: int) -> Any:
    """Let several engines work in turn, each in its own processes, which are stopped between turns.

    `prepare(side, rank, *arguments)` is called in each of the `num_ranks` processes of a side, joined by
    torch.distributed, when its first turn comes; its result is called once a round, all ranks starting together.

    Returns: side -> rank -> the result of each of the `num_rounds` rounds, after one round of warm-up.
    Raises: RankFailed.
    """
    (found,) = jobs_in_turns(num_ranks, prepare, [Job(tuple(sides), arguments)], num_rounds=num_rounds)
    return found


def jobs_in_turns(num_ranks: int, prepare: Prepare, jobs: Iterable[Job], *, num_rounds: int) -> Iterator[Any]:
    """Run one job after another as `in_turns` does, in processes started once per side; yields each job's result."""
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for job in jobs:
            for side in job.sides:
                if side not in teams:
                    teams[side] = stack.enter_context(Team(num_ranks))
                    teams[side].sleep()
            yield _rounds(job, teams, prepare, num_rounds)


def _rounds(job: Job, teams: Mapping[str, Team], prepare: Prepare, num_rounds: int) -> Any:
    found: dict[str, list[list[Any]]] = {side: [] for side in job.sides}
    for round_ in range(num_rounds + 1):
        for side in job.sides:
            teams[side].wake()
            if round_ == 0:
                teams[side].prepare(_prepare_side, prepare, side, job.arguments)
            found[side].append(teams[side].turn())
            teams[side].sleep()
    return {side: [list(of_rank) for of_rank in zip(*rounds[1:], strict=True)] for side, rounds in found.items()}


def _prepare_side(rank: int, prepare: Prepare, side: str, arguments: tuple[Any, ...]) -> Turn:
    return prepare(side, rank, *arguments)


# ---- in the processes


def _send(pipe: Connection, message: Any) -> None:
    """Send by value: multiprocessing's own pickling would leave tensors in memory that both processes share."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    failure: str | None = None
    failed_at_s: float = math.inf  # by the clock that the processes of a machine share


def _rank_main(pipe: Connection, rank: int, num_ranks: int, port: int | None, limit_s: float) -> None:
    # A collection would walk through all that the server has imported, and copy its pages.
    gc.freeze()
    os.setsid()
    _end_with_the_benchmark()
    _send(pipe, _Answer())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        _join(rank, num_ranks, port, limit_s)
        _serve(pipe, rank, joined=port is not None)
    except EOFError:
        os._exit(1)  # the caller is gone
    except BaseException:  # whatever ends a rank belongs in the report
        _send(pipe, _Answer(failure=traceback.format_exc(), failed_at_s=time.monotonic()))
        # Reported before peers notice that this rank is gone; nothing is called any more that could wait for them.
        os._exit(1)


def _end_with_the_benchmark() -> None:
    """Let the system kill this process, stopped or not, once the benchmark is gone.

    The fork server ends as soon as nobody holds its lifeline. The process that began the benchmark holds it, and every
    forked process until it closes its copy.
    """
    if sys.platform == "linux":
        lifeline = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
        if lifeline is not None:
            os.close(lifeline)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _join(rank: int, num_ranks: int, port: int | None, limit_s: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    _sharpen_timers()
    if port is not None:
        limit = timedelta(seconds=limit_s)
        store = TCPStore(LOOPBACK, port, timeout=limit, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        # Until all are connected none may end: the others would find it gone.
        if store.add("num_connected", 1) == num_ranks:
            store.set("all_connected", "")
        store.wait(["all_connected"])


def _serve(pipe: Connection, rank: int, *, joined: bool) -> None:
    """Answer calls until the end."""
    import torch.distributed as dist

    turn: Turn | None = None
    while True:
        task, function, arguments = _receive(pipe)
        value = None
        if task is _Task.END:
            if joined:
                dist.barrier()
            break
        if task is _Task.LAST:
            _send(pipe, _Answer(function(rank, *arguments)))
            pipe.close()
            break
        if task is _Task.CALL:
            value = function(rank, *arguments)
        elif task is _Task.PREPARE:
            getattr(turn, "close", _nothing)()
            turn = None
            gc.collect()  # an engine's threads go with it
            turn = function(rank, *arguments)
        elif turn is not None:
            if joined:
                dist.barrier()
            value = turn()
            if joined:
                dist.barrier()
        _send(pipe, _Answer(value))
    # A last call may have done so.
    if joined and dist.is_initialized():
        dist.destroy_process_group()


def _nothing() -> None:
    pass


def _sharpen_timers() -> None:
    """Let sleeps end on time: Linux otherwise adds up to 50 us, more than what is measured."""
    if sys.platform == "linux":
        _prctl(_PR_SET_TIMERSLACK, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
