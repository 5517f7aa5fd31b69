"""One worker of `penstock score`: its stage of the model over its pipeline's texts; one writes what comes out."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.launch import Group, agree
from penstock.cli.progress import LineProgress
from penstock.cli.score_arguments import ScoreArguments
from penstock.cli.score_file import Pipelines, Scored, ScoreFile, Summary
from penstock.cli.texts import Text, read_texts
from penstock.cli.together import choose_device, initialise, refuse_differing, together, work_together
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch, split
from penstock.engine.engine import Engine
from penstock.engine.saved_model import SavedModel, open_model
from penstock.engine.scorer import PostHook, token_scores
from penstock.parallel import cut_sequences
from penstock.runtime import Watchdog
from penstock.settings import ParallelConfig

# Enough for a microbatch to be worth its overhead, and few enough that its logits stay small.
_MICROBATCH_TOKENS = 2048
# What is written at once, and lost at most when the command is stopped. Batches and microbatches do not depend on the
# number of stages or pipelines, so neither does a bit of the file.
_MICROBATCHES = 8


@dataclass(frozen=True)
class ScoreJob:
    """What one call is to score, read and found possible."""

    model: SavedModel
    texts: Sequence[Text]
    max_tokens: int
    cp: int = 1

    @property
    def batches(self) -> list[Sequence[Text]]:
        return _batches(self.texts, self.max_tokens * _MICROBATCHES)

    @property
    def spec(self) -> MicroBatchSpec:
        """Ranks that share each text (cp) share the more easily the more tokens there are."""
        num = _MICROBATCHES if self.cp == 1 else None
        return MicroBatchSpec(num=num, max_tokens=self.max_tokens, allow_fewer=True)


def check(arguments: ScoreArguments) -> ScoreJob:
    """Read model settings and texts.

    Raises: ValueError for what can not be scored.
    """
    model = open_model(arguments.model, arguments.native)
    if arguments.pp > model.num_units:
        raise ValueError(
            f"--pp {arguments.pp} asks for {arguments.pp} stages, but {model.folder} has {model.num_units} units "
            f"to cut from, so at most {model.num_units} are possible"
        )
    texts = read_texts(arguments.file, model, arguments.text_field)
    longest = max(texts, key=lambda text: len(text.tokens))
    if arguments.max_tokens is not None and len(longest.tokens) > arguments.max_tokens:
        raise ValueError(
            f"{arguments.file}, line {longest.line}: has {len(longest.tokens)} tokens, more than --max-tokens "
            f"{arguments.max_tokens}; no text is cut, so give at least that"
        )
    job = ScoreJob(model, texts, arguments.max_tokens or max(_MICROBATCH_TOKENS, len(longest.tokens)), arguments.cp)
    if arguments.cp > 1:
        for microbatch in (part for batch in job.batches for part in split(_packed(batch), job.spec).microbatches):
            cut_sequences(microbatch.sequence_lengths("tokens"), arguments.cp)
    return job


def run_worker(arguments: ScoreArguments, group: Group) -> int:
    """Score as one process of `group`; returns the exit code."""
    return work_together(
        group, arguments.num_threads, arguments.timeout_s, lambda store: _score(arguments, group, store)
    )


def _score(arguments: ScoreArguments, group: Group, store: Store) -> None:
    job = together(store, group, "texts", lambda: check(arguments))
    digest = _digest(job.texts)
    refuse_differing(store, group, "scoring", {**arguments.decisive, "texts": digest, "max_tokens": job.max_tokens})
    device = choose_device(store, group, arguments.device)
    pipelines = Pipelines.of(store, group, arguments.dp, arguments.timeout_s)
    initialise(*pipelines.world(group), device, arguments.timeout_s)
    parallel = ParallelConfig(
        pp=arguments.pp,
        cp=arguments.cp,
        tp=arguments.tp,
        device=device,
        num_threads=arguments.num_threads,
        timeout_s=arguments.timeout_s,
    )
    engine = Engine(*job.model.arguments(parallel))
    version = job.model.load(engine)
    what = [str(job.model.folder.resolve()), version, digest, job.max_tokens, arguments.decisive]
    ends = list(accumulate(map(len, job.batches)))
    watchdog = Watchdog.of_run(engine.recorder, arguments.timeout_s, engine.grid.control, engine.grid.pp_ranks)
    # Ranks that share the last stage have the same results.
    tells = engine.pipeline.gives_results and (engine.grid.tp_rank, engine.grid.cp_rank) == (0, 0)
    try:
        writes = tells and pipelines.index == 0
        file = together(
            store, group, "file", lambda: ScoreFile(arguments.output, _digest(what), ends) if writes else None
        )
        told = agree(store, group, "lines", {"num": 0 if file is None else file.num_lines})
        scoring = Scoring(engine, job, pipelines, tells, file, first=max(lines["num"] for lines in told))
        summary = scoring.run(arguments)
        # The store may lie in a process whose own work is done.
        agree(store, group, "end", {})
    finally:
        watchdog.close()
        engine.close()
    if file is not None and summary is not None:
        file.publish()
        _tell(summary, arguments)


@dataclass(frozen=True)
class Scoring:
    """One process's part of a call: `tells` what its pipeline makes of a batch, and writes all of it if it has `file`.

    first: the line up to which everything was there already.
    """

    engine: Engine
    job: ScoreJob
    pipelines: Pipelines
    tells: bool
    file: ScoreFile | None
    first: int

    def run(self, arguments: ScoreArguments) -> Summary | None:
        """Score what is left, batch by batch; returns the summary where the file is written."""
        start_s, num_tokens = time.perf_counter(), 0
        batches, hook, progress = self.job.batches, token_scores(arguments.temperature), None
        if self.file is not None:
            progress = LineProgress(len(self.job.texts), self.first, sys.stderr if arguments.json else sys.stdout)
        for number, (batch, end) in enumerate(zip(batches, accumulate(map(len, batches)), strict=True)):
            if end <= self.first:
                continue
            lines = self._lines(number, batch, hook)
            if self.file is not None and progress is not None:
                self.file.write(lines)
                held = sum(len(text.tokens) for text in batch)
                num_tokens += held
                progress.update(end, held)
        if self.file is None or progress is None:
            return None
        progress.close()
        return self.file.summary(self.first, num_tokens, time.perf_counter() - start_s)

    def _lines(self, number: int, batch: Sequence[Text], hook: PostHook) -> list[Scored]:
        """A batch's lines where they are written; elsewhere this process's part in making them."""
        if not self.pipelines.takes(number):
            return [] if self.file is None else self.pipelines.receive(number)
        items = self.engine.forward(_packed(batch), hook, list, micro_batches=self.job.spec)
        if not self.tells:
            return []
        lines = [Scored.of(text, item["log_probs"].tolist()) for text, item in zip(batch, items, strict=True)]
        if self.file is None:
            self.pipelines.hand_over(number, lines)
        return lines


def _batches(texts: Sequence[Text], num_tokens: int) -> list[Sequence[Text]]:
    """The texts in their order, in parts of about so many tokens."""
    parts, start, held = [], 0, 0
    for end, text in enumerate(texts, 1):
        held += len(text.tokens)
        if held >= num_tokens or end == len(texts):
            parts.append(texts[start:end])
            start, held = end, 0
    return parts


def _packed(texts: Sequence[Text]) -> PackedBatch:
    """Tokens, and as labels the tokens after them, where these are to be scored."""
    labels = []
    for text in texts:
        first = len(text.tokens) - text.num_scored
        labels.append([NO_LABEL] * (first - 1) + list(text.tokens[first:]) + [NO_LABEL])
    return PackedBatch.from_sequences({"tokens": [list(text.tokens) for text in texts], "labels": labels})


def _digest(value: object) -> str:
    text = json.dumps(value, default=lambda text: [text.line, text.id, list(text.tokens), text.num_prompt_tokens])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _tell(summary: Summary, arguments: ScoreArguments) -> None:
    told = {"model": str(arguments.model), "file": str(arguments.file), "output": str(arguments.output)}
    if arguments.json:
        print(json.dumps({**told, **summary.to_dict()}, indent=2))
        return
    perplexity = "no token had one before it" if summary.perplexity is None else f"perplexity {summary.perplexity:.4f}"
    print(
        f"{summary.num_lines} lines, {summary.num_scored_tokens:,} tokens scored, {perplexity}; "
        f"wrote {arguments.output}"
    )
