"""The work of `penstock score`: batches of texts, shared out among pipelines, and one process that writes all lines."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TextIO

from torch import Tensor

from penstock.cli.commands import Unfinished, plain_number
from penstock.cli.processes.session import Pipelines
from penstock.cli.progress import LineProgress
from penstock.cli.texts import Text
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.data.examples import rated_place
from penstock.engine.engine import Engine
from penstock.engine.folders.model_folder import ModelFolder
from penstock.engine.training.scorer import PerToken, PostHook, token_scores

# ---- The file that `penstock score` writes, line by line, and its summary


@dataclass(frozen=True)
class Scored:
    """A line of the file: the scored tokens with their log-probabilities."""

    line: int
    id: Any
    tokens: Sequence[int]
    log_probs: Sequence[float | None]

    @classmethod
    def of(cls, text: Text, by_token: Sequence[float]) -> Self:
        """Make a line from the log-probability of each token's successor; the last token has none."""
        first = len(text.tokens) - text.num_scored
        return cls(text.line, text.id, text.tokens[first:], [plain_number(value) for value in by_token[first - 1 : -1]])

    @property
    def content(self) -> dict[str, Any]:
        """The line as an object of JSON; without scored tokens the perplexity is None."""
        total = _total(self.log_probs)
        return {
            "line": self.line,
            **({} if self.id is None else {"id": self.id}),
            "tokens": list(self.tokens),
            "log_probs": list(self.log_probs),
            "log_prob": total,
            "perplexity": _perplexity(total, len(self.tokens)),
        }


@dataclass(frozen=True)
class Rated:
    """A line of the file: what the head of a reward model, of another classifier or of a value model gives.

    `ratings` is a number for each label; for a model that rates tokens a list of such for each token.
    """

    line: int
    id: Any
    ratings: Sequence[Any]

    @classmethod
    def of(cls, text: Text, by_token: Sequence[Sequence[float]], model: ModelFolder) -> Self:
        """Make a line from the head's outputs for each token.

        Source: transformers' sequence classification, which rates a text by its last token that is no padding.
        """
        ratings = [[plain_number(value) for value in labels] for labels in by_token]
        if model.rates == "tokens":
            return cls(text.line, text.id, ratings)
        return cls(text.line, text.id, ratings[rated_place(text.tokens, model.pad_token)])

    @property
    def content(self) -> dict[str, Any]:
        """The line as an object of JSON."""
        found: dict[str, Any] = {"line": self.line, **({} if self.id is None else {"id": self.id})}
        if self.ratings and isinstance(self.ratings[0], list):
            single = len(self.ratings[0]) == 1
            return found | {"values": [labels[0] if single else labels for labels in self.ratings]}
        return found | ({"reward": self.ratings[0]} if len(self.ratings) == 1 else {"rewards": list(self.ratings)})


