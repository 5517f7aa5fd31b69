"""The records of the last step, of all ranks of a pipeline or of one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.pipeline import Pipeline
from penstock.parallel.host import gather_json
from penstock.schedule.recording import Recording


def gathered_recording(pipeline: Pipeline) -> Recording | None:
    """The record of pipeline 0's last step, in ms; None on all ranks but 0. All ranks call it."""
    by_rank = gather_json(_rows(pipeline), pipeline.grid.pp_control)
    return None if pipeline.grid.rank else _recording(pipeline, by_rank)


def own_recording(pipeline: Pipeline) -> Recording:
    """The record of this rank's last step, in ms, as that of a pipeline of one rank."""
    return _recording(pipeline, [_rows(pipeline)])


def _rows(pipeline: Pipeline) -> tuple[list[Any], list[Any]]:
    records, collectives = pipeline.recorder.records(), pipeline.recorder.collective_records()
    return (
        [record.row() for record in records if record.end_ns],
        [record.row() for record in collectives if record.end_ns],
    )


def _recording(pipeline: Pipeline, by_rank: Sequence[Sequence[Any]]) -> Recording:
    num_ranks = pipeline.layout.pp
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    return Recording.gathered(
        *zip(*by_rank, strict=True),
        title=f"{pipeline.options.choice.name}, {ranks}, measured in step {pipeline.step}",
        step=pipeline.step,
        stages_per_rank=pipeline.placement.stages_per_microbatch,
    )
