"""The split of a batch into microbatches, the same number on every rank, with one small collective."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from zlib import crc32

from penstock.data import MicroBatchSpec, PackedBatch, Split, agree, count, split
from penstock.engine.batch_checks import check_batch, check_labels, check_spec, checked_weight
from penstock.engine.losses import LossWeightFn
from penstock.engine.pipeline import Pipeline
from penstock.parallel.host import gather_json, gather_rows, shown_to_all_ranks
from penstock.runtime import PipelineError
from penstock.settings import Coordinates

_NOTHING = Split((), (), (), ())
_NO_LIMIT = 1 << 62
# The fields of a `BatchReport` in their order.
_ROW = struct.Struct("<q4qqqqqd???q??")


@dataclass(frozen=True)
class AgreedSplit:
    """A split that all ranks agree on."""

    #: this rank's microbatches, and where their items stand in the batch
    split: Split
    #: the loss weight of each microbatch; empty where the rank does not see labels
    weights: Sequence[float]
    #: data-parallel rank -> the sum of its loss weights
    rank_totals: Sequence[float]
    #: tokens of all data-parallel ranks
    num_tokens: int
    #: True if some rank asks all to end after this step
    stop_requested: bool
    #: True if on some rank a parameter was frozen or thawed since the last step
    refit: bool = False
    #: data-parallel ranks that have no batch left, in order
    ended: Sequence[int] = ()

    @property
    def microbatches(self) -> Sequence[PackedBatch]:
        return self.split.microbatches


@dataclass(frozen=True)
class BatchCall:
    """The engine's method that a batch was given to."""

    #: its name, with the settings that must be the same on all ranks
    call: str
    #: refuses other arguments by an exception
    check: Callable[[], object] = lambda: None
    #: True if labels are token ids, which a loss or a score reads
    reads_labels: bool = False
    #: what else this rank reports, such as a wish to end after the step
    asked: BatchReport | None = None


def agree_on_microbatches(
    pipeline: Pipeline,
    batch: PackedBatch | None,
    spec: MicroBatchSpec | None,
    job: BatchCall,
    loss_weight_fn: LossWeightFn | None = None,
) -> AgreedSplit:
    """Split the batch, report the result to all ranks, and split again if another rank needs more microbatches.

    A rank that has `ended` gives no batch, and gets no microbatches. Without `spec` there are two microbatches for each
    rank of the pipeline, fewer where the batch is too small. Without `loss_weight_fn` there are no weights.

    Raises:
        SplitError: the batch cannot be split so; on all ranks alike.
        ValueError: this rank cannot use its batch or another argument; it says why on all ranks.
        PipelineError: the same on another rank, or ranks of one pipeline hold different batches.
    """
    view, error, num = replace(job.asked or BatchReport(), job=crc32(job.call.encode())), None, None
    view = replace(view, watched=pipeline.is_watched)
    try:
        if not view.ended:
            check_batch(batch, pipeline.units[0].limits, job.reads_labels)
        check_spec(spec)
        job.check()
    except Exception as exception:  # reported to all ranks, then raised here: no rank may wait for this one
        error = exception
    spec = spec if isinstance(spec, MicroBatchSpec) else MicroBatchSpec(num=2 * pipeline.layout.pp, allow_fewer=True)
    if isinstance(batch, PackedBatch):
        counts, digests = count(batch, spec).row(), (batch.digest(), batch.contents_digest())
        view = replace(view, num_tokens=batch.num_tokens, counts=counts, digest=digests[0], contents=digests[1])
    while True:
        parts, weights, report = None, [], replace(view, failed=True)
        try:
            if error is not None:
                raise error
            parts = _NOTHING if batch is None else split(batch, spec, num)
            for microbatch in parts.microbatches:
                pipeline.context.spread(microbatch)
            if batch is not None:
                pipeline.own_layers.prepare_for(batch)
                if job.reads_labels:
                    check_labels(batch, pipeline.own_layers.num_classes)
            if pipeline.holds_last_stage and loss_weight_fn is not None:
                weights = [checked_weight(loss_weight_fn, m, i) for i, m in enumerate(parts.microbatches)]
            report = replace(view, num_microbatches=len(parts.microbatches), weight=sum(weights))
        except Exception as exception:
            error = exception
        with pipeline.recorder.collective("agree on the batch"):
            reports = [BatchReport.unpack(row) for row in gather_rows("batch", report.pack(), pipeline.grid.control)]
        if all(any(r.counts) for r in reports):
            num = agree([r.counts for r in reports], spec)
        _check_failures(pipeline, reports, job.call, error)
        check_reports(reports, pipeline.layout.coordinates)
        if parts is not None and all(r.ended or r.num_microbatches == num for r in reports):
            pipeline.is_watched_anywhere = any(r.watched for r in reports)
            return _agreed(pipeline, parts, weights, reports)


