"""Lanes: one microbatch's forward or backward through one stage, as a generator.

A lane computes, launches a collective, yields, and waits for the collective when it is resumed. Draining one lane is
an ordinary forward or backward. Zipping a forward lane with a backward lane of another microbatch is the combined
1F1B: while one waits for its collective the other computes. The order of resumption is fixed by the lanes themselves,
never by timing, so every process issues its collectives in the same order.

The same driver serves any generator that is resumed step by step to its result.
"""

import enum
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

Yielded = TypeVar("Yielded")
Result = TypeVar("Result")


class Turn(enum.Enum):
    """The reason why a lane yields, if it is not merely that a collective was launched."""

    #: Nothing was launched, but weight gradients can wait; see `Compute.apart`.
    WEIGHTS_WAIT = "weights wait"
    #: Once the collective just launched has arrived, the lane frees most of what it keeps;
    #: see `Exchange.before_release`.
    RELEASE_WAITS = "release waits"


Lane = Generator[Turn | None, None, Result]


class Driven(Generic[Yielded, Result]):
    """A lane to iterate over, turn by turn.

    Args:
        lane: the generator.
        context: makes the context in which the lane runs; it is left while the lane is suspended, since other lanes
            run then.
    """

    __slots__ = ("_context", "_lane", "result")

    #: The lane's result, once the iteration has ended.
    result: Result
    #: The lane, and the context in which each of its turns runs.
    _lane: Generator[Yielded, None, Result]
    _context: Callable[[], AbstractContextManager[object]] | None

    def __init__(
        self,
        lane: Generator[Yielded, None, Result],
        context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._lane, self._context = lane, context

    def __iter__(self) -> "Driven[Yielded, Result]":
        return self

    def __next__(self) -> Yielded:
        with _NO_CONTEXT if self._context is None else self._context():
            try:
                return next(self._lane)
            except StopIteration as stop:
                self.result = stop.value
        raise StopIteration(self.result)


_NO_CONTEXT = nullcontext()


def drain(lane: Generator[Any, None, Result]) -> Result:
    """Run one lane to its end and return its result."""
    try:
        while True:
            next(lane)
    except StopIteration as stop:
        return stop.value


def zip_lanes(*lanes: Lane[Any]) -> list[Any]:
    """Resume the lanes in turn until all have ended; return their results in the order given.

    A lane that ends early leaves its turns to the others, so lanes of different lengths may be zipped.
    """
    driven = [Driven(lane) for lane in lanes]
    running = deque(driven)
    while running:
        lane = running.popleft()
        if next(lane, _ENDED) is not _ENDED:
            running.append(lane)
    return [lane.result for lane in driven]


_ENDED = object()
