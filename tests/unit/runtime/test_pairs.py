"""Fused pairs in one thread: what runs and leaves when, what is kept and for how long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import schedule
from penstock.model import Compute, Exchange, Linear, Segment, SegmentedUnit, Sequences, WeightGradients, defer, drain
from penstock.model.lanes import Lane, State, Undo
from penstock.runtime import (
    Boundary,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Message,
    Pairs,
    Recorder,
    Stage,
    Tape,
    run_together,
)
from penstock.schedule import Action, Channel, Op, Pair
from penstock.schedule.recording import Record

WIDTH = 4


@dataclass
class Turned:
    x: Tensor

    def wait(self) -> Tensor:
        return self.x


@dataclass(eq=False)
class Watched:
    """Storages by the name of the segment that was given them, to be seen alive or gone."""

    storages: dict[str, StorageWeakRef] = field(default_factory=dict)

    def see(self, name: str, x: Tensor) -> Tensor:
        self.storages[name] = StorageWeakRef(x.untyped_storage())
        return x

    def alive(self) -> set[str]:
        return {name for name, storage in self.storages.items() if not storage.expired()}


@dataclass(frozen=True)
class Pause:
    """Waits for something small in forward alone, as an expert half does for its sizes."""

    name: str = "pause"

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        yield
        return state


class Mixer(SegmentedUnit):
    """x + last(turn(tanh(first(turn(before(x)))))): what an expert half does, with rows turned over for an exchange."""

    def __init__(self, seed: int, watched: Watched | None = None) -> None:
        super().__init__()
        self.before, self.experts = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.watched = watched or Watched()
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=generator)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        def turn(x: Tensor) -> Turned:
            return Turned(x.flip(0))

        def before(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.before(self.watched.see("before", x)), x

        def experts(rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.experts(self.watched.see("experts", rows)) + 0.0, x

        def combine(rows: Tensor, x: Tensor) -> tuple[Tensor]:
            return (self.watched.see("combine", rows) + x,)

        return [
            Compute("before", before),
            Pause(),
            Exchange("dispatch", turn, turn, before_release=True),
            Compute("experts", experts, apart=True),
            Exchange("combine", turn, turn),
            Compute("combine", combine),
        ]


class Pipeline:
    """All ranks of a pipeline of mixers in this thread, with a log of what they send."""

    def __init__(
        self,
        name: str,
        ranks: int,
        microbatches: int,
        *,
        pairs: Pairs | None = None,
        **options: Any,
    ) -> None:
        built = schedule.build(name, ranks=ranks, microbatches=microbatches, **options)
        self.program, self.log, hub = schedule.lower(built), [[] for _ in range(ranks)], InProcessHub()
        self.stages: dict[int, Stage] = {}
        self.executors = []
        for rank in range(ranks):
            stages = {number: self.stage(number) for number in self.program.placement.stages_of(rank)}
            self.stages |= stages
            transport = InProcessTransport(hub, rank)
            self._tell_sends(transport, self.log[rank])
            self.executors.append(Executor(self.program, stages, transport, Recorder(rank), pairs=pairs or Pairs()))

    def stage(self, number: int) -> Stage:
        owner = WeightGradients()
        units = [(f"mixer.{number}.{i}", Mixer(10 * number + i)) for i in range(2)]
        for _, unit in units:
            defer(unit, owner)
        return Stage(number, units, Boundary(WIDTH, torch.float32), owner)

    @staticmethod
    def _tell_sends(transport: InProcessTransport, log: list[tuple[str, int]]) -> None:
        send = transport.send

        def told(channel: Channel, message: Message) -> None:
            log.append((f"send {channel.direction.name[0]}", transport.rank))
            send(channel, message)

        transport.send = told  # type: ignore[method-assign]

    def run(self, microbatches: int) -> list[list[Tensor]]:
        lengths = [2 + m % 3 for m in range(microbatches)]
        feeds = [Feed(n, Sequences.from_lengths([n]), torch.ones(n, WIDTH), torch.sum) for n in lengths]
        return run_together(self.executors, [feeds] * len(self.executors))

    def gradients(self) -> list[Tensor]:
        found = [p.grad for number in sorted(self.stages) for _, p in self.stages[number].named_parameters()]
        assert found and all(grad is not None for grad in found)
        return [grad for grad in found if grad is not None]


@pytest.mark.shows(42)
@pytest.mark.parametrize("overlap", [True, False])
def test_each_half_leaves_when_it_is_done_and_weights_wait_for_it(overlap: bool) -> None:
    pipeline = Pipeline("combined-1f1b", 3, 6, pairs=Pairs(overlap))
    middle, log, of_pairs = pipeline.stages[1], pipeline.log[1], []
    recorder, original = pipeline.executors[1].recorder, middle.weight_backward
    end = recorder.end

    def logged(name: str, lane: Callable[..., Lane[Any]]) -> Callable[..., Lane[Any]]:
        def run(*args: Any) -> Lane[Any]:
            log.append((f"{name} begins", 1))
            result = yield from lane(*args)
            log.append((f"{name} ends", 1))
            return result

        return run

    def weights(tape: Tape) -> None:
        if tape.weight_gradients:
            log.append(("weights", len(tape.weight_gradients)))
        original(tape)

    def at_end(record: Record) -> None:
        if isinstance(record.action, Pair):
            of_pairs.append(list(log))
        log.clear()
        end(record)

    middle.forward, middle.backward = logged("F", middle.forward), logged("B", middle.backward)  # type: ignore[method-assign]
    middle.weight_backward, recorder.end = weights, at_end  # type: ignore[method-assign]
    pipeline.run(6)
    # Of a mixer's two weights the experts' come while the rest goes on; the one before them waits for what leaves.
    backward = [("weights", 1), ("weights", 1), ("weights", 1)]
    if overlap:
        expected = [("B begins", 1), ("F begins", 1), *backward, ("B ends", 1), ("send B", 1)]
        expected += [("F ends", 1), ("send F", 1), ("weights", 1)]
    else:
        expected = [("F begins", 1), ("F ends", 1), ("send F", 1), ("B begins", 1)]
        expected += [*backward, ("B ends", 1), ("send B", 1), ("weights", 1)]
    assert of_pairs == [expected] * sum(isinstance(step, Pair) for step in pipeline.program.schedule.orders[1])
    assert len(of_pairs) > 2


@pytest.mark.shows(40, 41)
@pytest.mark.parametrize("options", [{}, {"split_backward": True}])
@pytest.mark.parametrize(("name", "ranks"), [("combined", 1), ("combined-1f1b", 3), ("combined-interleaved", 2)])
def test_pairs_give_the_bits_of_their_halves(name: str, ranks: int, options: dict[str, bool]) -> None:
    ways = (Pairs(overlap=False), Pairs(), Pairs(early_release=True))
    in_turn, *together = (Pipeline(name, ranks, 5, pairs=pairs, **options) for pairs in ways)
    expected = in_turn.run(5)
    for pipeline in together:
        for one, other in zip(pipeline.run(5), expected, strict=True):
            assert list(map(float, one)) == list(map(float, other))
        assert all(map(torch.equal, pipeline.gradients(), in_turn.gradients()))


@pytest.mark.shows(49)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_microbatch_more_is_alive_on_one_rank_and_twice_as_many_in_a_pipeline(ranks: int) -> None:
    for microbatches in (1, 3, 9):
        pipeline = Pipeline("combined-1f1b", ranks, microbatches)
        pipeline.run(microbatches)
        peaks = [executor.peak_live_tapes for executor in pipeline.executors]
        assert peaks == [min(2 * (ranks - rank), microbatches) for rank in range(ranks)]
        assert peaks == list(schedule.simulate(pipeline.program).peak_live_microbatches)


def test_interleaved_pairs_keep_one_tape_more_than_plain_turns() -> None:
    for microbatches in (4, 8):
        peaks = []
        for name in ("interleaved", "combined-interleaved"):
            pipeline = Pipeline(name, 2, microbatches)
            pipeline.run(microbatches)
            peaks.append([executor.peak_live_tapes for executor in pipeline.executors])
        assert all(combined <= plain + 1 for plain, combined in zip(*peaks, strict=True))


@pytest.mark.shows(44)
def test_what_came_back_from_the_experts_is_freed_and_what_backward_reads_is_not() -> None:
    owner, watched = WeightGradients(), Watched()
    unit = Mixer(0, watched)
    defer(unit, owner)
    stage = Stage(0, [("mixer", unit)], Boundary(WIDTH, torch.float32), owner)
    tape = Tape()
    y = drain(stage.forward(tape, Message((torch.ones(3, WIDTH),)), Sequences.from_lengths([3])))
    assert watched.storages.keys() == {"before", "experts", "combine"}
    # The inputs of linear layers are their weights' other factor; a sum needs neither of its terms.
    assert watched.alive() == {"before", "experts"}
    drain(stage.backward(tape, Message((torch.ones_like(y.tensors[0]),))))
    stage.weight_backward(tape)
    assert watched.alive() == set()


def kept_while_experts_compute(early_release: bool) -> list[set[str]]:
    """What is left of the last layer's backward whenever the experts beside it, of the first layer, compute."""
    pipeline = Pipeline("combined", 1, 4, pairs=Pairs(early_release=early_release))
    first, last = (unit for _, unit in pipeline.stages[0].units)
    assert isinstance(first, Mixer) and isinstance(last, Mixer)
    of_microbatches: list[Watched] = []
    seen: list[set[str]] = []
    segments_of, compute = last.segments, first.experts.forward

    def segments(sequences: Sequences) -> Sequence[Segment]:
        last.watched = Watched()
        of_microbatches.append(last.watched)
        return segments_of(sequences)

    def experts(rows: Tensor) -> Tensor:
        seen.extend(watched.alive() for watched in of_microbatches[-1:])
        return compute(rows)

    last.segments, first.experts.forward = segments, experts  # type: ignore[method-assign]
    pipeline.run(4)
    return seen


@pytest.mark.shows(38)
def test_early_release_lets_go_of_a_layer_before_the_experts_beside_it_compute() -> None:
    late, early = kept_while_experts_compute(early_release=False), kept_while_experts_compute(early_release=True)
    assert late == [{"before"}] * 3, "what its weights' gradients are made of"
    assert early == [set()] * 3


def test_a_pair_is_one_action_of_the_trace() -> None:
    pipeline = Pipeline("combined", 1, 3)
    pipeline.run(3)
    steps = [record.action for record in pipeline.executors[0].recorder.records()]
    assert [step for step in steps if step != Action(Op.REDUCE_GRAD, 0)] == list(pipeline.program.schedule.orders[0])
