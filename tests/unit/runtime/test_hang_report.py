"""A rank that cannot go on asks the processes it waits for, whatever else the layout holds beside its pipeline."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from penstock.parallel.grid import Grid
from penstock.runtime import Recorder, liveness
from penstock.runtime.liveness import Absence, Process, Processes
from penstock.runtime.trace import Awaited
from penstock.runtime.transport import TransportError, _HeldSends
from penstock.schedule import Action, Direction, Op
from penstock.schedule.recording import CollectiveKind, CollectiveRecord
from penstock.schedule.rules import Channel
from penstock.settings import Layout

LAYOUTS = [
    Layout(pp=3),
    Layout(pp=3, dp=2),
    Layout(pp=3, cp=2),
    Layout(pp=3, tp=2),
    Layout(pp=2, dp=2, cp=2, tp=2),
    Layout(pp=3, dp=2, tp=2, order="pp-tp-cp-dp"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are asked, none of which answers."""
    ranks: list[int] = []

    def ask(members: Sequence[Process]) -> dict[int, Absence]:
        ranks.extend(member.rank for member in members)
        return dict.fromkeys(ranks, Absence.ENDED)

    monkeypatch.setattr(liveness, "ask", ask)
    return ranks


def recorder_of(layout: Layout, process: int) -> Recorder:
    """The recorder of one process, as an engine makes it and a watchdog completes it; each has a host of its own."""
    grid = Grid(layout, torch.device("cpu"), process)
    recorder = Recorder(grid.pp_rank, coordinates=str(grid.place))
    members = tuple(Process(rank, f"host{rank}", f"10.0.0.{rank}", 1) for rank in range(layout.world_size))
    recorder.processes = Processes(process, members, grid.pp_ranks)
    return recorder


@pytest.mark.shows(99)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_who_waits_for_a_message_asks_the_process_of_its_own_pipeline_that_owes_it(
    layout: Layout, asked: list[int]
) -> None:
    for process in range(layout.world_size):
        place = layout.coordinates(process)
        for pp in {place.pp - 1, place.pp + 1} & set(range(layout.pp)):
            recorder, owing = recorder_of(layout, process), layout.rank_of(**{**place._asdict(), "pp": pp})
            asked.clear()
            recorder.awaits(recorder.begin(Action(Op.F, place.pp, 5)), Awaited(Direction.FORWARD, pp, 5, pp))
            assert recorder.missing() == f"; ended: process {owing} (host{owing} at 10.0.0.{owing})"
            assert asked == [owing]
            where = recorder.where()
            assert where.startswith(f"rank {place.pp} (dp {place.dp}, pp {place.pp}, cp {place.cp}, tp {place.tp}), ")
            assert where.endswith(f"waits for the output of stage {pp} for microbatch 5 from rank {pp}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_who_computes_asks_the_other_processes_of_its_pipeline(layout: Layout, asked: list[int]) -> None:
    for process in range(layout.world_size):
        recorder, place = recorder_of(layout, process), layout.coordinates(process)._asdict()
        asked.clear()
        recorder.begin(Action(Op.F, place["pp"], 0))
        recorder.missing()
        assert asked == [rank for pp in range(layout.pp) if (rank := layout.rank_of(**{**place, "pp": pp})) != process]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp", "cp"), ("pp", "tp")])
def test_who_waits_for_a_collective_asks_the_processes_of_its_group(
    layout: Layout, axes: tuple[str, ...], asked: list[int]
) -> None:
    for group in layout.groups(*axes):
        for process, within in product(group, (False, True)):
            recorder = recorder_of(layout, process)
            recorder.awaited = CollectiveRecord(CollectiveKind.GRADIENTS, 8, 0, group)
            asked.clear()
            if within:
                with recorder.collective("finish the gradients"):
                    recorder.missing()
            else:
                recorder.begin(Action(Op.F, recorder.rank, 0))
                recorder.missing()
            assert asked == [rank for rank in group if rank != process]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_who_meets_all_others_asks_all_others(layout: Layout, asked: list[int]) -> None:
    for process in range(layout.world_size):
        recorder = recorder_of(layout, process)
        asked.clear()
        with recorder.collective("agree on the batch"):
            recorder.missing()
        assert asked == [rank for rank in range(layout.world_size) if rank != process]


def test_a_message_that_was_not_taken_says_how_long_it_was_offered() -> None:
    class Offered:
        def wait(self) -> None:
            raise RuntimeError("Timed out waiting")

    channel = Channel(0, 1, Direction.BACKWARD)
    sends = _HeldSends(channel, are_polled=False)
    sends.add(([torch.zeros(1)], [Offered()]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TransportError, match=r"^gradients from rank 0 to rank 1 were not taken after 0\.\d s \(Timed"):
        sends.settle()


def test_a_process_listens_where_it_reaches_the_place_at_which_all_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with liveness.listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
