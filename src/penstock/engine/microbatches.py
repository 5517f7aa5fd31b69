"""The split of a batch into microbatches, the same number on every rank, with one small collective."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from penstock.data import MicroBatchSpec, PackedBatch, Split, agree, count, split
from penstock.engine.losses import LossWeightFn
from penstock.engine.pipeline import Pipeline
from penstock.runtime import PipelineError
from penstock.settings import Coordinates


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

    @property
    def microbatches(self) -> Sequence[PackedBatch]:
        return self.split.microbatches


def agree_on_microbatches(
    pipeline: Pipeline,
    batch: PackedBatch,
    spec: MicroBatchSpec | None,
    loss_weight_fn: LossWeightFn | None = None,
    check: Callable[[], None] | None = None,
    asked: BatchReport | None = None,
) -> AgreedSplit:
    """Split the batch, report the result to all ranks, and split again if another rank needs more microbatches.

    Without `spec` there are two microbatches for each rank of the pipeline, fewer where the batch is too small. Without
    `loss_weight_fn` there are no weights. `check` may refuse the batch by an exception: all ranks raise. `asked` has
    what else this rank reports, such as a wish to end after the step.

    Raises:
        SplitError: the batch cannot be split so; on all ranks alike.
        ValueError: context-parallel ranks cannot share a microbatch; on all ranks alike.
        PipelineError: ranks of one pipeline hold different batches, or another rank failed; on all ranks alike.
    """
    spec = spec or MicroBatchSpec(num=2 * pipeline.layout.pp, allow_fewer=True)
    counts = count(batch, spec).row()
    view = replace(asked or BatchReport(), num_tokens=batch.num_tokens, counts=counts, digest=batch.digest())
    num = None
    while True:
        parts, weights, error = None, [], None
        try:
            if check is not None:
                check()
            parts = split(batch, spec, num)
            for microbatch in parts.microbatches:
                pipeline.context.spread(microbatch)
            pipeline.check_keys(batch)
            if pipeline.holds_last_stage and loss_weight_fn is not None:
                weights = [float(loss_weight_fn(m)) for m in parts.microbatches]
            report = replace(view, num_microbatches=len(parts.microbatches), weight=sum(weights))
        except Exception as exception:  # reported to all ranks, then raised here: no rank may wait for this one
            error = exception
            report = replace(view, failed=True)
        with pipeline.recorder.collective("agree on the batch"):
            reports = gather_reports(report, pipeline.grid.control)
        num = agree([r.counts for r in reports], spec)
        check_reports(reports, pipeline.layout.coordinates, error)
        if parts is not None and all(r.num_microbatches == num for r in reports):
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

    def pack(self) -> list[int]:
        weight_bits = struct.unpack("<q", struct.pack("<d", self.weight))[0]
        flags = int(self.failed) | int(self.stop) << 1 | int(self.refit) << 2
        return [self.num_tokens, *self.counts, self.num_microbatches, self.digest, weight_bits, flags, self.step]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> BatchReport:
        num_tokens, *counts, num_microbatches, digest, weight_bits, flags, step = row
        weight = struct.unpack("<d", struct.pack("<q", weight_bits))[0]
        wanted, needed, num_items, longest = counts
        counts = (wanted, needed, num_items, longest)
        asked = (bool(flags & bit) for bit in (1, 2, 4))
        return cls(num_tokens, counts, num_microbatches, digest, weight, *asked, step=step)


def gather_reports(report: BatchReport, group: dist.ProcessGroup | None) -> list[BatchReport]:
    """Every rank's report, by rank; `group` carries host memory (None: there is one rank)."""
    if group is None:
        return [report]
    row = torch.tensor(report.pack(), dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return [BatchReport.unpack(r.tolist()) for r in rows]


def check_reports(
    reports: Sequence[BatchReport],
    coordinates: Callable[[int], Coordinates],
    own_error: Exception | None = None,
) -> None:
    """Raise on every rank alike if the ranks cannot go on together.

    Ranks with the same place on the dp axis share a batch. `own_error`, this rank's failure, is raised as it is here
    and reported as a PipelineError elsewhere.

    Raises:
        PipelineError: a rank failed, or ranks that share a batch hold different ones; all coordinates are listed.
    """
    if own_error is not None:
        raise own_error
    failed = [rank for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise PipelineError(f"rank(s) {', '.join(map(str, failed))} cannot use their batch; their message says why")
    if len(steps := {report.step for report in reports}) > 1:
        raise PipelineError(f"ranks take different steps: {', '.join(map(str, sorted(steps)))}")
    pipelines: dict[int, list[int]] = {}
    for rank in range(len(reports)):
        pipelines.setdefault(coordinates(rank).dp, []).append(rank)
    for ranks in pipelines.values():
        if len({(reports[r].digest, reports[r].counts) for r in ranks}) > 1:
            views = "; ".join(
                f"({coordinates(r)}) has {reports[r].counts[2]} items, {reports[r].num_tokens} tokens, "
                f"digest {reports[r].digest:x}"
                for r in ranks
            )
            raise PipelineError(f"ranks that share a batch were given different ones: {views}")
