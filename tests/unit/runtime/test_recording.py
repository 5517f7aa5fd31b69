"""Recordings: nothing of a rank's time is lost or counted twice, and a file gives back what was written."""

import json
import random
from itertools import product
from pathlib import Path

import pytest

from penstock import schedule
from penstock.draw.layers import RecordedStep, read_recorded_step, write_recorded_step
from penstock.schedule import Action, Costs, Op, Pair
from penstock.schedule.actions import parts
from penstock.schedule.recording import CollectiveKind, Record, Recording, Wait
from tests.unit.runtime.test_executor import Pipeline


def made_up(seed: int, ranks: int = 3) -> Recording:
    """Ranks that walk a program at random speeds, with waits of random lengths."""
    chance = random.Random(seed)
    program = schedule.lower(schedule.build("1f1b", ranks=ranks, microbatches=4))
    rows = []
    for rank, steps in enumerate(program.ranks):
        now, own = 1e6 + chance.random(), []
        for step in steps:
            begin = now = now + chance.random() * 0.1
            waits = []
            if isinstance(step, Action) and step.op in (Op.F, Op.B):
                waits = [[(rank + 1) % ranks, now]]
                now += chance.choice([0.0, 1.0]) * chance.random()
            start = now
            now += chance.random()
            own.append([str(step), begin, start, now, waits])
        rows.append(own)
    return Recording.gathered(rows, title="made up", step=7, stages_per_rank=1)


@pytest.mark.parametrize("seed", range(20))
def test_where_the_time_went_adds_up_to_the_makespan(seed: int):
    recording = made_up(seed)
    assert min(span.begin for rank in recording.spans for span in rank) == 0.0
    for spans, spent in zip(recording.spans, recording.spent(), strict=True):
        parcels = (spent.compute, spent.transfers, spent.reduction, spent.step, spent.between, spent.outside)
        assert spent.collectives == 0
        # Times of 1e6 ms keep their last 1e-10; a step has some dozens of them.
        assert sum(parcels) + sum(spent.waiting.values()) == pytest.approx(recording.makespan, abs=1e-7)
        assert min(*parcels, *spent.waiting.values()) >= -1e-7
        compute = [s.duration for s in spans if parts(s.action)[0].op in (Op.F, Op.B)]
        assert len(compute) == 2 * 4
        assert spent.compute == pytest.approx(sum(compute))
        assert spent.step > 0


def test_each_part_of_the_time_is_found():
    recording = Recording.gathered(
        [
            [
                ["0RECV_B0", 10.0, 10.0, 10.5, []],
                ["0F0", 11.0, 11.0, 13.0, []],
                ["0SEND_F0", 13.0, 13.0, 13.25, []],
                ["0B0", 13.25, 17.0, 20.0, [[1, 13.5]]],
                ["0REDUCE_GRAD", 20.0, 20.0, 21.0, []],
                ["STEP", 24.0, 24.0, 26.0, []],
            ],
            [["(1F1;1B0)OVERLAP_F_B", 12.0, 16.0, 30.0, [[0, 12.0], [2, 13.0]]]],
        ],
        title="by hand",
        step=1,
        stages_per_rank=1,
    )
    first, second = recording.spent()
    assert recording.makespan == 20.0
    assert (first.compute, first.waiting, first.transfers) == (5.0, {1: 3.5}, 0.75)
    # One second of starting it, three of waiting for it before the optimizer step.
    assert (first.reduction, first.step, first.between, first.outside) == (4.0, 2.0, 0.75, 4.0)
    assert (second.compute, second.waiting, second.outside) == (14.0, {0: 1.0, 2: 3.0}, 2.0)
    assert recording.waits[1] == (Wait(0, 2.0, 3.0), Wait(2, 3.0, 6.0))
    assert [str(event.action) for event in recording.timeline.events[0]] == ["0F0", "0B0", "0REDUCE_GRAD", "STEP"]
    assert recording.timeline.makespan == recording.makespan


def with_collectives() -> Recording:
    """A pair that waits for one exchange and not for another, and a reduction that ends while the optimizer waits."""
    return Recording.gathered(
        [
            [
                ["(0F1;0B0)OVERLAP_F_B", 10.0, 10.0, 20.0, []],
                ["0REDUCE_GRAD", 20.0, 20.0, 20.5, []],
                ["STEP", 21.0, 21.0, 26.0, []],
            ]
        ],
        [
            [
                ["all-to-all", 100, 11.0, 14.0, 15.0, 15.0],
                ["all-to-all", 200, 12.0, 19.0, 16.0, 19.0],
                ["gradient reduction", 300, 20.25, 24.0, 21.5, 24.5],
                ["all-reduce", 8, 19.0, 20.0, None, None],
            ]
        ],
        title="by hand",
        step=1,
        stages_per_rank=1,
    )


@pytest.mark.shows(100)
def test_what_ranks_waited_for_is_exposed_and_all_else_under_way_is_hidden():
    recording = with_collectives()
    ((spent,), (kinds,)) = recording.spent(), recording.collective_totals()
    assert (spent.compute, spent.collectives, spent.reduction, spent.step) == (7.0, 3.0, 4.0, 2.0)
    assert (spent.between, spent.idle) == (0.0, 7.0)
    assert {str(kind): (sums.number, sums.num_bytes, sums.exposed, sums.hidden) for kind, sums in kinds.items()} == {
        "all-to-all": (2, 300, 3.0, 7.0),
        "all-reduce": (1, 8, 0.0, 1.0),
        # It was taken half a second after it had ended: the rank could not go on, so that is no hidden time.
        "gradient reduction": (1, 300, 3.0, 0.75),
    }
    assert kinds[CollectiveKind.ALL_TO_ALL].hidden_share == 0.7


