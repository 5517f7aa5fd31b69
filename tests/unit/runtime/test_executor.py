"""The executor over the in-process transport: all ranks in one thread, so that every state can be looked at."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import schedule
from penstock.model import Lane, Sequences
from penstock.runtime import (
    Boundary,
    Deadlock,
    Executor,
    Feed,
    Header,
    InProcessHub,
    InProcessTransport,
    Message,
    PipelineError,
    Recorder,
    Stage,
    run_together,
)
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Action, Op

HIDDEN = 4


class Layer(nn.Module):
    """Counts its calls; the last thing it does is an addition, which keeps no operand."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)))
        self.num_calls = 0
        self.fail_at = fail_at

    def forward(self, x: Tensor) -> Tensor:
        if self.num_calls == self.fail_at:
            raise ZeroDivisionError("made to fail")
        self.num_calls += 1
        return x + torch.tanh(x @ self.weight)


class Pipeline:
    """All ranks of one pipeline in this thread."""

    def __init__(
        self,
        name: str,
        ranks: int,
        microbatches: int,
        layers: Sequence[Layer] | None = None,
        stages_per_rank: int = 1,
        receives_ahead: int = 2,
    ) -> None:
        built = schedule.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        self.program = schedule.lower(built, receives_ahead=receives_ahead)
        self.layers = layers or [Layer() for _ in range(built.placement.num_stages)]
        self.hub = InProcessHub()
        self.executors = [
            Executor(
                self.program,
                {
                    number: Stage(number, [("layer", self.layers[number])], Boundary(HIDDEN, torch.float32))
                    for number in built.placement.stages_of(rank)
                },
                InProcessTransport(self.hub, rank),
                Recorder(rank),
            )
            for rank in range(ranks)
        ]

    def run(self, lengths: Sequence[int]) -> list[list[Tensor]]:
        return run_together(self.executors, [self.feeds(lengths)] * len(self.executors))

    @staticmethod
    def feeds(lengths: Sequence[int]) -> list[Feed]:
        return [Feed(n, Sequences.from_lengths([n]), torch.ones(n, HIDDEN), torch.sum) for n in lengths]


@pytest.mark.shows(2, 3)
@pytest.mark.parametrize("name", ["afab", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (3, 2), (4, 8), (8, 5)])
def test_peak_live_tapes_are_the_simulated_ones(name: str, ranks: int, microbatches: int) -> None:
    pipeline = Pipeline(name, ranks, microbatches)
    pipeline.run([3] * microbatches)
    simulated = schedule.simulate(pipeline.program).peak_live_microbatches
    assert [executor.peak_live_tapes for executor in pipeline.executors] == list(simulated)


@pytest.mark.shows(9)
@pytest.mark.parametrize("name", ["afab", "1f1b", "inference"])
def test_nothing_is_pending_after_a_step(name: str) -> None:
    pipeline = Pipeline(name, 3, 4)
    pipeline.run([2, 3, 4, 5])
    messages = 4 * 2 if name == "inference" else 2 * 4 * 2
    assert pipeline.hub.num_messages == messages
    assert [executor.transport.num_pending() for executor in pipeline.executors] == [0, 0, 0]


