"""Ranks of a benchmark: processes on this machine that meet over the loopback interface."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

LOOPBACK = "127.0.0.1"


def on_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    limit_s: float = 900.0,
    join: bool = True,
    conduct: Callable[[list[BaseProcess]], None] | None = None,
) -> list[Any]:
    """Call `function(rank, *arguments)` in processes of their own; return the results by rank.

    With `join` the processes are joined by torch.distributed before and after. `conduct` runs beside them, in a thread.

    Raises:
        RuntimeError: a rank failed or took longer than `limit_s`; all processes have ended.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, rank, num_ranks, store.port if join else None, limit_s, function, arguments),
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        if conduct is not None:
            threading.Thread(target=conduct, args=(processes,), daemon=True).start()
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(limit_s):
                raise RuntimeError(f"rank {rank} of the benchmark gave no result in {limit_s:g} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} of the benchmark failed; its traceback stands above") from None
        return results
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _signal(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def _rank_main(
    sender: Connection,
    rank: int,
    num_ranks: int,
    port: int | None,
    limit_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    _sharpen_timers()
    if port is None:
        sender.send(function(rank, *arguments))
        return
    limit = timedelta(seconds=limit_s)
    store = TCPStore(LOOPBACK, port, timeout=limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    sender.send(function(rank, *arguments))
    dist.barrier()
    dist.destroy_process_group()


def _sharpen_timers() -> None:
    """Let sleeps end on time: Linux otherwise adds up to 50 us, which would drown what is measured."""
    pr_set_timerslack = 29
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_timerslack, 1, 0, 0, 0)


Turn = Callable[[], Any]
Prepare = Callable[..., Turn]


def in_turns(sides: Sequence[str], num_ranks: int, prepare: Prepare, *arguments: Any, num_rounds: int) -> Any:
    """Let several engines work in turn, each in processes of its own, which are stopped meanwhile: even a waiting
    process group wakes a hundred times a second, and many of them cost more than what is measured.

    `prepare(side, rank, *arguments)` is called in each of the `num_ranks` processes of a side, joined by
    torch.distributed, when its first turn comes; what it returns is called once a round, all ranks starting together.

    Returns: side -> rank -> what each of the `num_rounds` rounds returned, after one round that is not counted.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    stores = {name: TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) for name in ("", *sides)}
    ports = {name: store.port for name, store in stores.items()}
    plan = (tuple(sides), num_ranks, num_rounds, ports)

    def conduct(processes: list[BaseProcess]) -> None:
        for round_ in range(num_rounds + 1):
            for number in range(len(sides)):
                members = processes[number * num_ranks : (number + 1) * num_ranks]
                _signal(members, signal.SIGCONT)
                stores[""].set(f"{round_}/{number}", "")
                stores[""].wait([f"{round_}/{number}/{rank}" for rank in range(num_ranks)], timedelta(seconds=_LIMIT_S))
                if round_ < num_rounds:
                    _signal(members, signal.SIGSTOP)

    count = len(sides) * num_ranks
    found = on_ranks(count, _take_turns, plan, prepare, arguments, limit_s=_LIMIT_S, join=False, conduct=conduct)
    return {side: found[i * num_ranks : (i + 1) * num_ranks] for i, side in enumerate(sides)}


_LIMIT_S = 1800.0


def _take_turns(
    process: int,
    plan: tuple[tuple[str, ...], int, int, dict[str, int]],
    prepare: Prepare,
    arguments: tuple[Any, ...],
) -> list[Any]:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    sides, num_ranks, num_rounds, ports = plan
    number, rank = divmod(process, num_ranks)
    limit = timedelta(seconds=_LIMIT_S)
    turns = TCPStore(LOOPBACK, ports[""], timeout=limit, wait_for_workers=False)
    store = TCPStore(LOOPBACK, ports[sides[number]], timeout=limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    turn: Turn | None = None
    results = []
    for round_ in range(num_rounds + 1):
        turns.wait([f"{round_}/{number}"], limit)
        turn = turn or prepare(sides[number], rank, *arguments)
        dist.barrier()
        results.append(turn())
        dist.barrier()
        turns.set(f"{round_}/{number}/{rank}", "")
    dist.destroy_process_group()
    return results[1:]
