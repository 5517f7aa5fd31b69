"""Lanes: one microbatch's forward or backward through one stage, as a generator.

A lane computes, launches a collective, yields, and waits for the collective when it is resumed. Draining one lane is
an ordinary forward or backward. Zipping a forward lane with a backward lane of another microbatch is the combined
1F1B: while one waits for its collective the other computes. The order of resumption is fixed by the lanes themselves,
never by timing, so every process issues its collectives in the same order.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.model import Lane, Turn

T = TypeVar("T")


def drain(lane: Lane[T]) -> T:
    """Run one lane to its end and return its result."""
    while True:
        try:
            next(lane)
        except StopIteration as stop:
            return stop.value


def zip_lanes(*lanes: Lane[Any]) -> list[Any]:
    """Resume the lanes in turn until all have ended; return their results in the order given.

    A lane that ends early leaves the turns to the others, so lanes of different length may be zipped.
    """
    results: list[Any] = [None] * len(lanes)
    running = dict(enumerate(lanes))
    while running:
        for i, lane in list(running.items()):
            try:
                next(lane)
            except StopIteration as stop:
                results[i] = stop.value
                del running[i]
    return results


@dataclass
class EarlyRelease:
    """Lanes that do not pause before they let go of what they keep; `owes_turn` while such a pause is due later."""

    owes_turn: bool = False

    def at_once(self, lane: Lane[T]) -> Lane[T]:
        """The lane without those pauses."""
        while True:
            try:
                why = next(lane)
            except StopIteration as stop:
                return stop.value
            if why is Turn.RELEASE_WAITS:
                self.owes_turn = True
            else:
                yield why
