"""One worker of `penstock score`: its stage of the model over all texts; the last stage's writes what comes out."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.cli.launch import Group
from penstock.cli.progress import LineProgress
from penstock.cli.score import ScoreArguments
from penstock.cli.score_file import Scored, ScoreFile, Summary
from penstock.cli.texts import Text, read_texts
from penstock.cli.together import choose_device, initialise, refuse_differing, together, work_together
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine.config import ParallelSection
from penstock.engine.engine import Engine
from penstock.engine.forward import token_scores
from penstock.engine.saved_model import SavedModel, open_model
from penstock.runtime import Watchdog

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

# Enough for a microbatch to be worth its overhead, and few enough that its logits stay small.
_MICROBATCH_TOKENS = 2048
# What is written at once, and lost at most when the command is stopped. Batches and microbatches do not depend on the
# number of stages, so neither does a bit of the file.
_MICROBATCHES = 8


@dataclass(frozen=True)
class Job:
    """What one call is to score, read and found possible."""

    model: SavedModel
    texts: Sequence[Text]
    max_tokens: int


def check(arguments: ScoreArguments) -> Job:
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
    return Job(model, texts, arguments.max_tokens or max(_MICROBATCH_TOKENS, len(longest.tokens)))


def run_worker(arguments: ScoreArguments, group: Group) -> int:
    """Score as one process of `group`; returns the exit code."""
    return work_together(
        group, arguments.num_threads, arguments.timeout_s, lambda store: _score(arguments, group, store)
    )


def _score(arguments: ScoreArguments, group: Group, store: "Store") -> None:
    job = together(store, group, "texts", lambda: check(arguments))
    digest = _digest(job.texts)
    refuse_differing(store, group, "scoring", {**arguments.decisive, "texts": digest, "max_tokens": job.max_tokens})
    device = choose_device(store, group, arguments.device)
    initialise(store, group, device, arguments.timeout_s)
    parallel = ParallelSection(
        pp=arguments.pp,
        tp=arguments.tp,
        device=device,
        num_threads=arguments.num_threads,
        timeout_s=arguments.timeout_s,
    )
    loaded = job.model.load(parallel)
    engine = loaded.engine
    what = [str(job.model.folder.resolve()), loaded.version, digest, job.max_tokens, arguments.decisive]
    batches = _batches(job.texts, job.max_tokens * _MICROBATCHES)
    ends = list(accumulate(map(len, batches)))
    watchdog = Watchdog(engine.recorder, arguments.timeout_s)
    watchdog.listen_to_signals()
    watchdog.answer_peers(engine.grid.control, engine.grid.pp_ranks)
    try:
        file = (
            ScoreFile(arguments.output, _digest(what), ends)
            if engine.gives_results and engine.grid.tp_rank == 0
            else None
        )
        summary = _run(engine, job, batches, arguments, file)
    finally:
        watchdog.close()
        engine.close()
    if file is not None and summary is not None:
        file.publish()
        _tell(summary, arguments)


def _run(
    engine: Engine, job: Job, batches: Sequence[Sequence[Text]], arguments: ScoreArguments, file: ScoreFile | None
) -> Summary | None:
    """Score what is left, batch by batch; returns the summary where the file is written."""
    start_s, num_tokens = time.perf_counter(), 0
    first = int(engine.sum_over_ranks(0 if file is None else file.num_lines)[0])
    progress = None
    if file is not None:
        progress = LineProgress(sum(map(len, batches)), first, sys.stderr if arguments.json else sys.stdout)
    hook, spec = (
        token_scores(arguments.temperature),
        MicroBatchSpec(num=_MICROBATCHES, max_tokens=job.max_tokens, allow_fewer=True),
    )
    for batch, end in zip(batches, accumulate(map(len, batches)), strict=True):
        if end <= first:
            continue
        items = engine.forward(_packed(batch), hook, list, micro_batches=spec)
        if file is not None and progress is not None:
            file.write([Scored.of(text, item["log_probs"].tolist()) for text, item in zip(batch, items, strict=True)])
            held = sum(len(text.tokens) for text in batch)
            num_tokens += held
            progress.update(end, held)
    if file is None or progress is None:
        return None
    progress.close()
    return file.summary(first, num_tokens, time.perf_counter() - start_s)


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
