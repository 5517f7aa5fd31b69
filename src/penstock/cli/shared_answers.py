"""Prompts that several pipelines share: each makes its answers, and one process shows or writes all of them."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock import schedule
from penstock.cli.generate_output import AnswerReporter, AnswersFile, GenerateJob
from penstock.cli.pipelines import Pipelines
from penstock.engine.answers import GenerateResult
from penstock.schedule import Ending, Token

# How often answers of other pipelines are looked for while this one computes, and how often afterwards.
_EVERY_S, _POLL_S = 0.2, 0.02


def others_answers(job: GenerateJob, pipelines: Pipelines) -> frozenset[int]:
    """The numbers of the answers that other pipelines make.

    Samples of a prompt stay together, so that it is read once, unless that would leave pipelines without work.
    """
    samples = job.params.num_samples
    together = samples if len(job.prompts) >= pipelines.count else 1
    numbers = range(len(job.prompts) * samples)
    return frozenset(number for number in numbers if number // together % pipelines.count != pipelines.index)


class AnswerSender:
    """Hands a pipeline's answers over to the first pipeline's process that reports them."""

    #: all pipelines, of which this is one
    _pipelines: Pipelines
    #: the names of this pipeline's messages, the next one first
    _names: Iterator[str]

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines, self._names = pipelines, _names(pipelines.index)

    def on_token(self, number: int, token: int) -> None:
        """Wait for the whole answer."""

    def on_answer(self, number: int, answer: schedule.Sequence) -> None:
        """Hand an answer over."""
        assert answer.ending is not None
        self._pipelines.hand_over(next(self._names), {"answer": [number, answer.generated, answer.ending.value]})

    def end(self, result: GenerateResult) -> None:
        """Hand over what the answers took."""
        figures = [result.wall_s, result.busy_s, result.num_forwards, result.num_rounds]
        self._pipelines.hand_over(next(self._names), {"figures": figures})

    def close(self) -> None:
        """Nothing is left open."""


class AnswerCollector:
    """Reports the answers of this pipeline and those that the others hand over."""

    #: shows and writes answers
    _reporter: AnswerReporter
    #: all pipelines, of which this is the first
    _pipelines: Pipelines
    #: pipeline -> the names of its messages, the next one first
    _names: dict[int, Iterator[str]]
    #: pipeline -> the name of the message that comes next; without those whose figures have come
    _awaited: dict[int, str]
    #: all sequences, by number; those of other pipelines get their answers here
    _sequences: list[schedule.Sequence]
    #: the figures of other pipelines
    _figures: list[Any]
    #: when messages were last looked for, in seconds
    _looked_s: float

    def __init__(self, job: GenerateJob, file: AnswersFile | None, pipelines: Pipelines) -> None:
        self._reporter, self._pipelines = AnswerReporter(job, file), pipelines
        self._names = {index: _names(index) for index in range(1, pipelines.count)}
        self._awaited = {index: next(names) for index, names in self._names.items()}
        self._sequences = schedule.Sequence.all_of([p.tokens for p in job.prompts], [job.params] * len(job.prompts))
        self._figures, self._looked_s = [], 0.0

    def on_token(self, number: int, token: int) -> None:
        """Show a token, and now and then look for answers of other pipelines."""
        self._reporter.hear(number, token)
        if self._awaited and time.monotonic() - self._looked_s > _EVERY_S:
            self._look()

    def on_answer(self, number: int, answer: schedule.Sequence) -> None:
        """Write an answer."""
        self._reporter.take(number, answer)

    def end(self, result: GenerateResult) -> None:
        """Wait for the other pipelines, and report all answers."""
        while self._awaited:
            self._look()
            time.sleep(_POLL_S)
        self._reporter.close()
        merged = zip(self._sequences, result, strict=True)
        result = replace(result, sequences=tuple(theirs if theirs.ending else own for theirs, own in merged))
        for wall_s, busy_s, num_forwards, num_rounds in self._figures:
            result = replace(
                result,
                wall_s=max(result.wall_s, wall_s),
                busy_s=(*result.busy_s, *busy_s),
                num_forwards=(*result.num_forwards, *num_forwards),
                num_rounds=max(result.num_rounds, num_rounds),
            )
        self._reporter.end(result)

    def close(self) -> None:
        """Leave the terminal in order."""
        self._reporter.close()

    def _look(self) -> None:
        for index in list(self._awaited):
            while index in self._awaited and self._pipelines.has(self._awaited[index]):
                self._take(index, self._pipelines.receive(self._awaited[index], f"answer from pipeline {index}"))
        self._looked_s = time.monotonic()

    def _take(self, index: int, message: dict[str, Any]) -> None:
        if "figures" in message:
            self._figures.append(message["figures"])
            del self._awaited[index]
            return
        self._awaited[index] = next(self._names[index])
        number, generated, ending = message["answer"]
        answer = self._sequences[number]
        for fields in generated:
            token = Token(*fields)
            answer.generated.append(token._replace(likeliest=tuple((n, x) for n, x in token.likeliest)))
            self._reporter.hear(number, token.id)
        answer.ending = Ending(ending)
        self._reporter.take(number, answer)


def _names(index: int) -> Iterator[str]:
    """The names of a pipeline's messages."""
    return (f"answers/{index}/{number}" for number in itertools.count())
