"""The measured step, gathered from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.pipeline import Pipeline
from penstock.parallel.host import gather_json
from penstock.runtime.trace import CollectiveRecord, Record
from penstock.schedule.recording import Recording, pack_action, pack_collective


def gather_recording(pipeline: Pipeline) -> Recording | None:
    """The record of pipeline 0's last step, in ms; None on all ranks but 0. All ranks call it."""
    by_rank = gather_json(_pack_all(pipeline), pipeline.grid.pp_control)
    return None if pipeline.grid.rank else _recording(pipeline, by_rank)


def own_recording(pipeline: Pipeline) -> Recording:
    """The record of this rank's last step, in ms, as that of a pipeline of one rank."""
    return _recording(pipeline, [_pack_all(pipeline)])


def _recording(pipeline: Pipeline, by_rank: Sequence[Sequence[Any]]) -> Recording:
    return Recording.gathered(
        *zip(*by_rank, strict=True),
        title=f"{pipeline.options.choice.name}, {pipeline.layout.pp} ranks, measured in step {pipeline.step}",
        step=pipeline.step,
        stages_per_rank=pipeline.placement.stages_per_microbatch,
    )


def _pack_all(pipeline: Pipeline) -> tuple[list[Any], list[Any]]:
    actions = [_pack(record) for record in pipeline.recorder.records() if record.end_ns]
    return actions, [_pack_collective(record) for record in pipeline.recorder.collective_records() if record.end_ns]


def _pack_collective(record: CollectiveRecord) -> list[Any]:
    times_ns = (record.launch_ns, record.end_ns, record.wait_ns, record.taken_ns)
    return pack_collective(record.kind, record.num_bytes, (time_ns * 1e-6 if time_ns else None for time_ns in times_ns))


def _pack(record: Record) -> list[Any]:
    """A row as `Recording` reads it, on the host's monotonic clock."""
    times = (time_ns * 1e-6 for time_ns in (record.begin_ns, record.start_ns, record.end_ns))
    return pack_action(record.action, times, ((rank, since_ns * 1e-6) for rank, since_ns in record.waits))
