"""The parts that every kind of drawing shares: layers of timelines, the look of boxes, a recorded step's file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from pathlib import Path

from penstock.io.files import parse_json, read_bytes, whole_file
from penstock.schedule import Event, Op, Timeline
from penstock.schedule.actions import ALL, Resource, Step, parts
from penstock.schedule.recording import Recording, Wait, escaped
from penstock.schedule.text import parse_step

FORMAT = "penstock recorded step 1"
RECORDED_STEP_FILE = "timeline.json"  # in the folder of a run
ENDINGS = {
    ".svg": "a picture",
    ".png": "a picture",
    ".pdf": "a picture",
    ".html": "a page to zoom and to follow microbatches in, with nothing else needed",
    ".json": "a trace for ui.perfetto.dev",
}
PICTURES = (".svg", ".png", ".pdf")


def check_ending(path: Path, endings: Iterable[str] = ENDINGS) -> None:
    """Refuse a file whose ending names no supported format.

    Raises: ValueError naming the supported endings.
    """
    if path.suffix.lower() not in endings:
        raise ValueError(f"cannot draw {path.name!r}: the file's ending must be one of {', '.join(endings)}")


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
        return cls("simulated", timeline, waits_for_ever(timeline))

    @classmethod
    def measured(cls, recording: Recording) -> "Layer":
        return cls("measured", recording.timeline, recording.waits)


def drawn_length(timeline: Timeline) -> float:
    """The time that a drawing shows: the makespan, and some more where ranks wait for ever."""
    return timeline.makespan if timeline.hang is None else 1.3 * timeline.makespan or 1.0


def figures_of(timeline: Timeline, unit: str = "") -> list[str]:
    """The figures of a whole step in words; beside a measured bubble stands the idle share of all ranks."""
    return [
        f"makespan {short_number(timeline.makespan)} {unit}".rstrip(),
        f"span {short_number(timeline.span_cost)} {unit}".rstrip(),
        f"bubble {timeline.bubble_rate:.2%}",
        *([f"idle of all ranks {timeline.idle_share:.2%}"] if timeline.measured else []),
    ]


def runs_beside(step: Step) -> bool:
    """True for what a rank does beside its compute."""
    return parts(step)[0].op.resource is not Resource.COMPUTE


def waits_for_ever(timeline: Timeline) -> tuple[tuple[Wait, ...], ...]:
    """Each rank's wait at a hang, from its last action to the end of the drawing."""
    if timeline.hang is None:
        return ()
    waits: list[tuple[Wait, ...]] = [()] * len(timeline.events)
    for rank in timeline.hang.waits:
        own = (event for event in timeline.events[rank] if not runs_beside(event.action))
        start = max((event.end for event in own), default=0.0)
        waits[rank] = (Wait(timeline.hang.awaited(rank), start, drawn_length(timeline)),)
    return tuple(waits)


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
    return all(layer.timeline.costs.has_bytes for layer in layers)


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
        timeline = recorded.simulated
        values["simulated"] = {
            "title": timeline.title,
            "compute": timeline.span_cost * (1 - timeline.bubble_rate),
            "ranks": [
                [[str(event.action), round(event.start, 6), round(event.end, 6)] for event in events]
                for events in timeline.events
            ],
        }
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
        if (simulated := values.get("simulated")) is not None:
            simulated = Timeline.from_events(
                [[_event(*row) for row in rank] for rank in simulated["ranks"]],
                stages_per_rank=recording.stages_per_rank,
                compute=float(simulated["compute"]),
                title=escaped(str(simulated["title"])),
            )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is no recorded step: {error}") from None
    return RecordedStep(recording, simulated)


def _event(text: str, start: float, end: float) -> Event:
    if not 0 <= start <= end:
        raise ValueError(f"{[text, start, end]} is no event")
    return Event(parse_step(text), float(start), float(end))


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
    RECOMPUTE = "R", "recompute", "#8C7AB8", "#FFFFFF"
    OFFLOAD = "O", "offload", "#B8B08A", "#1A1A1A"
    RELOAD = "L", "reload", "#D9D2AC", "#1A1A1A"
    REDUCE_GRAD = "G", "gradient reduction", "#8FD0F0", "#1A1A1A"
    STEP = "S", "optimizer step", "#4A4A4A", "#FFFFFF"
    WAIT = "/", "waits for ever", "#F7DDD0", "#A33C00"
    IDLE = "·", "idle", "#ECEEF1", "#9AA0A8"

    def __init__(self, letter: str, word: str, colour: str, ink: str) -> None:
        self.letter, self.word, self.colour, self.ink = letter, word, colour, ink


KIND_OF = {op: kind for op in Op for kind in Kind if op.name in (kind.letter, kind.name)}


#: the mark behind the number of a forward, which it has in text too
WHAT_KEEPS = "K: keeps all activations, recomputes none"


@dataclass(frozen=True, slots=True)
class Part:
    """One action of a box; a fused pair is a box of two parts, which share its time.

    `local_stage` counts the stages of one rank from 0; `microbatch` is -1 if the action has none. `keeps`: a forward
    that is marked to keep all activations.
    """

    kind: Kind
    local_stage: int
    microbatch: int
    keeps: bool = False

    @property
    def number(self) -> str:
        """The microbatch as a label has it, with the mark of one that keeps; empty if the action has none."""
        return f"{self.microbatch}{'K' * self.keeps}" if self.microbatch >= 0 else ""

    @property
    def colours(self) -> tuple[str, str]:
        """The colour, a paler shade for every further local stage, and that of text on it."""
        if not self.local_stage:
            return self.kind.colour, self.kind.ink
        paler = min(0.66, 0.42 * self.local_stage)
        channels = [int(self.kind.colour[i : i + 2], 16) for i in (1, 3, 5)]
        return "#" + "".join(f"{round(own + (255 - own) * paler):02x}" for own in channels), "#1A1A1A"


_BESIDE = frozenset(kind for op, kind in KIND_OF.items() if op.resource is not Resource.COMPUTE)


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of one rank's time, in the timeline's own unit."""

    start: float
    end: float
    parts: tuple[Part, ...]

    @property
    def beside(self) -> bool:
        """True for a box that runs beside the rank's compute, as a reduction does."""
        return self.parts[0].kind in _BESIDE


Row = tuple[Box, ...]


def boxes_of(timeline: Timeline) -> tuple[Row, ...]:
    """The boxes of each rank, in order of time; actions that took no time have none, a wait at a hang has one."""
    rows = []
    waits = waits_for_ever(timeline) or ((),) * len(timeline.events)
    for events, own in zip(timeline.events, waits, strict=True):
        actions = [parts(event.action) for event in events]
        stages = sorted({action.stage for group in actions for action in group if action.stage >= 0})
        local = {stage: index for index, stage in enumerate(stages)}
        rows.append(
            tuple(
                Box(
                    event.start,
                    event.end,
                    tuple(Part(KIND_OF[own.op], local.get(own.stage, 0), own.microbatch, own.keeps) for own in group),
                )
                for event, group in zip(events, actions, strict=True)
                if event.end > event.start
            )
            + tuple(Box(wait.start, wait.end, (Part(Kind.WAIT, 0, ALL),)) for wait in own)
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
