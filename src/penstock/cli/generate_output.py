"""The answers of `penstock generate`: their texts as they grow, the file that keeps them, and what the user sees."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import schedule
from penstock.cli.commands import print_json
from penstock.cli.generate_arguments import GenerateArguments
from penstock.cli.progress import LineProgress
from penstock.cli.prompts import Prompt
from penstock.cli.unfinished import Unfinished, unfinished_of
from penstock.data.tokenizer import Tokenizer
from penstock.engine.generator import GenerateOptions, GenerateResult
from penstock.engine.saved_model import SavedModel
from penstock.settings import SamplingParams

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than this, so one that is broken shows after so many.
_MAX_HELD_TOKENS = 8


class AnswerText:
    """The text of one answer, token by token.

    tokenizer: None where there is none; the text is empty then. stop: texts of which the first to come ends the
    answer; it does not belong to it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        # Tokens are decoded in their context, from the last place at which text and tokens were seen to end together.
        self._begin = self._end = 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take one more token; gives what can be shown now and could not before."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._end])
        now = self._tokenizer.decode(self._tokens[self._begin :])
        held = len(self._tokens) - self._end
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and held < _MAX_HELD_TOKENS):
            return ""
        self.text += now[len(before) :]
        self._begin, self._end = self._end, len(self._tokens)
        self._cut()
        return self._show(0 if self.stopped else self._num_doubtful())

    def finish(self) -> str:
        """The answer has ended; gives what was held back."""
        if self._tokenizer is not None and not self.stopped:
            before = self._tokenizer.decode(self._tokens[self._begin : self._end])
            self.text += self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
            self._cut()
        return self._show(0)

    def _cut(self) -> None:
        found = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _num_doubtful(self) -> int:
        """Characters at the end that may turn out to begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, num_held: int) -> str:
        shown, self._shown = self._shown, max(self._shown, len(self.text) - num_held)
        return self.text[shown : self._shown]


class AnswersFile:
    """The answers that are there so far, by their number among all; a call of the same `digest` makes the others.

    fresh: drop what calls that were stopped have left, whatever they were to answer.

    Raises: ValueError if the file can not be written, or what a stopped call has left answers something else.
    """

    def __init__(self, path: Path, digest: str, num_samples: int, fresh: bool = False) -> None:
        self._num_samples = num_samples
        if fresh:
            for left in unfinished_of(path):
                left.unlink()
        self._unfinished = Unfinished(path, digest)
        others = [left for left in unfinished_of(path) if left != self._unfinished.hidden]
        if others:
            if not self._unfinished.lines():
                self._unfinished.hidden.unlink()
            raise ValueError(
                f"{others[0]} holds answers of a stopped call with another model, other prompts or other settings; "
                "repeat that call to finish it, give another --output, or --fresh to drop them"
            )
        whole = self._unfinished.lines()
        self._unfinished.keep(whole)
        self._lines = {self._number(json.loads(line)): line for line in whole}

    @property
    def kept(self) -> list[int]:
        """The numbers of the answers that are there."""
        return sorted(self._lines)

    def write(self, answer: Mapping[str, Any]) -> None:
        """Add an answer; it outlives the process from here on."""
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False)
        self._unfinished.append([line], to_disk=False)
        self._lines[self._number(answer)] = line.encode() + b"\n"

    def close(self) -> None:
        """Let another call go on with it."""
        self._unfinished.close()

    def publish(self) -> None:
        """Give the file its name, and the answers the order of their prompts.

        Raises: ValueError if a file of that name has come into being meanwhile.
        """
        self._unfinished.publish([self._lines[number] for number in self.kept])

    def _number(self, answer: Mapping[str, Any]) -> int:
        return answer["prompt"] * self._num_samples + answer["sample"]


@dataclass(frozen=True)
class GenerateJob:
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


class AnswerReporter:
    """On the rank of the first stage: hears of every token, and tells the user.

    On the command line answers are printed as they grow; with a file or as JSON only how many have ended is shown. To
    a file each is written as soon as it has ended, as JSON all when they are there. A silent one only hears, and
    decides what ends.
    """

    def __init__(
        self,
        arguments: GenerateArguments,
        job: GenerateJob,
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
