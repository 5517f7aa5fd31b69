"""Receives and their handles, over programs of every schedule: posted early, waited for once, none left."""

from collections import Counter

import pytest
import torch
from torch import nn

from penstock import schedule
from penstock.model import Sequences, WeightGradients, defer, switch_linears
from penstock.runtime import (
    Boundary,
    Executor,
    Feed,
    Header,
    InProcessHub,
    InProcessTransport,
    Message,
    Recorder,
    Stage,
    run_together,
)
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Action, Channel, Direction, Op
from penstock.schedule.actions import COMPUTE, parts
from penstock.schedule.recording import Record

HIDDEN, RECEIVES_AHEAD = 2, 2
NAMES = [name for name in schedule.names() if name != "auto"]


class Handle:
    """A receive that counts how often it is waited for."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt, self.num_waits = receipt, 0

    def ready(self) -> bool:
        return self.receipt.ready()

    def wait(self) -> Message:
        self.num_waits += 1
        return self.receipt.wait()


class Counting(InProcessTransport):
    """Keeps every handle it gives, by channel in the order of posting."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.handles: dict[Line, list[Handle]] = {}
        self.num_settled = 0

    def receive(self, channel: Line, header: Header | None) -> Handle:  # type: ignore[override]
        handle = Handle(super().receive(channel, header))
        self.handles.setdefault(channel, []).append(handle)
        return handle

    def settle(self) -> None:
        self.num_settled += 1


class Watching(Recorder):
    """Whenever compute starts: how many receives of each channel are posted by then, and how many were used before."""

    def __init__(self, rank: int, transport: Counting) -> None:
        super().__init__(rank)
        self.transport = transport
        self.seen: list[dict[Line, tuple[int, int]]] = []

    def begin(self, action: schedule.Step) -> Record:
        if all(one.op in COMPUTE for one in parts(action)):
            handles = self.transport.handles
            self.seen.append({c: (len(of), sum(h.num_waits for h in of)) for c, of in handles.items()})
        return super().begin(action)


class Rank:
    def __init__(self, program: schedule.Program, rank: int, hub: InProcessHub) -> None:
        self.transport = Counting(hub, rank)
        self.recorder = Watching(rank, self.transport)
        stages = {}
        for number in program.placement.stages_of(rank):
            layer, owner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()), WeightGradients()
            switch_linears(layer)
            defer(layer, owner)
            stages[number] = Stage(number, [("layer", layer)], Boundary(HIDDEN, torch.float32), owner)
        self.executor = Executor(program, stages, self.transport, self.recorder)


def run(name: str, num_ranks: int, num_microbatches: int, num_steps: int) -> tuple[schedule.Program, list[Rank]]:
    built = schedule.build(name, ranks=num_ranks, microbatches=num_microbatches)
    program = schedule.lower(built, receives_ahead=RECEIVES_AHEAD)
    hub = InProcessHub()
    ranks = [Rank(program, rank, hub) for rank in range(num_ranks)]
    feeds = [
        Feed(n, Sequences.from_lengths([n]), torch.ones(n, HIDDEN), torch.sum) for n in range(1, num_microbatches + 1)
    ]
    for _ in range(num_steps):
        run_together([rank.executor for rank in ranks], [feeds] * num_ranks)
    return program, ranks


def received(program: schedule.Program, rank: int) -> Counter[Line]:
    """How many messages of each channel a rank's program receives."""
    found: Counter[Line] = Counter()
    for step in program.ranks[rank]:
        if isinstance(step, Action) and step.op in (Op.RECV_F, Op.RECV_B):
            placement, forward = program.placement, step.op is Op.RECV_F
            giver = placement.previous(step.stage) if forward else placement.next(step.stage)
            assert giver is not None
            found[Channel(placement.rank_of(giver), rank, Direction.FORWARD if forward else Direction.BACKWARD)] += 1
    return found


@pytest.mark.shows(9)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 6), (3, 4), (4, 7)])
@pytest.mark.parametrize("name", NAMES)
def test_each_handle_is_waited_for_once_and_none_is_left(name: str, num_ranks: int, num_microbatches: int) -> None:
    program, ranks = run(name, num_ranks, num_microbatches, num_steps=2)
    num_messages = 0
    for number, rank in enumerate(ranks):
        handles = rank.transport.handles
        assert {channel: len(of) for channel, of in handles.items()} == {
            channel: 2 * count for channel, count in received(program, number).items()
        }
        assert {handle.num_waits for of in handles.values() for handle in of} <= {1}
        assert rank.transport.num_pending() == 0
        assert rank.transport.num_settled == 2, "its sends have left when a step ends"
        num_messages += sum(map(len, handles.values()))
    assert num_messages == ranks[0].transport.hub.num_messages > 0


@pytest.mark.shows(9)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 6), (3, 4), (4, 7)])
@pytest.mark.parametrize("name", NAMES)
def test_when_an_action_computes_the_receives_behind_its_own_are_posted(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    """So a message travels while its rank computes: whatever an action has not used yet, the next one's is open too."""
    program, ranks = run(name, num_ranks, num_microbatches, num_steps=1)
    num_seen = 0
    for number, rank in enumerate(ranks):
        computed = [step for step in program.ranks[number] if all(one.op in COMPUTE for one in parts(step))]
        assert len(rank.recorder.seen) == len(computed)
        for seen in rank.recorder.seen:
            for channel, total in received(program, number).items():
                num_posted, num_used = seen.get(channel, (0, 0))
                assert num_posted >= min(num_used + RECEIVES_AHEAD, total)
                num_seen += 1
    assert num_seen > 0
