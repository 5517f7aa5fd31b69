"""Ranks as threads of one process that run one at a time, each until it has to wait: the same way for the same seed."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_HANGING_S = 540.0
"""Far longer than any case: only a wait that `Turns` knows nothing of takes as long."""


class Deadlock(AssertionError):
    """No rank can go on; the text says for each what it waits for."""


class OthersFailed(Exception):  # no error of this rank
    """Another rank has failed, so this one cannot go on."""


@dataclass(eq=False)
class Task:
    """A thread of a rank: its main one, or one that the package has started."""

    rank: int
    name: str
    #: True if the package has started it
    is_helper: bool
    #: opened when it is this thread's turn
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    #: true once the thread can go on; None while it can
    ready: Callable[[], bool] | None = None
    #: says what it waits for
    where: Callable[[], str] = str
    #: the operation it waits for
    awaited: object = None
    is_done: bool = False


class Turns:
    """Gives one thread at a time its turn.

    advance: called when none can go on; False if it cannot help. helpers_last: threads that ranks have started go on
    only where nothing else helps.
    """

    #: chooses who goes on
    random: Random
    #: all threads, those that have ended too
    tasks: list[Task]
    #: the first error of any rank
    failure: BaseException | None
    #: rank -> makes the calling thread one of that rank's, for torch.distributed
    enter: dict[int, Callable[[], None]]

    def __init__(self, random: Random, advance: Callable[[], bool], helpers_last: bool = False) -> None:
        self.random, self._advance, self._helpers_last = random, advance, helpers_last
        self.tasks, self.failure, self.enter = [], None, {}
        self._own, self._ended = threading.local(), threading.Event()

    @property
    def task(self) -> Task:
        """The thread whose turn it is."""
        return self._own.task

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function a rank, each in a thread, and return their results.

        Raises: the first error of any rank; `Deadlock` when no rank can go on.
        """
        results: dict[int, T] = {}
        for rank, function in enumerate(functions):
            self.start(rank, f"rank {rank}", lambda rank=rank, function=function: results.update({rank: function()}))
        self._pass_on()
        if not self._ended.wait(_HANGING_S):
            raise Deadlock(f"a thread waits outside of turns: {self.describe()}")
        if self.failure is not None:
            raise self.failure
        return [results[rank] for rank in range(len(functions))]

    def start(self, rank: int, name: str, work: Callable[[], None], is_helper: bool = False) -> Task:
        """Start a thread; it waits for its turn."""
        task = Task(rank, name, is_helper)
        self.tasks.append(task)
        threading.Thread(target=self._run, args=(task, work), name=name, daemon=True).start()
        return task

    def _run(self, task: Task, work: Callable[[], None]) -> None:
        self._own.task = task
        task.gate.acquire()
        try:
            if self.failure is None:
                torch.set_num_threads(1)
                work()
        except OthersFailed:
            pass
        except BaseException as error:  # whatever ends a rank ends all
            self.failure = self.failure or error
        finally:
            task.is_done = True
            self._pass_on()

    def wait(self, ready: Callable[[], bool], where: Callable[[], str], awaited: object = None) -> None:
        """Let others go on until `ready` is true. Raises: OthersFailed, Deadlock."""
        task = self.task
        if not ready():
            task.ready, task.where, task.awaited = ready, where, awaited
            self._pass_on()
            task.gate.acquire()
            task.ready, task.awaited = None, None
        if self.failure is not None:
            raise OthersFailed

    def describe(self) -> str:
        """What each thread that has not ended waits for."""
        return "; ".join(f"{task.name} {task.where()}" for task in self.tasks if not task.is_done)

    def _able(self, live: Sequence[Task], with_helpers: bool = False) -> list[Task]:
        able = [task for task in live if self.failure or task.ready is None or task.ready()]
        if self._helpers_last and not with_helpers and not self.failure:
            return [task for task in able if not task.is_helper]
        return able

    def _pass_on(self) -> None:
        """Open the gate of a thread that can go on."""
        live = [task for task in self.tasks if not task.is_done]
        if not live:
            self._ended.set()
            return
        while not (able := self._able(live)):
            try:
                if not self._advance():
                    able = self._able(live, with_helpers=True)
                    self.failure = None if able else Deadlock(f"no rank can go on: {self.describe()}")
            except Exception as error:
                self.failure = error
            if able:
                break
        self.random.choice(able).gate.release()


class ThreadInTurn:
    """Stands for `threading.Thread` in the package's modules."""

    def __init__(self, turns: Turns, target: Callable[..., None], args: Sequence[Any] = (), name: str = "") -> None:
        self._turns, self._work, self._name = turns, lambda: target(*args), name
        self._task: Task | None = None

    def start(self) -> None:
        rank = self._turns.task.rank

        def work() -> None:
            self._turns.enter[rank]()
            self._work()

        self._task = self._turns.start(rank, f"{self._name} on rank {rank}", work, is_helper=True)

    def join(self) -> None:
        task = self._task
        assert task is not None
        self._turns.wait(lambda: task.is_done, lambda: f"waits for the end of {task.name}")


class QueueInTurn(Generic[T]):
    """Stands for `queue.SimpleQueue` in the package's modules."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._items = turns, deque[T]()

    def put(self, item: T) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self) -> T:
        self._turns.wait(lambda: bool(self._items), lambda: "waits for another thread of its own")
        if not self._items:
            raise queue.Empty
        return self._items.popleft()
