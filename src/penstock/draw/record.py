"""A recorded step as a JSON file, with the simulation that belongs to it: what `penstock trace` draws."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.draw.layers import Layer
from penstock.schedule import Event, Timeline
from penstock.schedule.recording import Recording
from penstock.schedule.text import parse_step

FORMAT = "penstock recorded step 1"
RECORDED_STEP_FILE = "timeline.json"  # in the folder of a run


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was measured and as it was simulated with the mean times that were measured, both in ms."""

    recording: Recording
    simulated: Timeline | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        measured = Layer.measured(self.recording)
        return (measured,) if self.simulated is None else (Layer.simulated(self.simulated), measured)


def write_recorded_step(path: str | Path, recorded: RecordedStep) -> None:
    """Write a recorded step into a file; an existing one is overwritten."""
    values = {"format": FORMAT, "measured": recorded.recording.to_json(), "simulated": None}
    if recorded.simulated is not None:
        values["simulated"] = _timeline_to_json(recorded.simulated)
    Path(path).write_text(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def read_recorded_step(path: str | Path) -> RecordedStep:
    """What `write_recorded_step` wrote.

    Raises: ValueError naming the file and what is wrong with it; OSError if it can not be read.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"it does not say that its format is {FORMAT!r}")
        recording = Recording.from_json(values["measured"])
        simulated = values.get("simulated")
        if simulated is not None:
            simulated = _timeline_from_json(simulated, recording.stages_per_rank)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no recorded step: {error}") from None
    return RecordedStep(recording, simulated)


def _timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "title": timeline.title,
        "compute": timeline.span_cost * (1 - timeline.bubble_rate),
        "ranks": [
            [[str(event.action), round(event.start, 6), round(event.end, 6)] for event in events]
            for events in timeline.events
        ],
    }


def _timeline_from_json(values: dict[str, Any], stages_per_rank: int) -> Timeline:
    events = [[_event(*row) for row in rank] for rank in values["ranks"]]
    return Timeline.from_events(
        events, stages_per_rank=stages_per_rank, compute=float(values["compute"]), title=str(values["title"])
    )


def _event(text: str, start: float, end: float) -> Event:
    action = parse_step(text)
    if action is None or not 0 <= start <= end:
        raise ValueError(f"{[text, start, end]} is no event")
    return Event(action, float(start), float(end))
