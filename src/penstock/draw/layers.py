"""Timelines that are put over each other on one axis of time, as the page and the Perfetto trace show them."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule import Timeline
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


def bytes_are_known(layers: Sequence[Layer]) -> bool:
    """Whether all layers know the bytes of a live tape, so that these can be shown instead of microbatches."""
    return all(layer.timeline.memory.has_bytes for layer in layers)


def live_over_time(layer: Layer, rank: int, *, in_bytes: bool) -> tuple[tuple[float, float], ...]:
    """Each time at which a rank's live tapes change, and how many microbatches or bytes of them there are then."""
    return layer.timeline.live_bytes(rank) if in_bytes else layer.timeline.live_microbatches(rank)
