"""Timelines drawn over each other on one axis of time, and the file of a recorded step, which gives two of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.io.files import parse_json, read_bytes, whole_file
from penstock.schedule import Event, Timeline
from penstock.schedule.recording import Recording, Wait, escaped
from penstock.schedule.text import parse_step

FORMAT = "penstock recorded step 1"
RECORDED_STEP_FILE = "timeline.json"  # in the folder of a run


@dataclass(frozen=True)
class Layer:
    """One of the timelines drawn together; all have the same ranks and the same unit of time.

    name: distinguishes it from the others ("simulated", "measured"). waits: for each rank its recorded waits, each for
    another rank; empty if they were not recorded.
    """

    name: str
    timeline: Timeline
    waits: tuple[tuple[Wait, ...], ...] = ()

    @classmethod
    def simulated(cls, timeline: Timeline) -> "Layer":
        return cls("simulated", timeline)

    @classmethod
    def measured(cls, recording: Recording) -> "Layer":
        return cls("measured", recording.timeline, recording.waits)


def check_layers(layers: Sequence[Layer]) -> None:
    """Refuse layers that cannot be drawn together.

    Raises: ValueError without layers, or for layers of different numbers of ranks or of the same name.
    """
    if not layers:
        raise ValueError("a drawing needs at least one timeline")
    if len({layer.name for layer in layers}) < len(layers):
        raise ValueError(f"timelines drawn together need names of their own, got {[layer.name for layer in layers]}")
    num_ranks = {layer.name: len(layer.timeline.events) for layer in layers}
    if len(set(num_ranks.values())) > 1:
        raise ValueError(f"timelines drawn together need the same ranks, got {num_ranks}")


def bytes_are_known(layers: Sequence[Layer]) -> bool:
    """Return whether all layers know the bytes of a live tape, so that bytes can be shown instead of microbatches."""
    return all(layer.timeline.memory.has_bytes for layer in layers)


def live_over_time(layer: Layer, rank: int, *, in_bytes: bool) -> tuple[tuple[float, float], ...]:
    """The times at which a rank's live tapes change, each with the microbatches or bytes that are live from then on."""
    return layer.timeline.live_bytes(rank) if in_bytes else layer.timeline.live_microbatches(rank)


# ---- the file of a recorded step


@dataclass(frozen=True)
class RecordedStep:
    """A step as measured, and as simulated with the mean measured times, both in ms."""

    recording: Recording
    simulated: Timeline | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        measured = Layer.measured(self.recording)
        return (measured,) if self.simulated is None else (Layer.simulated(self.simulated), measured)


def write_recorded_step(path: str | Path, recorded: RecordedStep) -> None:
    """Write a recorded step into a file; an existing file is overwritten."""
    values = {"format": FORMAT, "measured": recorded.recording.to_json(), "simulated": None}
    if recorded.simulated is not None:
        values["simulated"] = _timeline_to_json(recorded.simulated)
    with whole_file(path) as new:
        new.write_text(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def read_recorded_step(path: str | Path) -> RecordedStep:
    """Read a recorded step that `write_recorded_step` wrote.

    Raises: ValueError naming the file and its fault; OSError if it cannot be read.
    """
    content = read_bytes(path)
    try:
        values = parse_json(content)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"it does not say that its format is {FORMAT!r}")
        recording = Recording.from_json(values["measured"])
        simulated = values.get("simulated")
        if simulated is not None:
            simulated = _timeline_from_json(simulated, recording.stages_per_rank)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
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

    def event(text: str, start: float, end: float) -> Event:
        action = parse_step(text)
        if action is None or not 0 <= start <= end:
            raise ValueError(f"{[text, start, end]} is no event")
        return Event(action, float(start), float(end))

    events = [[event(*row) for row in rank] for rank in values["ranks"]]
    return Timeline.from_events(
        events, stages_per_rank=stages_per_rank, compute=float(values["compute"]), title=escaped(str(values["title"]))
    )
