"""Collectives as the trace sees them: launched, needed, had, done."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.futures import Future

from penstock.model.collectives import Work
from penstock.runtime.errors import TransportError, first_line
from penstock.schedule.recording import CollectiveKind


@dataclass(slots=True)
class Travel:
    """One collective of this rank; times in nanoseconds of the host's monotonic clock, 0 while not reached.

    `launch_ns` is when it had been launched, `wait_ns` when the rank could not go on without it, `taken_ns` when it
    went on. `end_ns` is when the collective was done, which some backends tell by themselves; of others it is known
    only that it was done when it was taken. On a GPU all of them are times of the host, which does not wait. `ranks`
    are the global ranks that take part, where they are known.
    """

    kind: CollectiveKind
    num_bytes: int
    launch_ns: int
    ranks: tuple[int, ...] = ()
    wait_ns: int = 0
    taken_ns: int = 0
    end_ns: int = 0

    def __str__(self) -> str:
        ago_s = (time.perf_counter_ns() - self.launch_ns) * 1e-9
        return f"the {self.kind} of {self.num_bytes} bytes that it launched {ago_s:.1f} s ago"


class FollowedWork:
    """A work whose wait and end are noted.

    Args:
        work: as the backend gave it.
        travel: where times are noted.
        awaiting: told what the rank waits for, and None when it goes on.
    """

    def __init__(self, work: Work, travel: Travel, awaiting: Callable[[Travel | None], None]) -> None:
        self._work, self._travel, self._awaiting = work, travel, awaiting
        future = _future(work)
        if future is not None:
            future.add_done_callback(partial(_ended, travel))

    def wait(self) -> None:
        """Raises TransportError when the collective does not end in time; the message says which it was."""
        travel = self._travel
        travel.wait_ns = time.perf_counter_ns()
        self._awaiting(travel)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"the {travel.kind} failed ({first_line(error)})") from error
        travel.taken_ns = time.perf_counter_ns()
        self._awaiting(None)
        if not travel.end_ns:
            travel.end_ns = travel.taken_ns


def _ended(travel: Travel, future: object) -> None:
    # Called by a thread of the backend, perhaps after the rank has gone on.
    if not travel.end_ns:
        travel.end_ns = time.perf_counter_ns()


def _future(work: Work) -> Future | None:  # pyright: ignore[reportMissingTypeArgument]
    """What tells when a work is done, though nobody waits for it; None where the backend has no such thing.

    Not on a GPU, where works count as done as soon as they are enqueued.
    """
    if torch.cuda.is_available() or not hasattr(work, "get_future"):
        return None
    try:
        return work.get_future()  # type: ignore[attr-defined]
    except RuntimeError:
        return None
