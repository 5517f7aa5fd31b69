"""Runs one function on several ranks: real processes, gloo on the loopback interface, a hard time limit.

The function must be importable (defined at the head of a test module) and is called as ``function(rank, *args)``
with torch.distributed initialised; arguments and results travel pickled.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import fork_server

_LOOPBACK = "127.0.0.1"
# Limits are given for a quiet machine; only what hangs is meant to reach them.
_PATIENCE = 3.0
# After one rank has failed the others usually wait for it: long enough for them to tell what they saw.
_GRACE_S = 3.0
# A rank that has reported still takes its process group down.
_EXIT_S = 5.0
_DIED = "died with exit code {}"


class RankFailure(AssertionError):
    """A rank raised, died or ran past the time limit; the text holds every rank's traceback."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with the text of its error; `exit_code` is negative for a signal."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` on `world` ranks and return their results in rank order.

    Raises: `RankFailure` when any rank raises, dies, or hangs, which it does after `timeout_s` on a quiet machine. All
    processes have ended when this returns or raises.
    """
    outcomes = run_outcomes(world, function, *args, timeout_s=timeout_s, stop_at_failure=True)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise RankFailure("\n".join(f"rank {outcome.rank} of {world}: {outcome.error}" for outcome in failed))
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, stop_at_failure: bool = False
) -> list[Outcome]:
    """Like `run_ranks`, for ranks that are meant to die: never raises for a rank's failure, but reports it.

    With `stop_at_failure`, ranks that still run shortly after the first failure are killed.
    """
    timeout_s *= _PATIENCE
    context = fork_server()
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    processes, pipes = [], []
    outcomes: dict[int, Outcome] = {}
    try:
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            work = pickle.dumps((function, args))
            process = context.Process(target=_rank_main, args=(sender, rank, world, store.port, timeout_s, work))
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        outcomes = _collect(pipes, time.monotonic() + timeout_s, stop_at_failure)
    finally:
        for rank, process in enumerate(processes):
            process.join(timeout=_EXIT_S if rank in outcomes else 0)
            _kill(process)
            process.join()
    late = f"had not ended after {timeout_s:g} s and was killed"
    ended = [outcomes.get(rank) or Outcome(rank, error=late) for rank in range(world)]
    return [
        replace(
            outcome,
            error=_DIED.format(process.exitcode) if outcome.error == _DIED else outcome.error,
            exit_code=process.exitcode,
        )
        for outcome, process in zip(ended, processes, strict=True)
    ]


def _collect(pipes: list[Connection], deadline: float, stop_at_failure: bool) -> dict[int, Outcome]:
    """Receive one message a rank until the deadline; a pipe that closes without one means a death."""
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending[pipe]  # type: ignore[index]
            try:
                value, error = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                value, error = None, _DIED
            outcomes[rank] = Outcome(rank, value, error)
            if error is not None and stop_at_failure:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _kill(process: BaseProcess) -> None:
    """Kill a rank and what it may have started; each rank leads its own session, so nothing else can be hit."""
    process.kill()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _rank_main(sender: Connection, rank: int, world: int, port: int, timeout_s: float, work: bytes) -> None:
    # A collection would walk through all that the server has imported, and copy its pages.
    gc.freeze()
    os.setsid()
    _die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(work)
        limit = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(_LOOPBACK, port, timeout=limit, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        # Until all are connected none may end: the others would find it gone.
        if store.add("num_connected", 1) == world:
            store.set("all_connected", "")
        store.wait(["all_connected"])
        message = (function(rank, *args), None)
    except BaseException:  # whatever ends a rank belongs into the report
        message = (None, traceback.format_exc())
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    if message[1] is None and dist.is_initialized():
        dist.destroy_process_group()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
