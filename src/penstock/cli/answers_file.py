"""Prompts that several pipelines share: each makes its answers, and one process shows or writes all of them."""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock import schedule
from penstock.cli.commands import Unfinished, plain_number, print_json, unfinished_of
from penstock.cli.processes.session import Pipelines
from penstock.cli.progress import LineProgress
from penstock.cli.texts import Prompt
from penstock.engine.folders.model_folder import ModelFolder
from penstock.engine.generation.answers import AnswerText, GenerateOptions, GenerateResult
from penstock.schedule import Ending, Token
from penstock.settings import SamplingParams

# ---- The answers of `penstock generate`: their texts as they grow, the file that keeps them, and the output shown


class AnswersFile:
    """The answers written so far, by their number; a call with the same `digest` makes the others.

    fresh: drop the answers of stopped calls, whatever their input was.

    Raises: ValueError if the file cannot be written, or the answers of a stopped call belong to other input.
    """

    #: answers to each prompt
    _num_samples: int
    #: the file until it is complete
    _unfinished: Unfinished
    #: answer's number -> its line
    _lines: dict[int, bytes]

    def __init__(self, path: Path, digest: str, num_samples: int, fresh: bool = False) -> None:
        self._num_samples = num_samples
        if fresh:
            for left in unfinished_of(path):
                left.unlink()
        self._unfinished = Unfinished(path, digest)
        others = [left for left in unfinished_of(path) if left != self._unfinished.hidden]
        if others:
            if not self._unfinished.lines(self._is_answer):
                self._unfinished.hidden.unlink()
            raise ValueError(
                f"{others[0]} holds answers of a stopped call with another model, other prompts or other settings; "
                "repeat that call to finish it, give another --output, or --fresh to drop them"
            )
        whole = self._unfinished.lines(self._is_answer)
        self._unfinished.keep(whole)
        self._lines = {self._number(json.loads(line)): line for line in whole}

    @property
    def kept(self) -> list[int]:
        """The numbers of the answers written so far."""
        return sorted(self._lines)

    def write(self, answer: Mapping[str, Any]) -> None:
        """Add an answer; from here on it survives the process."""
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False)
        self._unfinished.append([line], to_disk=False)
        self._lines[self._number(answer)] = line.encode() + b"\n"

    def close(self) -> None:
        """Let another call continue the file."""
        self._unfinished.close()

    def publish(self) -> None:
        """Give the file its name, and the answers the order of their prompts.

        Raises: ValueError if a file of that name exists by now.
        """
        self._unfinished.publish([self._lines[number] for number in self.kept])

    def _is_answer(self, line: Any) -> bool:
        prompt, sample = (line.get("prompt"), line.get("sample")) if isinstance(line, dict) else (None, None)
        return type(prompt) is int and type(sample) is int and prompt >= 0 and 0 <= sample < self._num_samples

    def _number(self, answer: Mapping[str, Any]) -> int:
        return answer["prompt"] * self._num_samples + answer["sample"]


@dataclass(frozen=True)
class GenerateJob:
    """The checked input of one call, and the destination of its answers: a file, JSON, or the terminal."""

    model: ModelFolder
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: GenerateOptions
    output: Path | None = None
    as_json: bool = False


class InTurn:
    """Prints concurrently growing texts one after another: the first as it grows, the others in turn."""

    #: text -> what of it is not printed yet, from its heading on
    _waiting: list[str]
    #: text -> True once it has ended
    _ended: list[bool]
    #: the text that is printed as it grows
    _current: int

    def __init__(self, headings: Sequence[str]) -> None:
        self._waiting = list(headings)
        self._ended = [False] * len(headings)
        self._current = 0

    def add(self, number: int, text: str, ended: bool) -> None:
        """Append to the text of that number; `ended` marks its last part."""
        self._waiting[number] += text + ("\n" if ended else "")
        self._ended[number] = ended
        while self._current < len(self._waiting):
            print(self._waiting[self._current], end="", flush=True)
            self._waiting[self._current] = ""
            if not self._ended[self._current]:
                return
            self._current += 1