def test_a_file_gives_back_its_collectives(tmp_path: Path):
    recording = with_collectives()
    write_recorded_step(tmp_path / "step.json", RecordedStep(recording))
    assert read_recorded_step(tmp_path / "step.json").recording == recording


@pytest.mark.parametrize("seed", range(3))
def test_a_file_gives_back_what_was_written(seed: int, tmp_path: Path):
    recording = made_up(seed)
    simulated = schedule.simulate(
        schedule.lower(schedule.build("1f1b", ranks=3, microbatches=4)), Costs(1.5, 0.25, 1 / 3, transfer=0.1, step=1)
    )
    for wanted in (RecordedStep(recording), RecordedStep(recording, simulated)):
        write_recorded_step(tmp_path / "step.json", wanted)
        got = read_recorded_step(tmp_path / "step.json")
        assert (got.recording.title, got.recording.step) == ("made up", 7)
        assert [len(rank) for rank in got.recording.spans] == [len(rank) for rank in recording.spans]
        for own, its in zip(flat(recording), flat(got.recording), strict=True):
            assert own.action == its.action
            assert (its.begin, its.start, its.end) == pytest.approx((own.begin, own.start, own.end), abs=1e-6)
            assert [wait.rank for wait in its.waits] == [wait.rank for wait in own.waits]
        assert (got.simulated is None) == (wanted.simulated is None)
        if got.simulated is not None:
            assert got.simulated.makespan == pytest.approx(simulated.makespan, abs=1e-6)
            assert got.simulated.bubble_rate == pytest.approx(simulated.bubble_rate, abs=1e-6)
            assert got.simulated.title == simulated.title


def flat(recording: Recording) -> list[Record]:
    return [span for rank in recording.spans for span in rank]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(format="another"), ["format"]),
        (lambda values: values["measured"].pop("step"), ["'step'"]),
        (lambda values: values["measured"].update(stages_per_rank=0), ["no action"]),
        (lambda values: values["measured"].update(ranks=[[], []]), ["no action"]),
        (lambda values: values["measured"].update(ranks=5), ["not iterable"]),
        (lambda values: values["measured"].update(collectives=[[]]), ["other ranks"]),
        (lambda values: values["measured"].update(collectives=[[["walk", 1, 2, 3, 4, 5]]]), ["walk"]),
        (lambda values: values["measured"].update(collectives=[[["all-reduce", 1, 3, 2, 4, 5]]]), ["order"]),
        (lambda values: values["measured"].update(collectives=[[["all-reduce", 1, 3, 4, 6, 5]]]), ["order"]),
        (lambda values: values["measured"].update(collectives=[[["all-reduce", 1, None, 4, 6, 7]]]), ["NoneType"]),
        (lambda values: values["measured"]["ranks"][0].append(["0Q0", 1, 2, 3, []]), ["0Q0"]),
        (lambda values: values["measured"]["ranks"][0].append(["0F0", 1, 2, []]), ["unpack"]),
        (lambda values: values["measured"]["ranks"][0].append(["0F0", 3, 2, 4, []]), ["order"]),
        (lambda values: values["measured"]["ranks"][0].append(["0F0", 1, 2, 3, [[1, 2.5]]]), ["order"]),
        (lambda values: values["measured"]["ranks"][0].append(["0F0", 1, 2, 1e999, []]), ["infinity"]),
        (lambda values: values.update(simulated={"title": "", "compute": 1, "ranks": [[["0F0", 2, 1]]]}), ["no event"]),
        (lambda values: values.update(simulated={"title": ""}), ["ranks"]),
    ],
)
def test_a_file_that_is_no_recorded_step_is_refused(change, words: list[str], tmp_path: Path):
    path = tmp_path / "step.json"
    write_recorded_step(path, RecordedStep(made_up(0)))
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as refusal:
        read_recorded_step(path)
    for word in [str(path), *words]:
        assert word in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "null"])
def test_other_files_are_refused(text: str, tmp_path: Path):
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(ValueError, match="no recorded step"):
        read_recorded_step(tmp_path / "step.json")


def test_an_executor_tells_of_every_message_that_it_waits_for():
    for name, ranks, microbatches in product(("afab", "1f1b"), (1, 3), (1, 4)):
        pipeline = Pipeline(name, ranks, microbatches)
        pipeline.run([2] * microbatches)
        for rank, executor in enumerate(pipeline.executors):
            told = [(str(r.action), [peer for peer, _ in r.waits]) for r in executor.recorder.records()]
            computes = [f"{rank}{op}{m}" for op in "FB" for m in range(microbatches)]
            sources = {"F": [rank - 1] if rank else [], "B": [rank + 1] if rank < ranks - 1 else []}
            assert sorted((a, w) for a, w in told if a in computes) == sorted((a, sources[a[1]]) for a in computes)
            assert not any(waits for action, waits in told if action not in computes)
            for record in executor.recorder.records():
                moments = [record.begin_ns, *(since for _, since in record.waits), record.start_ns, record.end_ns]
                assert moments == sorted(moments)


def test_a_pair_keeps_its_action():
    pair = Pair(Action(Op.F, 1, 1), Action(Op.B, 1, 0))
    row = [[str(pair), 0, 1, 2, []]]
    assert Recording.gathered([row], title="", step=0, stages_per_rank=1).spans[0][0].action == pair
