"""Requests that come while a model generates: a bounded queue between the threads that ask and the one that computes.

Any thread submits and cancels; the rank of the first stage admits between two batches what has come. Text and tokens
go out as they are made, all that one batch has given in one call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock import schedule
from penstock.data.tokenizer import TokenizationError
from penstock.engine.generation.answers import AnswerText, Decodes
from penstock.model import check_callable
from penstock.runtime.recovery import Alarm
from penstock.runtime.transport import default_store
from penstock.schedule import Ending, Scheduler, Token
from penstock.settings import Layout, SamplingParams

# ---- A user's functions that are called while answers are generated, on the rank of the first stage


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

    def report(self, scheduler: Scheduler, texts: Mapping[int, AnswerText], grown: Iterable[schedule.Sequence]) -> None:
        """Report new tokens, and sequences that they have ended; stop those that a listener or a stop string ends.

        texts: number of a sequence with stop strings -> its text, up to the first of them.
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
    """Lets ranks that share layers interrupt after the same round: one of them asks, and all act on its answer.

    Each of them decides every batch for itself, so they must end after the same one; the first writes its answer to the
    store where the processes met, and may already be a round ahead.
    """

    #: the user's function, on the rank that asks; None where the answer is read
    ask: Interrupt | None
    #: the number of this generation, the same on these ranks and on no others
    number: int
    #: rings when the rank that asks may not answer any more
    alarm: Alarm
    #: rounds so far
    _round: int = 0

    @property
    def _key(self) -> str:
        """The place of the newest answer: after which round, and 1 to interrupt."""
        return f"penstock/interrupts/{self.number}"

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
        """Take the answer out of the store, once all of these ranks have ended; the rank that asks does so."""
        if self.ask is not None:
            default_store().delete_key(self._key)


# ---- Requests that come while a model generates


_IDLE_S = 1.0
"""Seconds without work after which the ranks hear from each other: a peer that has died is then found."""


class QueueError(RuntimeError):
    """A queue takes no more requests, now or at all; the message says why."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One new token of an answer, with the text that can be shown from now on; the last one bears the ending.

    Where that is NOT_FINITE, token and text mean nothing. failure: why the tokenizer cannot write the answer's text.
    """

    number: int
    token: Token
    text: str
    ending: Ending | None
    failure: str | None = None


@dataclass(eq=False)
class RequestQueue:
    """The requests of one generation that does not end before it is closed."""

    #: answers that are computed at the same time, and those that may wait beside them
    num_rows: int
    max_waiting: int
    #: makes text of tokens; None leaves texts empty
    tokenizer: Decodes | None
    #: called with what the answers have grown by, in the thread that computes; it must return soon
    publish: Callable[[list[TokenDelta]], object]
    #: held to read or change what follows, and notified when something has come
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    #: sequences that no batch has heard of yet, and numbers of those that are to end
    _submitted: list[schedule.Sequence] = field(default_factory=list, init=False)
    _stopped: list[int] = field(default_factory=list, init=False)
    #: number -> its text so far, for each unfinished answer
    _texts: dict[int, AnswerText] = field(default_factory=dict, init=False)
    #: the numbers of the next sequence and of the next prompt
    _next_sequence: int = field(default=0, init=False)
    _next_prompt: int = field(default=0, init=False)
    #: why no requests are taken; None while they are
    _closed: str | None = field(default=None, init=False)
    #: answers that had a row when the last batch was made
    _num_running: int = field(default=0, init=False)

    @property
    def max_unfinished(self) -> int:
        """Answers that may be waiting or running."""
        return self.num_rows + self.max_waiting

    # ---- in any thread

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[int]:
        """Ask for answers to checked prompts; returns their numbers, by prompt and sample.

        The answers are those of a generation of these prompts alone, whatever else is computed.

        Raises:
            QueueError: too many answers are waiting, or no requests are taken any more.
        """
        of_each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        sequences = schedule.Sequence.all_of(prompts, of_each)
        with self._changed:
            if self._closed is not None:
                raise QueueError(self._closed)
            if len(self._texts) + len(sequences) > self.max_unfinished:
                raise QueueError(f"{len(self._texts)} answers are waiting or running, as many as there may be")
            first, prompt = self._next_sequence, self._next_prompt
            self._next_sequence, self._next_prompt = first + len(sequences), prompt + len(prompts)
            taken = [
                replace(sequence, number=first + sequence.number, prompt=prompt + sequence.prompt)
                for sequence in sequences
            ]
            self._submitted += taken
            self._texts |= {sequence.number: AnswerText(self.tokenizer, sequence.params.stop) for sequence in taken}
            self._changed.notify()
        return [sequence.number for sequence in taken]

    def cancel(self, numbers: Iterable[int]) -> None:
        """End these answers, if they have not ended yet; nothing more is published of them."""
        with self._changed:
            for number in numbers:
                if self._texts.pop(number, None) is not None:
                    self._stopped.append(number)
            self._changed.notify()

    def close(self, reason: str) -> None:
        """Take no more requests; the generation ends once it has answered those that it has."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    @property
    def counts(self) -> tuple[int, int]:
        """Answers that wait, and answers that have a row of the KV cache."""
        with self._changed:
            running = min(self._num_running, len(self._texts))
            return len(self._texts) - running, running

    # ---- in the thread that computes

    def admit(self, scheduler: Scheduler) -> bool:
        """Pass on what has come since the last batch; waits a while if nothing is left to compute.

        Returns whether requests may still come.
        """
        with self._changed:
            if scheduler.is_idle and not self._submitted and self._closed is None:
                self._changed.wait(_IDLE_S)
            submitted, self._submitted = self._submitted, []
            stopped, self._stopped = self._stopped, []
            scheduler.add(submitted)
            scheduler.stop(stopped)
            self._num_running = scheduler.num_running
            return self._closed is None

    def report(self, grown: Iterable[schedule.Sequence]) -> None:
        """Publish new tokens with their text, and end answers that hold one of their stop strings."""
        deltas: list[TokenDelta] = []
        with self._changed:
            for sequence in grown:
                if (text := self._texts.get(sequence.number)) is None:
                    continue
                token, ending = sequence.generated[-1], sequence.ending
                shown, failure = "", None
                try:
                    shown = text.add(token.id)
                    if text.stopped and ending not in (Ending.STOPPED, Ending.NOT_FINITE):
                        ending = Ending.STOPPED
                        self._stopped.append(sequence.number)
                    shown += "" if ending is None else text.finish()
                except TokenizationError as error:
                    failure = str(error)
                    if ending is None:
                        ending = Ending.STOPPED
                        self._stopped.append(sequence.number)
                if ending is not None:
                    del self._texts[sequence.number]
                deltas.append(TokenDelta(sequence.number, token, shown, ending, failure))
        if deltas:
            self.publish(deltas)
