"""Requests that come while a model generates: a bounded queue between the threads that ask and the one that computes.

Any thread submits and cancels; the rank of the first stage admits between two batches what has come. Text and tokens
go out as they are made, all that one batch has given in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock import schedule
from penstock.data.tokenizer import TokenizationError
from penstock.engine.generation.answers import AnswerText, Decodes
from penstock.schedule import Ending, Scheduler, Token
from penstock.settings import SamplingParams

_IDLE_S = 1.0
"""Seconds without work after which the ranks hear from each other: a peer that has died is then found."""


class QueueError(RuntimeError):
    """A queue takes no more requests, now or at all; the message says why."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One new token of an answer with the text that it completes; the last token bears the ending.

    With the ending NOT_FINITE token and text mean nothing. failure: why the tokenizer cannot write the text.
    """

    number: int
    token: Token
    text: str
    ending: Ending | None
    failure: str | None = None


@dataclass(eq=False)
class RequestQueue:
    """The requests of one generation, which goes on until the queue is closed."""

    #: answers that are computed at the same time, and answers that may wait
    num_rows: int
    max_waiting: int
    #: makes text of tokens; None leaves texts empty
    tokenizer: Decodes | None
    #: called with new tokens in the thread that computes; it must return soon
    publish: Callable[[list[TokenDelta]], object]
    #: guards the attributes below; notified of requests and cancellations
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    #: sequences and cancelled numbers that the scheduler does not have yet
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

        Raises: QueueError if too many answers are waiting, or the queue is closed.
        """
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        sequences = schedule.Sequence.all_of(prompts, params)
        with self._changed:
            if self._closed is not None:
                raise QueueError(self._closed)
            if len(self._texts) + len(sequences) > self.max_unfinished:
                raise QueueError(f"{len(self._texts)} answers are waiting or running, as many as there may be")
            first, prompt = self._next_sequence, self._next_prompt
            self._next_sequence, self._next_prompt = first + len(sequences), prompt + len(prompts)
            numbered = [
                replace(sequence, number=first + sequence.number, prompt=prompt + sequence.prompt)
                for sequence in sequences
            ]
            self._submitted += numbered
            self._texts |= {sequence.number: AnswerText(self.tokenizer, sequence.params.stop) for sequence in numbered}
            self._changed.notify()
        return [sequence.number for sequence in numbered]

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
        """Number of answers that wait, and of answers that have a row of the KV cache."""
        with self._changed:
            running = min(self._num_running, len(self._texts))
            return len(self._texts) - running, running

    # ---- in the thread that computes

    def admit(self, scheduler: Scheduler) -> bool:
        """Give the scheduler new requests and cancellations; waits a while if it is idle. True if more may come."""
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