@dataclass(frozen=True)
class Summary:
    """Totals of all lines; `resumed_from` lines were there already, and `tokens_per_s` is that of this call.

    `num_rated` lines are those of a classifier, whose tokens have no log-probabilities; `mean_reward` is that of one
    with one label for each text.
    """

    num_lines: int
    num_scored_tokens: int
    log_prob: float | None
    perplexity: float | None
    num_rated: int
    mean_reward: float | None
    resumed_from: int
    time_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ScoreFile:
    """The lines written so far; a call with the same `digest` continues after them.

    `ends` are the numbers of lines at which batches end: a batch that a killed call left incomplete is scored again.

    Raises: ValueError if the file cannot be written, or another call is writing it.
    """

    #: lines written so far
    num_lines: int
    #: tokens in them, and the sum of their scores; None once that is unknown
    _num_tokens: int
    _total: float | None
    #: lines that a classifier has rated, and each text's reward, where it gives one
    _num_rated: int
    _rewards: list[float]
    #: the file until it is complete
    _unfinished: Unfinished

    def __init__(self, path: Path, digest: str, ends: Sequence[int]) -> None:
        self._unfinished = Unfinished(path, digest)
        self.num_lines = self._num_tokens = self._num_rated = 0
        self._total, self._rewards = 0.0, []
        self._take_up(ends)

    def write(self, lines: Sequence[Scored | Rated]) -> None:
        """Append lines, through to the disk."""
        contents = [line.content for line in lines]
        texts = [json.dumps(content, ensure_ascii=False, allow_nan=False) for content in contents]
        self._unfinished.append(texts, to_disk=True)
        for content in contents:
            self._count(content)

    def publish(self) -> None:
        """Give the file its name.

        Raises: ValueError if a file of that name exists by now; the lines stay in the hidden file.
        """
        self._unfinished.publish()

    def summary(self, resumed_from: int, num_tokens: int, time_s: float) -> Summary:
        return Summary(
            num_lines=self.num_lines,
            num_scored_tokens=self._num_tokens,
            log_prob=self._total,
            perplexity=_perplexity(self._total, self._num_tokens),
            num_rated=self._num_rated,
            mean_reward=round(math.fsum(self._rewards) / len(self._rewards), 7) if self._rewards else None,
            resumed_from=resumed_from,
            time_s=time_s,
            tokens_per_s=num_tokens / time_s,
        )

    def _take_up(self, ends: Sequence[int]) -> None:
        lines = self._unfinished.lines(_is_scored)
        kept = lines[: max((end for end in ends if end <= len(lines)), default=0)]
        for line in kept:
            self._count(json.loads(line))
        self._unfinished.keep(kept)

    def _count(self, content: Mapping[str, Any]) -> None:
        log_probs = content.get("log_probs", ())
        total = _total(log_probs)
        self._total = None if total is None or self._total is None else self._total + total
        self._num_tokens += len(log_probs)
        self._num_rated += "log_probs" not in content
        if content.get("reward") is not None:
            self._rewards.append(content["reward"])
        self.num_lines += 1


def _is_scored(line: Any) -> bool:
    if not isinstance(line, dict):
        return False
    log_probs = line.get("log_probs")
    if isinstance(log_probs, list):
        return all(isinstance(value, float | int | None) for value in log_probs)
    return isinstance(line.get("reward", ""), float | int | None) or not {"rewards", "values"}.isdisjoint(line)


def _total(log_probs: Sequence[float | None]) -> float | None:
    known = [value for value in log_probs if value is not None]
    return round(math.fsum(known), 7) if len(known) == len(log_probs) else None


def _perplexity(total: float | None, num_tokens: int) -> float | None:
    if total is None or num_tokens == 0 or -total / num_tokens > 700:
        return None
    return float(f"{math.exp(-total / num_tokens):.8g}")


# ---- The work of `penstock score`: batches of texts, shared out among pipelines, and one process that writes all lines


MICROBATCH_TOKENS = 2048
"""Enough tokens for a microbatch to be worth its overhead, and few enough that its logits stay small."""

NOT_A_NUMBER = "are not numbers: a weight or an activation is NaN or infinite, so nothing can be scored"
"""The end of the sentence on scores that are NaN."""

# A batch is written at once, and is the most that is lost when the command is stopped. Batches and microbatches do not
# depend on the number of stages or pipelines, so neither does any bit of the file.
_MICROBATCHES = 8


@dataclass(frozen=True)
class ScoreJob:
    """The checked input of one call."""

    model: ModelFolder
    texts: Sequence[Text]
    max_tokens: int
    cp: int = 1

    @property
    def batches(self) -> list[Sequence[Text]]:
        return _batches(self.texts, self.max_tokens * _MICROBATCHES)

    @property
    def spec(self) -> MicroBatchSpec:
        """Microbatches of a batch; under context parallelism as few as `max_tokens` allows."""
        num = _MICROBATCHES if self.cp == 1 else None
        return MicroBatchSpec(num=num, max_tokens=self.max_tokens, allow_fewer=True)