@pytest.mark.shows(18)
def test_the_data_of_an_output_is_gone_once_it_is_sent() -> None:
    class Watched(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            storages.append(StorageWeakRef(y.untyped_storage()))
            return y

    class Wire(InProcessTransport):
        """Like a real wire: what arrives is a copy."""

        def send(self, channel: Line, message: Message) -> None:
            alive.append([not storage.expired() for storage in storages])
            super().send(channel, Message((message.tensors[0].clone(),)))

    storages: list[StorageWeakRef] = []
    alive: list[list[bool]] = []
    pipeline = Pipeline("afab", 2, 4, [Watched(), Layer()])
    pipeline.executors[0].transport = Wire(pipeline.hub, 0)
    pipeline.run([2, 2, 2, 2])
    # At each send of stage 0, which holds a tape for every microbatch so far, only the tensor being sent is there.
    assert alive == [[m == now for m in range(now + 1)] for now in range(4)]


class Watched:
    """Whatever enters or leaves the model in a step, by kind, to be seen alive or gone: storages, so also as views."""

    def __init__(self) -> None:
        self.storages: dict[str, list[StorageWeakRef]] = {"tokens": [], "outputs": [], "results": []}
        self.finishes: list[weakref.ref[Callable[[Tensor], Tensor]]] = []

    def see(self, kind: str, tensor: Tensor) -> Tensor:
        self.storages[kind].append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> set[str]:
        alive = {kind for kind, found in self.storages.items() if not all(one.expired() for one in found)}
        return alive | {"finish" for ref in self.finishes if ref() is not None}

    def feed(self, num_tokens: int, fail: bool) -> Feed:
        def finish(output: Tensor) -> Tensor:
            if fail:
                raise ZeroDivisionError("made to fail")
            return self.see("results", output.sum())

        self.finishes.append(weakref.ref(finish))
        tokens = self.see("tokens", torch.ones(num_tokens, HIDDEN))
        return Feed(num_tokens, Sequences.from_lengths([num_tokens]), tokens, finish)


class WatchedLayer(Layer):
    def __init__(self, watched: Watched, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        return self.watched.see("outputs", super().forward(x))


class BrokenWire(InProcessTransport):
    """Fails at its fourth receive. With one receive ahead, an output waits to be sent behind it (1F1, 1RECV_F2)."""

    num_left = 3

    def receive(self, channel: Line, header: Header | None) -> Receipt:
        self.num_left -= 1
        if self.num_left < 0:
            raise ZeroDivisionError("made to fail")
        return super().receive(channel, header)


@dataclass(frozen=True)
class Shape:
    """A schedule's sizes; on one rank its stages hand their outputs to each other."""

    name: str
    ranks: int = 3
    stages_per_rank: int = 1


SHAPES = (
    Shape("1f1b"),
    Shape("afab"),
    Shape("interleaved", stages_per_rank=2),
    Shape("looped-bfs", ranks=1, stages_per_rank=2),
    Shape("inference"),
)
ENDINGS = ("well", "first layer", "last layer", "loss", "wire")


@pytest.mark.shows(17)
@pytest.mark.parametrize(
    ("shape", "ending"), [(s, e) for s, e in product(SHAPES, ENDINGS) if s.ranks > 1 or e != "wire"], ids=str
)
def test_no_tensor_outlives_a_step_however_it_ends(shape: Shape, ending: str) -> None:
    """No token, no output between stages and no result: the executors are there for the next step, and hold none."""
    watched, lengths = Watched(), (2, 3, 4, 5)
    num_stages = shape.ranks * shape.stages_per_rank
    layers = [
        WatchedLayer(watched, 2 if ending == place else None)
        for place in ("first layer", *["middle"] * (num_stages - 2), "last layer")
    ]
    pipeline = Pipeline(shape.name, shape.ranks, len(lengths), layers, shape.stages_per_rank, receives_ahead=1)
    if ending == "wire":
        pipeline.executors[1].transport = BrokenWire(pipeline.hub, 1)
    feeds = [watched.feed(n, ending == "loss" and n == lengths[2]) for n in lengths]
    if ending == "well":
        results = run_together(pipeline.executors, [feeds] * shape.ranks)
        del feeds
        gc.collect()
        assert watched.alive() == {"results"}, "what the caller was given, and has"
        del results
    else:
        with pytest.raises(ZeroDivisionError):
            run_together(pipeline.executors, [feeds] * shape.ranks)
        del feeds
    gc.collect()
    assert all(len(found) >= 2 for kind, found in watched.storages.items() if kind != "results" or ending == "loss")
    assert watched.alive() == set()


@pytest.mark.shows(15)
def test_an_error_keeps_its_type_and_says_where_it_happened() -> None:
    pipeline = Pipeline("1f1b", 2, 3, [Layer(), Layer(fail_at=1)])
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.run([2, 2, 2])
    assert "rank 1" in caught.value.__notes__[-1]
    assert "1F1" in caught.value.__notes__[-1]


class Spoilt(Stage):
    """A stage that gives something else than it should: its outputs, or its gradients, as `spoil` leaves them."""

    def __init__(self, layer: Layer, flow: Op, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__(0 if flow is Op.F else 1, [("layer", layer)], Boundary(HIDDEN, torch.float32))
        self.flow, self.spoil = flow, spoil

    def forward(self, *args: Any) -> Lane[Message]:
        output = yield from super().forward(*args)
        return self._spoilt(output) if self.flow is Op.F else output

    def backward(self, *args: Any) -> Lane[Message]:
        grad = yield from super().backward(*args)
        return grad if self.flow is Op.F else self._spoilt(grad)

    def _spoilt(self, message: Message) -> Message:
        return message.of_tensors(tuple(map(self.spoil, message.tensors)))


DISAGREEMENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "fewer tokens": (lambda x: x[:-1], "[4, 4] of torch.float32"),
    "another width": (lambda x: x[:, :-1], "[5, 3] of torch.float32"),
    "another dtype of that size": (lambda x: x.view(torch.int32), "[5, 4] of torch.int32"),
    "a wider dtype": (lambda x: x.double(), "[5, 4] of torch.float64"),
}


@pytest.mark.shows(12)
@pytest.mark.parametrize("flow", [Op.F, Op.B])
@pytest.mark.parametrize("spoil, came", DISAGREEMENTS.values(), ids=DISAGREEMENTS.keys())
def test_what_the_neighbour_does_not_await_never_leaves_and_its_stage_says_so(
    flow: Op, spoil: Callable[[Tensor], Tensor], came: str
) -> None:
    pipeline, giver = Pipeline("1f1b", 2, 2), 0 if flow is Op.F else 1
    stage = Spoilt(pipeline.layers[giver], flow, lambda x: spoil(x) if len(x) == 5 else x)
    first = pipeline.executors[giver]
    pipeline.executors[giver] = Executor(pipeline.program, {giver: stage}, first.transport, first.recorder)
    with pytest.raises(PipelineError) as caught:
        pipeline.run([3, 5])
    end = "last" if flow is Op.F else "first"
    assert str(caught.value) == (
        f"{giver}{flow.name}1 on rank {giver}, microbatch 1: stage {giver}, whose {end} layer is layer, "
        f"gives {came}; its neighbour awaits [5, 4] of torch.float32"
    )
    assert pipeline.hub.num_messages == (1 if flow is Op.F else 3), "those before it alone"


@pytest.mark.shows(99)
def test_when_no_rank_can_go_on_each_says_what_it_waits_for() -> None:
    pipeline = Pipeline("1f1b", 2, 2)
    # A program that cannot hang is not to be had, so the wire is cut.
    pipeline.executors[0].transport.send = lambda channel, tensor: None  # type: ignore[method-assign]
    with pytest.raises(Deadlock) as caught:
        pipeline.run([2, 2])
    assert "rank 0, step 0: in 0B0" in str(caught.value)
    assert "waits for the gradient of stage 1 for microbatch 0 from rank 1" in str(caught.value)
    assert "waits for the output of stage 0 for microbatch 0 from rank 0" in str(caught.value)


@pytest.mark.shows(100)
def test_the_trace_holds_every_action_in_order() -> None:
    pipeline = Pipeline("1f1b", 3, 4)
    for executor in pipeline.executors:
        executor.recorder.begin_step(7)
    pipeline.run([2, 2, 2, 2])
    for rank, executor in enumerate(pipeline.executors):
        actions = [record.action for record in executor.recorder.records()]
        assert actions == [a for a in pipeline.program.ranks[rank] if a != Action(Op.STEP)]
        assert all(r.begin_ns <= r.start_ns <= r.end_ns for r in executor.recorder.records())


def test_an_unproved_program_does_not_run() -> None:
    built = schedule.lower(schedule.build("1f1b", ranks=2, microbatches=2))
    broken = schedule.Program(built.schedule, (built.ranks[0][:-1], built.ranks[1]))
    stage = Stage(0, [("layer", Layer())], Boundary(HIDDEN, torch.float32))
    with pytest.raises(schedule.ScheduleError, match="STEP"):
        Executor(broken, {0: stage}, InProcessTransport(InProcessHub(), 0), Recorder(0))


def test_the_peak_of_live_tapes_is_that_of_the_last_step() -> None:
    pipeline = Pipeline("afab", 1, 4)
    [executor] = pipeline.executors
    pipeline.run([3] * 4)
    assert executor.peak_live_tapes == 4
    # A step that fails in its first forward keeps one tape at the most.
    with pytest.raises(Exception, match=r"Layer|shape|size|mat"):
        pipeline.executors[0].run([Feed(1, Sequences.from_lengths([1]), torch.ones(1, HIDDEN + 1), torch.sum)] * 4)
    assert executor.peak_live_tapes <= 1
