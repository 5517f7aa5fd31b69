"""Liveness: the processes of a run, and, when one cannot go on, which of the others still answer.

A collective that fails does not say whose part was missing. So every process listens on a port of its own and answers
queries with the place where it is; its watchdog does so even while its main thread is blocked inside a backend.
"""

import contextlib
import enum
import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from torch.distributed import ProcessGroup

from penstock.parallel.host import gather_json

# For a connection, and for the answer.
_LIMIT_S = 1.0
_MOST_THREADS = 256
_MOST_QUOTED = 2
_MOST_ASKED = 64
_MOST_HOSTS = 8
_LOOPBACK = "127.0.0.1"


class Absence(enum.Enum):
    """The reason why a process did not answer: its host is out of reach, the process has ended, or it is stalled."""

    UNREACHABLE = "not reachable"
    ENDED = "ended"
    SILENT = "reachable but silent"


Presence = tuple[str, bool]
"""A process's answer: the place where it is, and whether it waits for others itself."""


@dataclass(frozen=True)
class Process:
    """A process of the run; `rank` is global, `port` is None where no other host can reach its address."""

    rank: int
    host: str
    address: str
    port: int | None

    @property
    def place(self) -> str:
        return self.host if self.address.startswith("127.") else f"{self.host} at {self.address}"


@dataclass(frozen=True)
class Processes:
    """All processes of a run, in the order of their global ranks, and how to ask them.

    own: this process's rank. every: all of them. pipeline: the global ranks of its pipeline, in pipeline order.
    """

    own: int
    every: tuple[Process, ...]
    pipeline: tuple[int, ...]

    @classmethod
    def of(cls, listener: socket.socket, group: ProcessGroup, pipeline: Sequence[int]) -> Self:
        """All processes of `group`, the world's in host memory; each gives its listening socket."""
        address, port = listener.getsockname()[:2]
        addresses = gather_json([socket.gethostname(), address, port], group)
        several = len({host for host, *_ in addresses}) > 1
        every = (
            Process(rank, host, address, None if several and address.startswith("127.") else port)
            for rank, (host, address, port) in enumerate(addresses)
        )
        return cls(group.rank(), tuple(every), tuple(pipeline))

    def named(self, ranks: Iterable[int]) -> str:
        """Processes in words, host by host: ``processes 0-3 (alpha), 4-7 (beta)``; for many hosts only their number."""
        by_place: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by_place.setdefault(self.every[rank].place, []).append(rank)
        named = [rank for there in by_place.values() for rank in there]
        word = "process" if len(named) == 1 else "processes"
        if len(by_place) > _MOST_HOSTS:
            return f"{word} {numbers(named)} on {len(by_place)} hosts"
        return f"{word} " + ", ".join(f"{numbers(there)} ({place})" for place, there in by_place.items())

    def missing(self, ranks: Iterable[int]) -> str:
        """Ask these processes, and name those that do not answer; or, if all do, those that do not wait for others."""
        if not (others := self._others(ranks)):
            return ""
        answers = ask(others)
        if absent := self._absent(answers):
            return absent
        busy = [
            f"process {rank} does not wait: {answer[0]}"
            for rank, answer in answers.items()
            if isinstance(answer, tuple) and not answer[1]
        ]
        return "; ".join([f"reachable: {self.named(answers)}", *busy[:_MOST_QUOTED]])

    def absent(self) -> str:
        """Ask all processes of the run (in a large one those of this pipeline), and name those that do not answer."""
        few = len(self.every) <= _MOST_ASKED
        return self._absent(ask(self._others(range(len(self.every)) if few else self.pipeline)))

    def _others(self, ranks: Iterable[int]) -> list[Process]:
        return [self.every[rank] for rank in ranks if rank != self.own and self.every[rank].port is not None]

    def _absent(self, answers: Mapping[int, Presence | Absence]) -> str:
        return "; ".join(
            f"{absence.value}: {self.named(ranks)}"
            for absence in Absence
            if (ranks := [rank for rank, answer in answers.items() if answer is absence])
        )


def numbers(ranks: Iterable[int]) -> str:
    """Ranks in words, consecutive ones as one run: ``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def listen() -> socket.socket:
    """A listening socket at the address by which this host reaches MASTER_ADDR, where all processes met."""
    address = _LOOPBACK
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(
            os.environ.get("MASTER_ADDR", _LOOPBACK), 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            # Nothing is sent: this only makes the system choose the route.
            probe.connect(target)
            address = probe.getsockname()[0]
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def answer(listener: socket.socket, presence: Callable[[], Presence]) -> None:
    """Answer queries until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(json.dumps(presence()).encode())


def ask(processes: Sequence[Process]) -> dict[int, Presence | Absence]:
    """Every process's answer by rank, all asked at once; takes four seconds at most for a few hundred."""
    with ThreadPoolExecutor(min(len(processes), _MOST_THREADS)) as threads:
        return dict(zip([process.rank for process in processes], threads.map(_asked, processes), strict=True))


def _asked(process: Process) -> Presence | Absence:
    absence = Absence.UNREACHABLE
    try:
        with socket.create_connection((process.address, process.port), _LIMIT_S) as connection:
            absence = Absence.SILENT
            where, waits = json.loads(connection.makefile().read())
            return where, waits
    except (ConnectionRefusedError, ConnectionResetError, ValueError):
        # The last where the connection was closed without an answer.
        return Absence.ENDED
    except OSError:
        return absence
