"""The executor over the in-process transport: all ranks in one thread, so that every state can be looked at."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import schedule
from penstock.model import Sequences
from penstock.runtime import (
    Boundary,
    Deadlock,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    PipelineError,
    Recorder,
    Stage,
    run_together,
)
from penstock.runtime.transport import Line
from penstock.schedule import Action, Op

HIDDEN = 4


class Layer(nn.Module):
    """Remembers, weakly, every tensor it made; the last thing it does is an addition, which keeps no operand."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)))
        self.outputs: list[weakref.ref[Tensor]] = []
        self.fail_at = fail_at

    def forward(self, x: Tensor) -> Tensor:
        if len(self.outputs) == self.fail_at:
            raise ZeroDivisionError("made to fail")
        y = x + torch.tanh(x @ self.weight)
        self.outputs.append(weakref.ref(y))
        return y


class Pipeline:
    """All ranks of one pipeline in this thread."""

    def __init__(self, name: str, ranks: int, microbatches: int, layers: Sequence[Layer] | None = None) -> None:
        self.program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))
        self.layers = layers or [Layer() for _ in range(ranks)]
        self.hub = InProcessHub()
        self.executors = [
            Executor(
                self.program,
                rank,
                {rank: Stage(rank, [("layer", self.layers[rank])], Boundary(HIDDEN, torch.float32))},
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


@pytest.mark.shows(6)
def test_one_rank_sends_nothing() -> None:
    for name in ("afab", "1f1b", "inference"):
        pipeline = Pipeline(name, 1, 4)
        pipeline.run([2, 3, 4, 5])
        assert pipeline.hub.num_messages == 0


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

        def send(self, channel: Line, tensor: Tensor) -> None:
            alive.append([not storage.expired() for storage in storages])
            super().send(channel, tensor.clone())

    storages: list[StorageWeakRef] = []
    alive: list[list[bool]] = []
    pipeline = Pipeline("afab", 2, 4, [Watched(), Layer()])
    pipeline.executors[0].transport = Wire(pipeline.hub, 0)
    pipeline.run([2, 2, 2, 2])
    # At each send of stage 0, which holds a tape for every microbatch so far, only the tensor being sent is there.
    assert alive == [[m == now for m in range(now + 1)] for now in range(4)]


@pytest.mark.shows(17)
@pytest.mark.parametrize("fail_at", [None, 0, 2])
def test_no_tensor_outlives_a_step_however_it_ends(fail_at: int | None) -> None:
    layers = [Layer(), Layer(), Layer(fail_at)]
    pipeline = Pipeline("1f1b", 3, 4, layers)
    if fail_at is None:
        pipeline.run([2, 3, 4, 5])
    else:
        with pytest.raises(ZeroDivisionError):
            pipeline.run([2, 3, 4, 5])
    gc.collect()
    outputs = [ref for layer in layers for ref in layer.outputs]
    assert len(outputs) >= 2
    assert all(ref() is None for ref in outputs)


@pytest.mark.shows(15)
def test_an_error_keeps_its_type_and_says_where_it_happened() -> None:
    pipeline = Pipeline("1f1b", 2, 3, [Layer(), Layer(fail_at=1)])
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.run([2, 2, 2])
    assert "rank 1" in caught.value.__notes__[0]
    assert "1F1" in caught.value.__notes__[0]


@pytest.mark.shows(34)
def test_a_step_after_a_failed_one_runs_as_if_nothing_had_been() -> None:
    layers = [Layer(), Layer(fail_at=1)]
    pipeline = Pipeline("1f1b", 2, 3, layers)
    with pytest.raises(ZeroDivisionError):
        pipeline.run([2, 3, 4])
    layers[1].fail_at = None
    fresh = Pipeline("1f1b", 2, 3)
    for layer in layers:
        layer.weight.grad = None
    assert torch.stack(pipeline.run([2, 3, 4])[1]).tolist() == torch.stack(fresh.run([2, 3, 4])[1]).tolist()
    for mine, theirs in zip(layers, fresh.layers, strict=True):
        assert mine.weight.grad is not None and theirs.weight.grad is not None
        assert torch.equal(mine.weight.grad, theirs.weight.grad)


@pytest.mark.shows(19)
def test_two_pipelines_in_one_process_share_nothing() -> None:
    alone = [Pipeline("1f1b", 2, 3).run([2, 3, 4]), Pipeline("afab", 3, 2).run([5, 1])]
    first, second = Pipeline("1f1b", 2, 3), Pipeline("afab", 3, 2)
    results: list[list[list[Tensor]]] = [[[], []], [[], [], []]]
    running = [(0, rank, executor.steps(first.feeds([2, 3, 4]))) for rank, executor in enumerate(first.executors)] + [
        (1, rank, executor.steps(second.feeds([5, 1]))) for rank, executor in enumerate(second.executors)
    ]
    while running:
        which, rank, steps = running.pop(0)
        try:
            next(steps)
            running.append((which, rank, steps))
        except StopIteration as stop:
            results[which][rank] = stop.value
    assert results == alone


@pytest.mark.shows(12)
def test_an_output_of_another_shape_never_leaves_its_stage() -> None:
    class Shorter(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:-1]

    with pytest.raises(PipelineError, match=r"0F0 on rank 0: stage 0 gives \[4, 4\].*microbatch 0.*awaits \[5, 4\]"):
        Pipeline("1f1b", 2, 1, [Shorter(), Layer()]).run([5])


@pytest.mark.shows(99)
def test_when_no_rank_can_go_on_each_says_what_it_waits_for() -> None:
    pipeline = Pipeline("1f1b", 2, 2)
    # A program that can not hang is not to be had, so the wire is cut.
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
        Executor(broken, 0, {0: stage}, InProcessTransport(InProcessHub(), 0), Recorder(0))