class AnswerReporter:
    """Receives every token on one rank, and shows the answers to the user.

    In the terminal, answers are printed as they grow; otherwise only the number of ended answers is shown. A file gets
    each answer as soon as it has ended, JSON output gets all of them at the end.
    """

    #: the call, with its prompts and parameters
    _job: GenerateJob
    _prompts: Sequence[Prompt]
    _params: SamplingParams
    #: where answers are written; None if they are only shown
    _file: AnswersFile | None
    #: answer -> its text and its number of tokens
    _texts: list[AnswerText]
    _num_tokens: list[int]
    #: answers of an earlier call, and all that have ended
    _num_kept: int
    _num_ended: int
    #: shows texts, or how many answers are done; None where the other does
    _in_turn: InTurn | None
    _progress: LineProgress | None

    def __init__(self, job: GenerateJob, file: AnswersFile | None) -> None:
        self._job, self._file = job, file
        self._prompts, self._params = job.prompts, job.params
        num_answers = len(job.prompts) * job.params.num_samples
        self._texts = [AnswerText(job.model.tokenizer, job.params.stop) for _ in range(num_answers)]
        self._num_tokens = [0] * num_answers
        self._num_kept = self._num_ended = 0 if file is None else len(file.kept)
        self._in_turn = self._progress = None
        if job.output is None and not job.as_json:
            self._in_turn = InTurn([self._heading(number, num_answers) for number in range(num_answers)])
        else:
            self._progress = LineProgress(
                num_answers, self._num_kept, sys.stderr if job.as_json else sys.stdout, "answer"
            )

    def hear(self, number: int, token: int) -> None:
        """Add an answer's next token."""
        text = self._texts[number]
        self._num_tokens[number] += 1
        new = text.add(token)
        ended = token in self._params.end_tokens or self._num_tokens[number] == self._params.max_new_tokens
        if ended or text.stopped:
            new += text.finish()
            self._num_ended += 1
        if self._in_turn is not None:
            self._in_turn.add(number, new, ended or text.stopped)
        if self._progress is not None:
            self._progress.update(self._num_ended, 1)

    def take(self, number: int, answer: schedule.Sequence) -> None:
        """Write an answer that has ended; `hear` has had its last token."""
        if self._file is not None:
            self._file.write(self._described(number, answer))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def end(self, result: GenerateResult) -> None:
        """Write or print the answers, and report the speed."""
        if self._file is not None:
            self._file.publish()
        if self._job.as_json:
            content: dict[str, Any] = {"resumed_from": self._num_kept}
            if self._file is None:
                content = {"answers": [self._described(number, answer) for number, answer in enumerate(result)]}
            print_json({"model": str(self._job.model.folder), **content, **_figures(result)})
        elif self._file is not None:
            kept = f" ({self._num_kept} of them there already)" if self._num_kept else ""
            print(
                f"{len(result)} answers{kept}, {result.num_tokens:,} tokens, {result.tokens_per_s:,.0f} tokens/s, "
                f"idle {result.idle_share:.1%}; "
                f"wrote {self._job.output}"
            )

    def _heading(self, number: int, num_answers: int) -> str:
        """The prompt, which the answer follows; with several answers, below a line that names it."""
        prompt, sample = divmod(number, self._params.num_samples)
        text = self._prompts[prompt].text or ""
        if num_answers == 1:
            return text
        of_samples = f", sample {sample}" if self._params.num_samples > 1 else ""
        return f"{'' if number == 0 else chr(10)}--- prompt {prompt}{of_samples} ---\n{text}"

    def _described(self, number: int, answer: schedule.Sequence) -> dict[str, Any]:
        prompt = self._prompts[answer.prompt]
        described: dict[str, Any] = {"prompt": answer.prompt, "sample": answer.sample}
        if prompt.line is not None:
            described["line"] = prompt.line
        if prompt.id is not None:
            described["id"] = prompt.id
        described |= {
            "text": self._texts[number].text,
            "tokens": list(answer.tokens),
            "log_probs": [plain_number(value) for value in answer.log_probs],
            "ending": answer.ending and answer.ending.value,
        }
        if answer.raw_log_probs is not None:
            described["raw_log_probs"] = [plain_number(value) for value in answer.raw_log_probs]
        if answer.top_log_probs is not None:
            described["top_log_probs"] = [
                [[token, plain_number(value)] for token, value in likeliest] for likeliest in answer.top_log_probs
            ]
        return described


def _figures(result: GenerateResult) -> dict[str, Any]:
    return {
        "num_tokens": result.num_tokens,
        "time_s": result.wall_s,
        "tokens_per_s": result.tokens_per_s,
        "idle_share": result.idle_share,
    }


# ---- Prompts that several pipelines share: each makes its answers, and one process shows or writes all of them


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
