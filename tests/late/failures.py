"""Steps that fail while every rank's threads wait at random, by the hundred: the orders in which ranks hear and cut.

One engine of real processes takes step after step, each of which fails on a rank and at a place drawn by chance. The
announcement, the thread that hears it and the cut wait for a few milliseconds, or not. Where a step takes longer than
`SLOW_S`, each rank keeps the stacks of all of its threads.
"""

from __future__ import annotations

import faulthandler
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from penstock import MicroBatchSpec
from penstock.parallel import renewable
from penstock.runtime import Recovery, StepError, recovery
from tests.dist.launch import run_ranks
from tests.dist.test_failing_steps import CASES, KINDS, NUM_MICROBATCHES, batch_of, break_step

SLOW_S = 3.0
_LONGEST_WAIT_S = 0.03
# Beyond what is slow, and short enough that one who waits for it costs the campaign little.
_LIMIT_S = 15.0


@dataclass(frozen=True)
class Slow:
    """A failed step that took long on a rank, how it ended there, and the stacks of that rank's threads meanwhile."""

    step: int
    seconds: float
    ending: str
    stacks: str

    def __str__(self) -> str:
        return f"step {self.step} took {self.seconds:.1f} s: {self.ending}\n{self.stacks}"


def campaign(case: int, num_failures: int, seed: int) -> list[list[Slow]]:
    """By rank, the failed steps that took long, of so many of a case of tests/dist/test_failing_steps.py."""
    size = CASES[case].layout.world_size
    return run_ranks(size, _fail, case, num_failures, seed, timeout_s=30.0 + num_failures * _LIMIT_S)


def _fail(rank: int, case: int, num_failures: int, seed: int) -> list[Slow]:
    engine, drawn = CASES[case].engine(_LIMIT_S), random.Random(seed)
    found = []
    with _waiting(random.Random(f"{seed} {rank}")), tempfile.TemporaryFile("w+") as stacks:
        for step in range(num_failures):
            failing, place = drawn.randrange(CASES[case].layout.world_size), drawn.randrange(1000)
            kind = drawn.choice(KINDS)
            mend = break_step(engine, place, kind, []) if rank == failing else lambda: None
            stacks.seek(0)
            stacks.truncate()
            faulthandler.dump_traceback_later(SLOW_S, file=stacks)
            start, ending = time.monotonic(), "no rank failed"
            try:
                engine.train_batch(batch_of(step, engine.grid.dp_rank), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
            except StepError as error:
                ending = f"{error}, here {error.__cause__!r}"
            seconds = time.monotonic() - start
            faulthandler.cancel_dump_traceback_later()
            mend()
            if seconds > SLOW_S or ending == "no rank failed":
                stacks.seek(0)
                found.append(Slow(step, seconds, ending, stacks.read()))
            engine.train_batch(batch_of(step, engine.grid.dp_rank), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    engine.close()
    return found


@contextmanager
def _waiting(drawn: random.Random) -> Iterator[None]:
    """Within this context, whatever ends a failed step waits at random before and after it acts."""

    def around(owner: Any, name: str) -> mock._patch[Any]:
        act = getattr(owner, name)

        def delayed(*given: Any) -> Any:
            _wait(drawn)
            try:
                return act(*given)
            finally:
                _wait(drawn)

        return mock.patch.object(owner, name, delayed)

    with ExitStack() as stack:
        for owner, name in (
            (Recovery, "_hear"),
            (Recovery, "_announce"),
            (recovery, "cut_off"),
            (renewable, "cut_backends"),
        ):
            stack.enter_context(around(owner, name))
        yield


def _wait(drawn: random.Random) -> None:
    if drawn.random() < 0.5:
        time.sleep(drawn.uniform(0.0, _LONGEST_WAIT_S))
