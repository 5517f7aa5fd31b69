"""What `penstock generate` shows while answers grow, and what it writes when all are there."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock import schedule
from penstock.cli.answer_text import AnswerText
from penstock.cli.answers_file import AnswersFile
from penstock.cli.commands import print_json
from penstock.cli.generate import GenerateArguments
from penstock.cli.progress import LineProgress
from penstock.cli.prompts import Prompt
from penstock.engine.generator import GenerateOptions, GenerateResult
from penstock.engine.saved_model import SavedModel
from penstock.settings import SamplingParams


@dataclass(frozen=True)
class Job:
    """What one call is to generate, read and found possible."""

    model: SavedModel
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: GenerateOptions


class InTurn:
    """Prints texts that grow at the same time one after another: the first as it comes, others once it has ended."""

    def __init__(self, headings: Sequence[str]) -> None:
        self._waiting = list(headings)
        self._ended = [False] * len(headings)
        self._current = 0

    def add(self, number: int, text: str, ended: bool) -> None:
        """`text` is new in the text of that number, and the last of it where that has `ended`."""
        self._waiting[number] += text + ("\n" if ended else "")
        self._ended[number] = ended
        while self._current < len(self._waiting):
            print(self._waiting[self._current], end="", flush=True)
            self._waiting[self._current] = ""
            if not self._ended[self._current]:
                return
            self._current += 1


class Teller:
    """On the rank of the first stage: hears of every token, and tells the user.

    On the command line answers are printed as they grow; with a file or as JSON only how many have ended is shown. To
    a file each is written as soon as it has ended, as JSON all when they are there. A silent one only hears, and
    decides what ends.
    """

    def __init__(
        self,
        arguments: GenerateArguments,
        job: Job,
        file: AnswersFile | None,
        silent: bool = False,
    ) -> None:
        self._arguments, self._file, self._silent = arguments, file, silent
        self._prompts, self._params = job.prompts, job.params
        num_answers = len(job.prompts) * job.params.num_samples
        self._texts = [AnswerText(job.model.tokenizer, arguments.stop) for _ in range(num_answers)]
        self._num_tokens = [0] * num_answers
        self._num_kept = self._num_ended = 0 if file is None else len(file.kept)
        self._in_turn = self._progress = None
        if silent:
            return
        if arguments.output is None and not arguments.json:
            self._in_turn = InTurn([self._heading(number, num_answers) for number in range(num_answers)])
        else:
            self._progress = LineProgress(
                num_answers, self._num_kept, sys.stderr if arguments.json else sys.stdout, "answer"
            )

    def hear(self, number: int, token: int) -> bool:
        """Of an answer's next token; whether a stop string has come, which ends it."""
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
        return text.stopped

    def take(self, number: int, answer: schedule.Sequence) -> None:
        """Write an answer that has ended, once its last token has been heard."""
        if self._file is not None:
            self._file.write(self._described(number, answer))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def end(self, result: GenerateResult) -> None:
        """Write the answers, and say what they took."""
        if self._silent:
            return
        if self._file is not None:
            self._file.publish()
        if self._arguments.json:
            content: dict[str, Any] = {"resumed_from": self._num_kept}
            if self._file is None:
                content = {"answers": [self._described(number, answer) for number, answer in enumerate(result)]}
            print_json({"model": str(self._arguments.model), **content, **_figures(result)})
        elif self._file is not None:
            kept = f" ({self._num_kept} of them there already)" if self._num_kept else ""
            print(
                f"{len(result)} answers{kept}, {result.num_tokens:,} tokens, {result.tokens_per_s:,.0f} tokens/s, "
                f"idle {result.idle_share:.1%}; "
                f"wrote {self._arguments.output}"
            )

    def _heading(self, number: int, num_answers: int) -> str:
        """The prompt, as it goes over into the answer; above each where there are several."""
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
            "log_probs": _plain(answer.log_probs),
            "ending": answer.ending and answer.ending.value,
        }
        if answer.raw_log_probs is not None:
            described["raw_log_probs"] = _plain(answer.raw_log_probs)
        return described


def _figures(result: GenerateResult) -> dict[str, Any]:
    return {
        "num_tokens": result.num_tokens,
        "time_s": result.wall_s,
        "tokens_per_s": result.tokens_per_s,
        "idle_share": result.idle_share,
    }


def _plain(values: Sequence[float]) -> list[float | None]:
    """As many digits as fp32 has, and None for infinity, which JSON does not have."""
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in values]
