"""The look of a timeline in every kind of drawing: boxes, their kinds, colours and words."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from penstock.schedule import Op, Timeline
from penstock.schedule.actions import parts

#: figures whose names do not say all, one a line
DEFINITIONS = (
    "idle: share of the makespan in which a rank computes nothing",
    "span: the longest time from a rank's first start to its end; "
    "bubble: share of the span that the busiest rank does not compute",
)


class Kind(Enum):
    """The activities of a rank, with their look.

    Colour-blind readers can tell the colours apart. Source: the palette of M. Okabe and K. Ito, "Color Universal
    Design" (2008), with a deeper blue so that white figures are readable on it.
    """

    #: its letter, its word for the legend, its colour, and the colour of text on it
    letter: str
    word: str
    colour: str
    ink: str

    FORWARD = "F", "forward", "#2F6DB5", "#FFFFFF"
    BACKWARD = "B", "backward", "#E8A33D", "#1A1A1A"
    BACKWARD_INPUT = "I", "input backward", "#CC6FA4", "#1A1A1A"
    BACKWARD_WEIGHT = "W", "weight backward", "#2F9E77", "#FFFFFF"
    REDUCE = "R", "gradient reduction", "#8FD0F0", "#1A1A1A"
    STEP = "S", "optimizer step", "#4A4A4A", "#FFFFFF"
    IDLE = "·", "idle", "#ECEEF1", "#9AA0A8"

    def __init__(self, letter: str, word: str, colour: str, ink: str) -> None:
        self.letter, self.word, self.colour, self.ink = letter, word, colour, ink


KIND_OF = {
    Op.F: Kind.FORWARD,
    Op.B: Kind.BACKWARD,
    Op.I: Kind.BACKWARD_INPUT,
    Op.W: Kind.BACKWARD_WEIGHT,
    Op.REDUCE_GRAD: Kind.REDUCE,
    Op.STEP: Kind.STEP,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One action of a box; a fused pair is a box of two parts, which share its time.

    `local_stage` counts the stages of one rank from 0; `microbatch` is -1 if the action has none.
    """

    kind: Kind
    local_stage: int
    microbatch: int

    @property
    def colours(self) -> tuple[str, str]:
        """The colour, a paler shade for every further local stage, and that of text on it."""
        if not self.local_stage:
            return self.kind.colour, self.kind.ink
        paler = min(0.66, 0.42 * self.local_stage)
        channels = [int(self.kind.colour[i : i + 2], 16) for i in (1, 3, 5)]
        return "#" + "".join(f"{round(own + (255 - own) * paler):02x}" for own in channels), "#1A1A1A"


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of one rank's time, in the timeline's own unit."""

    start: float
    end: float
    parts: tuple[Part, ...]

    @property
    def beside(self) -> bool:
        """True for a box that runs beside the rank's compute, as a reduction does."""
        return self.parts[0].kind is Kind.REDUCE


Row = tuple[Box, ...]


def boxes_of(timeline: Timeline) -> tuple[Row, ...]:
    """The boxes of each rank, in order of time; actions that took no time have none."""
    rows = []
    for events in timeline.events:
        actions = [parts(event.action) for event in events]
        stages = sorted({action.stage for group in actions for action in group if action.stage >= 0})
        local = {stage: index for index, stage in enumerate(stages)}
        rows.append(
            tuple(
                Box(
                    event.start,
                    event.end,
                    tuple(Part(KIND_OF[own.op], local.get(own.stage, 0), own.microbatch) for own in group),
                )
                for event, group in zip(events, actions, strict=True)
                if event.end > event.start
            )
        )
    return tuple(rows)


def kinds_in(rows: Iterable[Row]) -> tuple[Kind, ...]:
    """The kinds that a legend must explain: those that occur, and idle, in the order of `Kind`."""
    found = {part.kind for row in rows for box in row for part in box.parts}
    return tuple(kind for kind in Kind if kind in found or kind is Kind.IDLE)


def one_at_a_time(row: Row) -> Row:
    """The row without overlaps: boxes beside the compute are kept only where the rank would otherwise be idle."""
    compute = [box for box in row if not box.beside]
    gaps = list(idle_spans(tuple(compute), inf))
    beside = [
        replace(box, start=max(start, box.start), end=min(end, box.end))
        for box in row
        if box.beside
        for start, end in gaps
        if min(end, box.end) > max(start, box.start)
    ]
    return tuple(sorted(compute + beside, key=lambda box: box.start))


def idle_spans(row: Row, makespan: float) -> Iterator[tuple[float, float]]:
    """The spans between time 0 and the makespan in which a rank does nothing."""
    busy_until = 0.0
    for box in row:
        if box.start > busy_until:
            yield busy_until, box.start
        busy_until = max(busy_until, box.end)
    if makespan > busy_until:
        yield busy_until, makespan


def short_number(value: float) -> str:
    """Format a number with at most four significant figures, and without decimals if it is whole: 33, 0.2727, 1719."""
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 or abs(value) >= 1000 else f"{value:.4g}"


def list_by_rank(values: tuple[float, ...], *, at_most: int = 16) -> str:
    """One number a rank, shortened in the middle when there are many ranks."""
    if len(values) > at_most:
        return " ".join([*map(short_number, values[: at_most - 2]), "...", short_number(values[-1])])
    return " ".join(map(short_number, values))