@dataclass(frozen=True)
class Scoring:
    """One process's part of a call.

    delivers: whether it hands over its pipeline's results. file: where it writes the results of all pipelines; None
    on all processes but one. first: number of lines that were there already.
    """

    engine: Engine
    job: ScoreJob
    pipelines: Pipelines
    delivers: bool
    file: ScoreFile | None
    first: int

    def run(self, temperature: float, progress_file: TextIO) -> Summary | None:
        """Score the remaining texts, batch by batch; returns the summary on the process that writes the file."""
        start_s, num_tokens = time.perf_counter(), 0
        batches, progress = self.job.batches, None
        hook = token_scores(temperature) if self.job.model.rates is None else PerToken(_ratings)
        if self.file is not None:
            progress = LineProgress(len(self.job.texts), self.first, progress_file)
        for number, (batch, end) in enumerate(zip(batches, accumulate(map(len, batches)), strict=True)):
            if end <= self.first:
                continue
            lines = self._lines(number, batch, hook)
            if self.file is not None and progress is not None:
                self.file.write(lines)
                batch_tokens = sum(len(text.tokens) for text in batch)
                num_tokens += batch_tokens
                progress.update(end, batch_tokens)
        if self.file is None or progress is None:
            return None
        progress.close()
        return self.file.summary(self.first, num_tokens, time.perf_counter() - start_s)

    def _lines(self, number: int, batch: Sequence[Text], hook: PostHook) -> list[Scored | Rated]:
        """Compute this process's part of a batch; returns the batch's lines on the process that writes them.

        Raises: ValueError where the model gives no numbers.
        """
        if number % self.pipelines.count != self.pipelines.index:
            return [] if self.file is None else self._received(number)
        items = self.engine.forward(_packed(batch), hook, list, micro_batches=self.job.spec)
        if not self.delivers:
            return []
        for text, item in zip(batch, items, strict=True):
            # An infinite one can be true: a token may be impossible.
            if any(values.isnan().any() for values in item.values()):
                raise ValueError(f"the scores of line {text.line} {NOT_A_NUMBER}")
        lines = [self._line(text, item) for text, item in zip(batch, items, strict=True)]
        if self.file is None:
            self.pipelines.hand_over(str(number), [asdict(line) for line in lines])
        return lines

    def _line(self, text: Text, item: dict[str, Tensor]) -> Scored | Rated:
        if self.job.model.rates is None:
            return Scored.of(text, item["log_probs"].tolist())
        return Rated.of(text, item["ratings"].tolist(), self.job.model)

    def _received(self, number: int) -> list[Scored | Rated]:
        """A batch's lines from the pipeline that scores them. Raises: PipelineError if they do not come in time."""
        whose = f"scores of batch {number} from pipeline {number % self.pipelines.count}"
        kind = Scored if self.job.model.rates is None else Rated
        return [kind(**line) for line in self.pipelines.receive(str(number), whose)]


def _ratings(output_TL: Any, microbatch: PackedBatch) -> dict[str, Tensor]:
    """A hook for a classifier: the outputs of its head for each of T tokens and L labels."""
    return {"ratings": output_TL.float()}


def _batches(texts: Sequence[Text], num_tokens: int) -> list[Sequence[Text]]:
    """Cut the texts, in order, into parts of about `num_tokens` tokens."""
    parts, start, size = [], 0, 0
    for end, text in enumerate(texts, 1):
        size += len(text.tokens)
        if size >= num_tokens or end == len(texts):
            parts.append(texts[start:end])
            start, size = end, 0
    return parts


def _packed(texts: Sequence[Text]) -> PackedBatch:
    """Pack tokens, with each scored token as the label of the one before it."""
    labels = []
    for text in texts:
        first = len(text.tokens) - text.num_scored
        labels.append([NO_LABEL] * (first - 1) + list(text.tokens[first:]) + [NO_LABEL])
    return PackedBatch.from_sequences({"tokens": [list(text.tokens) for text in texts], "labels": labels})
