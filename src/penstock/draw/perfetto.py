"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open.

One process a rank, with a thread each for its compute, its reductions and its moves to host memory, an arrow for each
message, and its live microbatches (or their bytes, if they are known) as a counter.

Source: Trace Event Format (D. Duca, D. Sinclair), as Perfetto imports it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.draw.layers import KIND_OF, Layer, bytes_are_known, check_layers
from penstock.io.files import whole_file
from penstock.schedule import Op
from penstock.schedule.actions import Resource, parts

NANOSECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_THREADS = {Resource.COMPUTE: 1, Resource.REDUCTION: 2, Resource.HOST_LINK: 3}
_FORWARD, _BACKWARD = {Op.F}, {Op.B, Op.I}

Entry = dict[str, Any]


def write_trace(path: str | Path, layers: Sequence[Layer], *, unit: str = "", command: str = "") -> None:
    """Write a trace into a JSON file, an event a line; an existing file is overwritten.

    `unit` is that of the layers' times; without one, 1 is shown as 1 ms.

    Raises: ValueError for layers that cannot be drawn together, or an unknown unit.
    """
    check_layers(layers)
    if unit and unit not in NANOSECONDS:
        raise ValueError(f"no unit of time is called {unit!r}; there are {', '.join(NANOSECONDS)}")
    facts = {
        "title": layers[0].timeline.title,
        "command": command,
        "unit": unit or "none: 1 is shown as 1 ms",
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})[:-1]
    with whole_file(path) as new, new.open("w", encoding="utf-8") as file:
        file.write(f'{head}, "traceEvents": [\n')
        for number, entry in enumerate(entries(layers, unit)):
            file.write((",\n" if number else "") + json.dumps(entry, separators=(",", ":")))
        file.write("\n]}\n")


def entries(layers: Sequence[Layer], unit: str = "") -> Iterator[Entry]:
    """The events of the trace as plain values; times in microseconds, rounded to nanoseconds."""
    nanoseconds = NANOSECONDS[unit or "ms"]
    for rank in range(len(layers[0].timeline.events)):
        yield {"ph": "M", "name": "process_name", "pid": _pid(rank), "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": _pid(rank), "args": {"sort_index": rank}}
    in_bytes = bytes_are_known(layers)
    for number, layer in enumerate(layers):
        yield from _entries_of(layer, number, nanoseconds, "" if len(layers) == 1 else f", {layer.name}", in_bytes)


def _pid(rank: int) -> int:
    # Perfetto takes process 0 for the kernel's idle task.
    return rank + 1


def _entries_of(layer: Layer, number: int, nanoseconds: float, suffix: str, in_bytes: bool) -> Iterator[Entry]:
    """The events of one layer, whose names end in `suffix`."""

    def tid(rank: int, thread: int) -> int:
        """A number that is unique in the trace, since Perfetto identifies a thread by its number alone."""
        return 100 * _pid(rank) + 10 * number + thread

    def at(rank: int, kind: str, time: float, *, thread: int = 1, **more: Any) -> Entry:
        start_us = round(time * nanoseconds) / 1000
        return {"ph": kind, "pid": _pid(rank), "tid": tid(rank, thread), "ts": start_us, **more}

    def slice_of(rank: int, start: float, end: float, **more: Any) -> Entry:
        # The difference of rounded times: slices that touch must not overlap, or one of them is dropped.
        took_us = (round(end * nanoseconds) - round(start * nanoseconds)) / 1000
        return at(rank, "X", start, dur=took_us, **more)

    what = "bytes" if in_bytes else "microbatches"
    live_over_time = layer.timeline.live_bytes if in_bytes else layer.timeline.live_microbatches
    for rank, events in enumerate(layer.timeline.events):
        used = {parts(event.action)[0].op.resource for event in events}
        for resource, thread in _THREADS.items():
            if resource is Resource.HOST_LINK and resource not in used:
                continue
            ids = {"ph": "M", "pid": _pid(rank), "tid": tid(rank, thread)}
            yield {"name": "thread_name", **ids, "args": {"name": f"{resource.value}{suffix}"}}
            yield {"name": "thread_sort_index", **ids, "args": {"sort_index": 10 * number + thread}}
        for event in events:
            first = parts(event.action)[0]
            named = {"stage": first.stage, "microbatch": first.microbatch}
            thread = _THREADS[first.op.resource]
            args = {key: value for key, value in named.items() if value >= 0}
            kind = KIND_OF[first.op].word
            yield slice_of(rank, event.start, event.end, thread=thread, name=str(event.action), cat=kind, args=args)
        for wait in layer.waits[rank] if layer.waits else ():
            if wait.end > wait.start:
                yield slice_of(rank, wait.start, wait.end, name=f"wait for rank {wait.rank}", cat="wait")
        for time, live in live_over_time(rank):
            yield at(rank, "C", time, name=f"live{suffix}", args={what: live})
    # Arrows from the action that made a message to the one that needs it, if they are on two ranks.
    makers = {
        (action.op in _FORWARD, action.stage, action.microbatch): (rank, event)
        for rank, events in enumerate(layer.timeline.events)
        for event in events
        for action in parts(event.action)
        if action.op in _FORWARD | _BACKWARD
    }
    arrow = number << 40
    for (forward, stage, microbatch), (rank, event) in makers.items():
        taker = makers.get((forward, stage + (1 if forward else -1), microbatch))
        if taker is None or taker[0] == rank:
            continue
        arrow += 1
        message = {"name": "output" if forward else "gradient", "cat": "message", "id": arrow}
        # An arrow belongs to the slice that is open at its time: inside the maker, just before it ends.
        yield at(rank, "s", max(event.start, event.end - 1 / nanoseconds), **message)
        yield at(taker[0], "f", taker[1].start, bp="e", **message)