def _agreed(pipeline: Pipeline, parts: Split, weights: list[float], reports: list[BatchReport]) -> AgreedSplit:
    layout = pipeline.layout
    seeing_labels = [layout.rank_of(dp=dp, pp=pipeline.placement.output_rank) for dp in range(layout.dp)]
    return AgreedSplit(
        split=parts,
        weights=weights,
        rank_totals=[reports[r].weight for r in seeing_labels],
        num_tokens=sum(reports[r].num_tokens for r in seeing_labels),
        stop_requested=any(r.stop for r in reports),
        refit=any(r.refit for r in reports),
        ended=[dp for dp, r in enumerate(seeing_labels) if reports[r].ended],
    )


@dataclass(frozen=True)
class BatchReport:
    """One rank's view of its batch."""

    #: tokens of the rank's batch
    num_tokens: int = 0
    #: the numbers that data-parallel ranks need to split alike, see `penstock.data.count`
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: the number of microbatches that the rank has split into so far
    num_microbatches: int = 0
    #: covers ids, keys and lengths
    digest: int = 0
    #: covers the data; 0 for metadata alone
    contents: int = 0
    #: covers the engine's method and its settings
    job: int = 0
    #: the sum of the loss weights
    weight: float = 0.0
    #: True if the rank cannot go on with its batch
    failed: bool = False
    #: True if the rank was asked to end after the step
    stop: bool = False
    #: True if a parameter of the rank was frozen or thawed since the last step
    refit: bool = False
    #: the step's number
    step: int = 0
    #: True if the rank has no batch left; `counts` then ask for nothing
    ended: bool = False
    #: True if the rank has callbacks
    watched: bool = False

    @classmethod
    def of_end(cls) -> BatchReport:
        """The report of a rank that has no batch left."""
        return cls(counts=(0, 0, _NO_LIMIT, 0), ended=True)

    def __str__(self) -> str:
        if self.ended:
            return "no batch left"
        asked = f"{self.counts[2]} items, {self.num_tokens} tokens, asks for {self.counts[0]} microbatches"
        return f"{asked}, digest {self.digest:x}, contents {self.contents:08x}"

    def pack(self) -> bytes:
        """A row of bytes, equally long for every report, so that one small collective shows it to all ranks."""
        num_tokens, counts, *others = astuple(self)
        return _ROW.pack(num_tokens, *counts, *others)

    @classmethod
    def unpack(cls, row: bytes) -> BatchReport:
        num_tokens, wanted, needed, num_items, longest, *others = _ROW.unpack(row)
        return cls(num_tokens, (wanted, needed, num_items, longest), *others)


def _check_failures(pipeline: Pipeline, reports: Sequence[BatchReport], call: str, own_error: Exception | None) -> None:
    """Raise on every rank if any has failed, or if they were called differently; only then is more sent.

    Raises:
        PipelineError: on other ranks than the failed ones, which raise `own_error`.
    """
    if not any(report.failed for report in reports) and len({report.job for report in reports}) == 1:
        return
    _, calls = shown_to_all_ranks(
        lambda: (_checked(own_error), call),
        partial(gather_json, group=pipeline.grid.control),
        otherwise=PipelineError,
        message="rank {rank} cannot use what it was given: {error}",
    )
    rank, other = next((rank, theirs) for rank, theirs in enumerate(calls) if theirs != calls[0])
    raise PipelineError(f"all ranks make the same calls, but rank 0 made {calls[0]} and rank {rank} {other}")


def _checked(error: Exception | None) -> None:
    if error is not None:
        raise error


def check_reports(reports: Sequence[BatchReport], coordinates: Callable[[int], Coordinates]) -> None:
    """Raise on every rank alike if ranks take different steps, or those that share a batch hold different ones.

    Ranks with the same place on the dp axis share a batch.

    Raises:
        PipelineError: listing all of their coordinates.
    """
    if len(steps := {report.step for report in reports}) > 1:
        raise PipelineError(f"ranks take different steps: {', '.join(map(str, sorted(steps)))}")
    pipelines: dict[int, list[int]] = {}
    for rank in range(len(reports)):
        pipelines.setdefault(coordinates(rank).dp, []).append(rank)
    for ranks in pipelines.values():
        contents = {reports[r].contents for r in ranks} - {0}
        if len({(reports[r].digest, reports[r].counts) for r in ranks}) > 1 or len(contents) > 1:
            views = "; ".join(f"({coordinates(r)}) has {reports[r]}" for r in ranks)
            raise PipelineError(f"ranks that share a batch were given different ones: {views}")
