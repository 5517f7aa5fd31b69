"""The trace for Perfetto: threads, slices, arrows and counters as its importer wants them."""

import json
from collections import Counter, defaultdict
from itertools import pairwise, product
from pathlib import Path

import pytest

from penstock import schedule
from penstock.draw.layers import Layer
from penstock.draw.perfetto import Entry, entries, write_trace
from penstock.schedule import Costs

COSTS = Costs(forward=1.25, backward_input=1 / 3, backward_weight=0.7, transfer=0.1, reduce=0.6, step=0.2)
GRID = [
    (name, ranks, microbatches) for name, ranks, microbatches in product(("afab", "1f1b", "inference"), (1, 4), (1, 7))
]


def program_of(name: str, ranks: int, microbatches: int) -> schedule.Program:
    return schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))


def of_kind(trace: list[Entry], kind: str) -> list[Entry]:
    return [entry for entry in trace if entry["ph"] == kind]


def nanoseconds(microseconds: float) -> int:
    """The whole number that Perfetto reads."""
    assert microseconds >= 0
    return round(microseconds * 1000)


def slices_by_thread(trace: list[Entry]) -> dict[int, list[tuple[int, int, str]]]:
    threads = defaultdict(list)
    for entry in of_kind(trace, "X"):
        start = nanoseconds(entry["ts"])
        threads[entry["tid"]].append((start, start + nanoseconds(entry["dur"]), entry["name"]))
    return {thread: sorted(slices) for thread, slices in threads.items()}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), GRID)
def test_a_process_a_rank_and_every_event_a_slice(name: str, ranks: int, microbatches: int):
    timeline = schedule.simulate(program_of(name, ranks, microbatches), COSTS)
    trace = list(entries([Layer.simulated(timeline)]))
    names = {e["pid"]: e["args"]["name"] for e in of_kind(trace, "M") if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(f"rank {rank}" for rank in range(ranks))
    assert all(entry["pid"] >= 1 and entry.get("tid", 1) >= 1 for entry in trace)
    seen = Counter((names[e["pid"]], e["name"]) for e in of_kind(trace, "X"))
    assert seen == Counter((f"rank {rank}", str(e.action)) for rank, own in enumerate(timeline.events) for e in own)
    longest = max(end for slices in slices_by_thread(trace).values() for _, end, _ in slices)
    assert longest == round(timeline.makespan * 1e6)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), GRID)
@pytest.mark.parametrize("unit", ["", "s", "us"])
def test_slices_of_a_thread_never_overlap(name: str, ranks: int, microbatches: int, unit: str):
    timeline = schedule.simulate(program_of(name, ranks, microbatches), COSTS)
    threads = slices_by_thread(list(entries([Layer.simulated(timeline)], unit)))
    assert threads
    for slices in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(slices))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), GRID)
def test_every_message_is_an_arrow_from_its_maker_to_its_taker(name: str, ranks: int, microbatches: int):
    program = program_of(name, ranks, microbatches)
    trace = list(entries([Layer.simulated(schedule.simulate(program, COSTS))]))
    threads = slices_by_thread(trace)
    tails, heads = ({entry["id"]: entry for entry in of_kind(trace, kind)} for kind in "sf")
    assert len(of_kind(trace, "s")) == len(tails) == schedule.verify(program).num_messages
    assert tails.keys() == heads.keys()
    for number, tail in tails.items():
        head = heads[number]
        assert (tail["name"], tail["cat"]) == (head["name"], head["cat"])
        assert head["bp"] == "e"
        assert tail["pid"] != head["pid"]
        leaves, arrives = nanoseconds(tail["ts"]), nanoseconds(head["ts"])
        (maker,) = [own for start, end, own in threads[tail["tid"]] if start <= leaves < end]
        (taker,) = [own for start, _, own in threads[head["tid"]] if start == arrives]
        # A forward of stage s goes to stage s + 1, a backward of stage s to stage s - 1.
        distance = 1 if tail["name"] == "output" else -1
        op = "F" if distance == 1 else "B"
        stage, microbatch = maker.split(op)
        assert taker == f"{int(stage) + distance}{op}{microbatch}"


@pytest.mark.parametrize(("name", "ranks", "microbatches"), GRID)
def test_the_counter_rises_to_the_peak_and_ends_at_nothing(name: str, ranks: int, microbatches: int):
    timeline = schedule.simulate(program_of(name, ranks, microbatches), COSTS)
    counters = defaultdict(list)
    for entry in of_kind(list(entries([Layer.simulated(timeline)])), "C"):
        counters[entry["pid"]].append(entry["args"]["microbatches"])
    assert [max(counters[rank + 1]) for rank in range(ranks)] == list(timeline.peak_live_microbatches)
    assert all(values[-1] == 0 for values in counters.values())


def test_the_file_is_json_with_the_same_entries(tmp_path: Path):
    layers = [Layer.simulated(schedule.simulate(program_of("1f1b", 2, 3), COSTS))]
    write_trace(tmp_path / "trace.json", layers, command='penstock "quoted"')
    told = json.loads((tmp_path / "trace.json").read_text())
    assert told["traceEvents"] == json.loads(json.dumps(list(entries(layers))))
    assert told["otherData"]["title"] == layers[0].timeline.title
    assert told["otherData"]["command"] == 'penstock "quoted"'
    for entry in told["traceEvents"]:
        assert entry["ph"] in "MXsfC"
        assert entry["ph"] == "M" or isinstance(entry["ts"], float)
