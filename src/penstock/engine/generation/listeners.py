"""A user's functions that are called while answers are generated, on the rank of the first stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock import schedule
from penstock.engine.generation.answers import AnswerText
from penstock.model import check_callable
from penstock.runtime.recovery import Alarm
from penstock.runtime.transport import default_store
from penstock.schedule import Ending, Scheduler
from penstock.settings import Layout

_ASK_AGAIN_S = 0.0005

OnToken = Callable[[int, int], object]
OnAnswer = Callable[[int, schedule.Sequence], object]
Interrupt = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Listeners:
    """The functions that a user gives to `Engine.generate`, which explains them."""

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

    def report(self, scheduler: Scheduler, texts: Mapping[int, AnswerText], grown: Iterable[schedule.Sequence]) -> None:
        """Call the listeners with new tokens and finished answers; stop sequences that they or a stop string end.

        texts: sequence number -> its text, for sequences with stop strings.
        """
        for sequence in grown:
            if sequence.ending is Ending.NOT_FINITE:
                continue
            text = texts.get(sequence.number)
            if text is not None:
                text.add(sequence.last_token)
                if text.stopped:
                    scheduler.stop([sequence.number])
            if self.on_token is not None and self.on_token(sequence.number, sequence.last_token):
                scheduler.stop([sequence.number])
            if self.on_answer is not None and sequence.ending is not None:
                self.on_answer(sequence.number, sequence)


@dataclass(eq=False)
class AgreedInterrupt:
    """Interrupts ranks that share layers after the same round: one of them asks the user, and all act on the answer.

    Each of these ranks schedules for itself, so all must end after the same batch. The rank that asks writes the answer
    to the store where the processes met, and may already be a round ahead.
    """

    #: the user's function, on the rank that asks; None on ranks that read the answer
    ask: Interrupt | None
    #: number of this generation, which these ranks share with no others
    generation_number: int
    #: rings when the rank that asks may not answer any more
    alarm: Alarm
    #: rounds so far
    _round: int = 0

    @property
    def _key(self) -> str:
        """The key of the newest answer: its round, and 1 to interrupt."""
        return f"penstock/interrupts/{self.generation_number}"

    def __call__(self) -> bool:
        """Ask after a round, or wait for the answer. Raises: StepError if another rank has failed."""
        self._round += 1
        if self.ask is not None:
            interrupts = bool(self.ask())
            default_store().set(self._key, f"{self._round} {int(interrupts)}")
            return interrupts
        while True:
            if default_store().check([self._key]):
                newest, interrupts = map(int, default_store().get(self._key).split())
                # Had the answer to an earlier round been yes, there would be no later one.
                if newest >= self._round:
                    return newest == self._round and bool(interrupts)
            self.alarm.check()
            time.sleep(_ASK_AGAIN_S)

    def forget(self) -> None:
        """Delete the answer from the store, on the rank that asks, once all of these ranks have ended."""
        if self.ask is not None:
            default_store().delete_key(self._key)
