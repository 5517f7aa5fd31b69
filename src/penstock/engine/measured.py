"""The measured step, gathered from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.parallel.exchange import gather_json
from penstock.runtime.trace import Record
from penstock.runtime.travels import Travel
from penstock.schedule import Timeline
from penstock.schedule.recording import Recording

if TYPE_CHECKING:
    from penstock.engine.engine import Engine


def gather_recording(engine: Engine) -> Recording | None:
    """What pipeline 0 recorded of its last step, in ms; None on all ranks but 0. All ranks call it."""
    by_rank = gather_json(_pack_all(engine), engine.grid.pp_control)
    return None if engine.grid.rank else _recording(engine, by_rank)


def own_recording(engine: Engine) -> Recording:
    """What this rank recorded of its last step, in ms, as that of a pipeline of one rank."""
    return _recording(engine, [_pack_all(engine)])


def _recording(engine: Engine, by_rank: Sequence[Sequence[Any]]) -> Recording:
    return Recording.gathered(
        *zip(*by_rank, strict=True),
        title=f"{engine.options.choice.name}, {engine.layout.pp} ranks, measured in step {engine.step}",
        step=engine.step,
        stages_per_rank=engine.placement.stages_per_microbatch,
    )


def gather_events(engine: Engine) -> Timeline | None:
    """The last step of pipeline 0 as a timeline in ms; None on all ranks but 0. All ranks call it."""
    recording = gather_recording(engine)
    return None if recording is None else recording.timeline


def _pack_all(engine: Engine) -> tuple[list[Any], list[Any]]:
    actions = [_pack(record) for record in engine.recorder.records() if record.end_ns]
    return actions, [_pack_travel(travel) for travel in engine.recorder.travels() if travel.end_ns]


def _pack_travel(travel: Travel) -> list[Any]:
    times_ns = (travel.launch_ns, travel.end_ns, travel.wait_ns, travel.taken_ns)
    return [str(travel.kind), travel.num_bytes, *(time_ns * 1e-6 if time_ns else None for time_ns in times_ns)]


def _pack(record: Record) -> list[Any]:
    """A row as `Recording` reads it, on the host's monotonic clock."""
    times = (time_ns * 1e-6 for time_ns in (record.begin_ns, record.start_ns, record.end_ns))
    return [str(record.action), *times, [[rank, since_ns * 1e-6] for rank, since_ns in record.waits]]
