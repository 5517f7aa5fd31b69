"""Timelines that are put over each other on one axis of time, as the page and the Perfetto trace show them."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule import Action, Event, Op, Timeline
from penstock.schedule.actions import parts
from penstock.schedule.recording import Recording, Wait


@dataclass(frozen=True)
class Layer:
    """One of the timelines drawn together; all have the same ranks and the same unit of time.

    `name` tells it from the others ("simulated", "measured"); `waits` are, per rank, the times in which it is known
    for whom the rank waited, where that was recorded.
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
    """Refuse what can not be drawn together.

    Raises: ValueError without layers, or for layers of different numbers of ranks or of the same name.
    """
    if not layers:
        raise ValueError("a drawing needs at least one timeline")
    if len({layer.name for layer in layers}) < len(layers):
        raise ValueError(f"timelines drawn together need names of their own, got {[layer.name for layer in layers]}")
    num_ranks = {layer.name: len(layer.timeline.events) for layer in layers}
    if len(set(num_ranks.values())) > 1:
        raise ValueError(f"timelines drawn together need the same ranks, got {num_ranks}")


def live_tapes(events: Sequence[Event]) -> list[tuple[float, int]]:
    """When a rank's number of live tapes changes, and what it is from then on.

    A tape is live from the start of its forward to the end of its `B` or its `W`; with forwards alone, while they run.
    """
    closing = {Op.B, Op.W} if any(_closes(action) for event in events for action in parts(event.action)) else {Op.F}
    changes, live = [], 0
    for event in events:
        for action in parts(event.action):
            if action.op is Op.F:
                live += 1
                changes.append((event.start, live))
            if action.op in closing:
                live -= 1
                changes.append((event.end, live))
    return changes


def _closes(action: Action) -> bool:
    return action.op in (Op.B, Op.W)
