"""Lets every thread of a process wait at random where threads and processes meet; see tools/loaded.py.

Python imports this module at its start where its folder is on the path.
"""

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

LONGEST_S = 0.05
#: of a thread's time, spent waiting in calls: more would only measure how many calls its work takes
MOST_WAITED = 0.5


class Share(threading.local):
    """How much of a thread's time it has waited in calls; each thread has its own values."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.waited = 0.0

    @property
    def is_left(self) -> bool:
        """Whether the thread may wait more."""
        return self.waited <= MOST_WAITED * (time.monotonic() - self.start)


class Delays:
    """Waits at random, by seed: a process has a sequence of its own, by its rank where it has one."""

    #: the chance of a wait
    chance: float
    #: given by the user
    _seed: int
    #: draws moments and lengths, shared by all threads
    _random: random.Random

    def __init__(self, seed: int, chance: float) -> None:
        self.chance, self._seed = chance, seed
        self._random = random.Random(f"{seed} {os.environ.get('RANK', '')} {sys.argv[:1]}")
        os.register_at_fork(after_in_child=self._renew)

    def wait(self) -> float:
        """Wait, or not; returns the seconds waited."""
        if self._random.random() >= self.chance:
            return 0.0
        seconds = self._random.uniform(0.0, LONGEST_S)
        time.sleep(seconds)
        return seconds

    def around(self, owner: Any, name: str) -> None:
        """Wait at random before and after each call of a function."""
        inner: Callable[..., Any] = getattr(owner, name)

        def delayed(*args: Any, **named: Any) -> Any:
            self.wait()
            result = inner(*args, **named)
            self.wait()
            return result

        setattr(owner, name, delayed)

    def _renew(self) -> None:
        self._random = random.Random(f"{self._seed} {os.getpid()}")


def install(delays: Delays) -> None:
    """Put the waits where threads hand something over, and into all that our own threads call.

    The main thread is left its speed between the two.
    """
    ours = f"{os.sep}penstock{os.sep}"
    share = Share()

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return") and ours in frame.f_code.co_filename and share.is_left:
            share.waited += delays.wait()

    threading.setprofile(on_call)
    for owner, name in (
        (threading.Thread, "start"),
        (threading.Thread, "join"),
        (threading.Event, "set"),
        (threading.Condition, "notify"),
        (queue.Queue, "put"),
        (queue.Queue, "get"),
    ):
        delays.around(owner, name)


if given := os.environ.get("PENSTOCK_DELAYS"):
    seed, chance = given.split(":")
    install(Delays(int(seed), float(chance)))
