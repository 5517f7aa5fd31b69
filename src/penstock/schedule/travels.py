"""Collectives as they were recorded: under way from when to when, and how long a rank could not go on without them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import Any


class CollectiveKind(StrEnum):
    """What ranks do together, as the trace tells it apart; `SEND_RECEIVE` is a step round a ring."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND_RECEIVE = "send-receive"
    GRADIENTS = "gradient reduction"


@dataclass(frozen=True, slots=True)
class Travel:
    """One collective, under way from `launch` to `end`; its rank could not go on without it from `wait` to `taken`.

    The latter two are None where nobody waited.
    """

    kind: CollectiveKind
    num_bytes: int
    launch: float
    end: float
    wait: float | None = None
    taken: float | None = None

    @property
    def exposed(self) -> float:
        """How long the rank waited for it."""
        return 0.0 if self.wait is None or self.taken is None else self.taken - self.wait

    @property
    def hidden(self) -> float:
        """How long it was under way while the rank did something else."""
        return max(0.0, self.end - self.launch - self.exposed)


@dataclass(frozen=True, slots=True)
class Travelled:
    """All collectives of one kind of one rank: how many, how large, for how long waited for and for how long not."""

    number: int = 0
    num_bytes: int = 0
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Of the time under way; 1 where nothing was."""
        whole = self.exposed + self.hidden
        return self.hidden / whole if whole else 1.0


def travelled(kind: CollectiveKind, travels: Iterable[Travel]) -> Travelled:
    own = [travel for travel in travels if travel.kind is kind]
    return Travelled(len(own), sum(t.num_bytes for t in own), sum(t.exposed for t in own), sum(t.hidden for t in own))


def waits_inside(stretches: Iterable[tuple[float, float]], travels: Iterable[Travel]) -> float:
    """How long a rank waited for collectives within stretches of its time, given as (start, end)."""
    waits = sorted((travel.wait, travel.exposed) for travel in travels if travel.wait is not None)
    starts = [start for start, _ in waits]
    sums = [0.0, *accumulate(exposed for _, exposed in waits)]
    return sum(sums[bisect_left(starts, end)] - sums[bisect_left(starts, start)] for start, end in stretches)


def travel_row(travel: Travel) -> list[Any]:
    times = (travel.launch, travel.end, travel.wait, travel.taken)
    return [str(travel.kind), travel.num_bytes, *(None if time is None else round(time, 6) for time in times)]


def travel_from_row(row: Sequence[Any], origin: float = 0.0) -> Travel:
    """The collective of a packed row, whose times are counted from `origin`.

    Raises: ValueError naming the row if it is none.
    """
    try:
        kind, num_bytes, *times = row
        launch, end, wait, taken = (None if time is None else float(time) - origin for time in times)
        known = CollectiveKind(kind), int(num_bytes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{row!r} is no recorded collective: {error}") from None
    waited = [] if wait is None or taken is None else [(launch, wait), (wait, taken)]
    for one, other in [(launch, end), *waited]:
        if one is None or other is None or not one <= other < inf:
            raise ValueError(f"{row!r} is no recorded collective: its times must be numbers in order")
    assert launch is not None and end is not None
    return Travel(*known, launch, end, wait, taken)
