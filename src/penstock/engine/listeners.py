"""A user's functions that are called while answers are generated, on the rank of the first stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import schedule
from penstock.engine.answer_text import AnswerText
from penstock.engine.batch_checks import check_callable
from penstock.runtime.distributed import default_store
from penstock.runtime.recovery import Alarm
from penstock.schedule import Ending, Scheduler
from penstock.settings import Layout

NOT_FINITE = "are not finite: a weight or an activation is NaN or infinite, so no token can be drawn"
"""The end of the sentence on logits of which no token can be drawn."""

_ASK_AGAIN_S = 0.0005

OnToken = Callable[[int, int], object]
OnAnswer = Callable[[int, schedule.Sequence], object]
Interrupt = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Listeners:
    """A user's functions, called during a generation; see `Generator.generate`."""

    on_token: OnToken | None = None
    on_answer: OnAnswer | None = None
    interrupt: Interrupt | None = None

    def check(self, layout: Layout) -> None:
        """Refuse what cannot be called. Raises: ValueError."""
        check_callable("on_token", self.on_token, "number, token", optional=True)
        check_callable("on_answer", self.on_answer, "number, answer", optional=True)
        check_callable("interrupt", self.interrupt, "", optional=True)
        if self.interrupt is not None and layout.ep > 1:
            raise ValueError(
                f"{layout}: a generation cannot be interrupted where pipelines share experts, since they compute "
                "together and one of them may have ended; layouts with ep = 1 can"
            )


@dataclass(frozen=True, eq=False)
class Told:
    """Calls a user's functions on the rank of the first stage."""

    #: decides what is computed; stopped when a listener wants it
    scheduler: Scheduler
    #: on_token: if it returns true, the sequence ends
    listeners: Listeners
    #: number of a sequence with stop strings -> its text, up to the first of them
    stops: Mapping[int, AnswerText]

    def hear(self, grown: list[schedule.Sequence]) -> None:
        """Report new tokens, and sequences that they have ended.

        Raises: ValueError for a token of logits that are not finite.
        """
        on_token, on_answer = self.listeners.on_token, self.listeners.on_answer
        for sequence in grown:
            if sequence.ending is Ending.NOT_FINITE:
                raise ValueError(f"the logits of sequence {sequence.number} {NOT_FINITE}")
            text = self.stops.get(sequence.number)
            if text is not None:
                text.add(sequence.last_token)
                if text.stopped:
                    self.scheduler.stop([sequence.number])
            if on_token is not None and on_token(sequence.number, sequence.last_token):
                self.scheduler.stop([sequence.number])
            if on_answer is not None and sequence.ending is not None:
                on_answer(sequence.number, sequence)


class AgreedInterrupt:
    """Lets ranks that share layers interrupt after the same round: one of them asks, and all act on its answer.

    Each of them decides every batch for itself, so they must end after the same one; the first writes its answer to the
    store where the processes met, and may already be a round ahead.

    Args:
        ask: the user's function, on the rank that asks; None on the others.
        number: of this generation, the same on these ranks and on no others.
        alarm: rings when another rank has failed.
    """

    #: the user's function; None where the answer is read
    _ask: Interrupt | None
    #: the place of the newest answer: after which round, and 1 to interrupt
    _key: str
    #: rings when the rank that asks may not answer any more
    _alarm: Alarm
    #: rounds so far
    _round: int

    def __init__(self, ask: Interrupt | None, number: int, alarm: Alarm) -> None:
        self._ask, self._key, self._alarm, self._round = ask, f"penstock/interrupts/{number}", alarm, 0

    def __call__(self) -> bool:
        """Ask after a round, or wait for the answer. Raises: StepError if another rank has failed."""
        self._round += 1
        if self._ask is not None:
            interrupts = bool(self._ask())
            default_store().set(self._key, f"{self._round} {int(interrupts)}")
            return interrupts
        while True:
            newest, interrupts = self._read()
            # Had the answer to an earlier round been yes, there would be no later one.
            if newest >= self._round:
                return newest == self._round and interrupts
            self._alarm.check()
            time.sleep(_ASK_AGAIN_S)

    def forget(self) -> None:
        """Take the answer out of the store, once all of these ranks have ended; the rank that asks does so."""
        if self._ask is not None:
            default_store().delete_key(self._key)

    def _read(self) -> tuple[int, bool]:
        store = default_store()
        if not store.check([self._key]):
            return 0, False
        number, interrupts = store.get(self._key).split()
        return int(number), bool(int(interrupts))
