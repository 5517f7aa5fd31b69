"""From a batch to its microbatches, the same number on every rank, with one small collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.data import MicroBatchSpec, PackedBatch, Split, agree, count, split
from penstock.engine.agreement import BatchReport, check_reports, gather_reports

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.train import LossWeightFn


@dataclass(frozen=True)
class Agreed:
    """A split that all ranks agree on.

    `weights` are the loss weights of this rank's microbatches (empty where the rank does not see labels);
    `rank_totals` their sums by data-parallel rank; `num_tokens` counts all data-parallel ranks.
    """

    split: Split
    weights: Sequence[float]
    rank_totals: Sequence[float]
    num_tokens: int
    stop_requested: bool

    @property
    def microbatches(self) -> Sequence[PackedBatch]:
        return self.split.microbatches


def agree_on_microbatches(
    engine: Engine,
    batch: PackedBatch,
    spec: MicroBatchSpec,
    loss_weight_fn: LossWeightFn | None = None,
    check: Callable[[], None] | None = None,
) -> Agreed:
    """Split the batch, tell all ranks what came out, and split again if another rank needs more microbatches.

    Without `loss_weight_fn` there are no weights. `check` may refuse the batch by an exception: all ranks raise.

    Raises:
        SplitError: the batch can not be split so; on all ranks alike.
        ValueError: context-parallel ranks can not share a microbatch; told to all ranks.
        PipelineError: ranks of one pipeline hold different batches, or another rank failed; on all ranks alike.
    """
    counts = count(batch, spec).row()
    view = BatchReport(batch.num_tokens, counts, digest=batch.digest(), stop=engine.stop_requested)
    num = None
    while True:
        parts, weights, error = None, [], None
        try:
            if check is not None:
                check()
            parts = split(batch, spec, num)
            for microbatch in parts.microbatches:
                engine.context.spread(microbatch)
            if engine.holds_last_stage and loss_weight_fn is not None:
                weights = [float(loss_weight_fn(m)) for m in parts.microbatches]
            report = replace(view, num_microbatches=len(parts.microbatches), weight=sum(weights))
        except Exception as exception:  # told to all ranks, then raised here: nobody may wait for this rank
            error = exception
            report = replace(view, failed=True)
        with engine.recorder.collective("agree on the batch"):
            reports = gather_reports(report, engine.grid.control)
        num = agree([r.counts for r in reports], spec)
        check_reports(reports, engine.layout.coordinates, error)
        if parts is not None and all(r.num_microbatches == num for r in reports):
            return _agreed(engine, parts, weights, reports)


def _agreed(engine: Engine, parts: Split, weights: list[float], reports: list[BatchReport]) -> Agreed:
    layout, placement = engine.layout, engine.placement
    last = placement.rank_of(placement.stages_per_route - 1)  # a rank that sees the labels
    tellers = [layout.rank_of(dp=dp, pp=last) for dp in range(layout.dp)]
    return Agreed(
        split=parts,
        weights=weights,
        rank_totals=[reports[r].weight for r in tellers],
        num_tokens=sum(reports[r].num_tokens for r in tellers),
        stop_requested=any(r.stop for r in reports),
    )
