"""The work of `penstock score`: batches of texts, shared out among pipelines, and one process that writes all lines."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, TextIO

from torch import Tensor

from penstock.cli.pipelines import Pipelines
from penstock.cli.progress import LineProgress
from penstock.cli.score_file import Rated, Scored, ScoreFile, Summary
from penstock.cli.texts import Text
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine.engine import Engine
from penstock.engine.saved_model import SavedModel
from penstock.engine.scorer import PerToken, PostHook, token_scores

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

    model: SavedModel
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
