"""The executor: walks one rank's list of a proved program.

Each step has one handler, bound once. An F, B or I is a lane: its input was received, was handed over by a neighbouring
stage on the same rank, or comes from the microbatch itself (`Feed`). Nothing here decides an order.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.model import NOTHING_GIVEN, Driven, Given, Lane, Sequences, drain, zip_lanes
from penstock.runtime.errors import Deadlock, PipelineError, TransportError
from penstock.runtime.message import Message
from penstock.runtime.offload import Arena, Saved, storages_of
from penstock.runtime.recovery import Alarm
from penstock.runtime.stage import ALONE, Pairs, ResultFn, Stage, Tapes
from penstock.runtime.trace import Awaited, Recorder, named_handler, profiler_is_active
from penstock.runtime.transport import Receipt, Transport
from penstock.schedule import Action, Direction, Op, Program, ScheduleError, Step, parts, verify
from penstock.schedule.actions import MOVES, Scope, flatten, uses
from penstock.schedule.recording import Record
from penstock.schedule.rules import Wire, early_sends


@dataclass(frozen=True, slots=True)
class Feed:
    """One microbatch, as a rank sees it."""

    num_tokens: int
    sequences: Sequences
    #: the token ids [T] that enter the first stage; None on ranks without it
    tokens: Tensor | None = None
    #: turns the last stage's output into its result, in training the scaled scalar loss; None on ranks without it
    result_fn: ResultFn | None = None
    #: all else that units may ask for
    given: Given = NOTHING_GIVEN


Key = tuple[Direction, int, int]  # direction, stage, microbatch: of an input that arrives or a result that leaves
Waiting = Generator[Receipt, None, Any]  # yields the receipts that it cannot take yet
Handler = Callable[[Record], Waiting | None]
MakeLane = Callable[[Action, Wire, Message | None, Pairs], Lane[None]]

_PAIRS = Pairs()


@dataclass(eq=False)
class Executor:
    """Runs one rank of a program over its local stages.

    Raises:
        ScheduleError: the program cannot be proved; an unproved one never runs.
    """

    #: the program, which is proved here
    program: Program
    #: the local stages by number
    stages: Mapping[int, Stage]
    #: carries messages between ranks, and knows which rank this is
    transport: Transport
    #: notes every action
    recorder: Recorder
    #: called for a REDUCE_GRAD action with the stage's number; starts the reduction, does not wait. None for programs
    #: of forwards alone, or without a rank to reduce with
    reduce: Callable[[int], None] | None = None
    #: the way in which the two actions of a fused pair take turns
    pairs: Pairs = _PAIRS
    #: rings when another rank has failed
    alarm: Alarm = field(default_factory=Alarm)
    #: this rank's place in the program
    rank: int = field(init=False)
    #: True if the program has backwards
    training: bool = field(init=False)
    #: local stage and direction -> where its input comes from and its result goes to
    _wires: dict[tuple[Direction, int], Wire] = field(init=False)
    #: True if a backward leaves the gradients of weights for later
    _splits: bool = field(init=False)
    #: stage and microbatch -> the kinds of actions that change what its tape holds, and where it is
    _moved: dict[tuple[int, int], set[Op]] = field(default_factory=dict, init=False)
    #: the host memory to which tapes move
    arena: Arena = field(default_factory=Arena, init=False)
    #: results that leave while their step goes on
    _early: frozenset[Key] = field(init=False)
    #: the program's steps with their handlers, of which all arguments are bound but the step's record
    _steps: list[tuple[Step, Handler]] = field(default_factory=list, init=False)
    #: the number of a step -> the microbatches that no later one of this rank needs
    _ended: dict[int, list[int]] = field(default_factory=dict, init=False)
    #: the running step's microbatches that this rank needs now, those to come, and the number of those that have come
    _feeds: dict[int, Feed] = field(default_factory=dict, init=False)
    _coming: Iterator[Feed] = field(default=iter(()), init=False)
    _num_come: int = field(default=0, init=False)
    #: the running step's tapes
    _tapes: Tapes = field(default_factory=Tapes, init=False)
    #: posted receives, or the results of neighbours on this rank
    _arrivals: dict[Key, Receipt | Message] = field(default_factory=dict, init=False)
    #: results that their send has not taken yet
    _departures: dict[Key, Message] = field(default_factory=dict, init=False)
    #: microbatch -> the result of the last stage's `result_fn`
    _results: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        program = self.program
        verify(program)
        self.rank, self.training = self.transport.rank, program.schedule.training
        self._wires = {
            (direction, number): Wire.of(program.placement, number, direction)
            for number in self.stages
            for direction in Direction
        }
        self._splits = any(action.op is Op.I for step in program.ranks[self.rank] for action in parts(step))
        self._early = frozenset(
            (send.op.direction, send.stage, send.microbatch) for send in early_sends(program.ranks[self.rank])
        )
        steps = program.ranks[self.rank]
        for action in flatten(steps):
            if action.op in MOVES:
                if action.op is Op.R and not self.stages[action.stage].recomputes:
                    raise ScheduleError(
                        f"rank {self.rank}: {action} has nothing to compute again, for stage {action.stage} keeps all "
                        'activations; set recompute = "full"'
                    )
                self._moved.setdefault((action.stage, action.microbatch), set()).add(action.op)
        for step in steps:
            first, *second = parts(step)
            if first.op.scope is Scope.RANK:
                continue  # that one is `Trainer.step_weights`
            actions = [(a, self._wire(a), getattr(self, f"_{a.op.handler}")) for a in (first, *second)]
            if first.op.is_lane:
                handler = partial(self._compute, actions, self.pairs if second else ALONE)
            else:
                handler = partial(actions[0][2], *actions[0][:2])
            self._steps.append((step, handler))
        for microbatch, (_, last) in uses(step for step, _ in self._steps).items():
            self._ended.setdefault(last, []).append(microbatch)

    def _wire(self, action: Action) -> Wire:
        return self._wires[action.op.direction, action.stage]

    @property
    def peak_live_tapes(self) -> int:
        """The largest number of tapes that were live at once on this rank in the last step."""
        return self._tapes.peak

    def run(self, feeds: Iterable[Feed]) -> list[Tensor]:
        """Run the program once; the m-th feed is microbatch m. Blocks in the transport.

        Each is taken when this rank first needs it, in this order, and let go of after the last action that does.

        Returns what the last stage's `result_fn` gave, by microbatch; an empty list on ranks without the last stage.

        Raises:
            TransportError: a message did not come or was not taken in time.
            PipelineError: a stage gave another shape or dtype than its neighbour expects.
        """
        with torch.set_grad_enabled(self.training):
            return drain(self.steps(feeds))

    def steps(self, feeds: Iterable[Feed]) -> Generator[Receipt, None, list[Tensor]]:
        """`run` as a generator that yields the receipts it cannot take yet, for ranks that share a thread."""
        num_needed = self.program.schedule.num_microbatches
        if isinstance(feeds, Sequence) and len(feeds) != num_needed:
            raise ValueError(f"{len(feeds)} microbatches given; the program was built for {num_needed}")
        self._coming, self._num_come, self._tapes.peak = iter(feeds), 0, 0
        begin, end, alarm, finished = self.recorder.begin, self.recorder.end, self.alarm, False
        steps = self._steps
        if profiler_is_active():
            steps = [(step, named_handler(str(step), handler)) for step, handler in steps]
        try:
            for number, (step, handler) in enumerate(steps):
                if alarm.failure is not None:
                    alarm.check()
                record = begin(step)
                waiting = handler(record)
                if waiting is not None:
                    yield from waiting
                end(record)
                for microbatch in self._ended.get(number, ()):
                    del self._feeds[microbatch]
            if len(self.program.ranks) > 1:  # one that is alone sends nothing
                self.transport.settle()
            assert not (self._tapes or self._arrivals or self._departures), "a proved program leaves nothing behind"
            finished = True
            return [self._results[m] for m in sorted(self._results)]
        except TransportError as error:
            raise TransportError(f"{self.recorder.where()}: {error}{self.recorder.missing()}") from error
        except Exception as error:
            error.add_note(f"{self.recorder.where()}")
            raise
        finally:
            self._coming = iter(())
            for store in (self._feeds, self._tapes, self._arrivals, self._departures, self._results):
                store.clear()
            if self._moved:
                self.arena.clear()
            if not finished:
                self.transport.abandon()

    def _feed(self, microbatch: int) -> Feed:
        """The microbatch, taken with those before it if it has not come yet."""
        while self._num_come <= microbatch:
            self._feeds[self._num_come] = next(self._coming)
            self._num_come += 1
        return self._feeds[microbatch]

    # ---- compute: wait for the inputs, then run the lanes, which hand their results on

    def _compute(self, actions: list[tuple[Action, Wire, MakeLane]], pairs: Pairs, record: Record) -> Waiting:
        """Run an F, B or I, or the two of a fused pair."""
        lanes: list[Lane[None]] = []
        for action, wire, lane in actions:
            key = (wire.direction, action.stage, action.microbatch)
            arriving = None if action.op in MOVES else self._arrivals.pop(key, None)
            if arriving is not None and not isinstance(arriving, Message):
                assert wire.source is not None and wire.arriving is not None
                sender = Awaited(wire.direction, wire.source, action.microbatch, wire.arriving.source)
                self.recorder.awaits(record, sender)
                while not arriving.ready():
                    yield arriving
                arriving = arriving.wait()
            lanes.append(lane(action, wire, arriving, pairs))
        self.recorder.started(record)
        if pairs.overlap:
            # The backward goes first: it launches something at once, which is under way while the forward computes.
            zip_lanes(*reversed(lanes))
        else:
            for lane in lanes:
                drain(lane)

    def _forward(self, action: Action, wire: Wire, x: Message | None, pairs: Pairs) -> Lane[None]:
        feed, tape = self._feed(action.microbatch), None
        if self.training:
            key = action.stage, action.microbatch
            tape = self._tapes.make(*key, action.keeps, self._splits)
            if moves := self._moved.get(key):
                tape.replays = [] if Op.R in moves else None
                if Op.O in moves:
                    own = storages_of(module for _, module in self.stages[action.stage].units)
                    tape.saved = Saved(self.arena, own)
        if x is None:
            assert feed.tokens is not None, f"{action} needs the microbatch's tokens"
            x = Message((feed.tokens,))
        result_fn = feed.result_fn if wire.target is None else None
        stage = self.stages[action.stage]
        result = yield from stage.forward(tape, x, feed.sequences, result_fn, feed.given)
        self._hand_on(action, wire, result)

    def _backward(self, action: Action, wire: Wire, grad: Message | None, pairs: Pairs) -> Lane[None]:
        """A B, or an I, whose gradients of weights wait for their W."""
        stage, whole = self.stages[action.stage], action.op is Op.B
        tape = self._tapes[action.stage, action.microbatch]
        grad = yield from stage.backward(tape, grad, not whole, pairs)
        self._hand_on(action, wire, grad)
        if whole:
            if stage.exchanges and wire.leaving is not None:
                yield  # the other action's message leaves before this rank is busy with weights again
            self._weight_backward(action)

    def _weight_backward(self, action: Action, wire: Wire | None = None, record: Record | None = None) -> None:
        self.stages[action.stage].weight_backward(self._tapes.pop((action.stage, action.microbatch)))
        # A mask of a long sequence is as large as many layers' activations, and would live as long as the step.
        self._feeds[action.microbatch].sequences.forget_shared()

    def _recompute(self, action: Action, wire: Wire, x: None, pairs: Pairs) -> Lane[None]:
        yield from self.stages[action.stage].recompute(self._tapes[action.stage, action.microbatch])

    def _offload(self, action: Action, wire: Wire, record: Record) -> None:
        self._saved(action).offload()

    def _reload(self, action: Action, wire: Wire, record: Record) -> None:
        self._saved(action).reload()

    def _saved(self, action: Action) -> Saved:
        saved = self._tapes[action.stage, action.microbatch].saved
        assert saved is not None
        return saved

    # ---- data flow: where an input comes from and where a result goes to

    def _hand_on(self, action: Action, wire: Wire, result: Message) -> None:
        """Give a result to the neighbour on this rank, to its send, or to the caller of `run`."""
        key = (wire.direction, action.stage, action.microbatch)
        if wire.target is None:
            if wire.direction is Direction.FORWARD:
                self._results[action.microbatch] = result.tensors[0]
            return
        stage = self.stages[action.stage]
        try:
            stage.check_leaving(result, wire.direction, self._feeds[action.microbatch].num_tokens)
        except ValueError as error:
            where = f"{action} on rank {self.rank}, microbatch {action.microbatch}"
            raise PipelineError(f"{where}: {error}") from None
        if wire.leaving is None:
            if wire.direction is Direction.FORWARD and stage.boundary.is_open:
                # The next stage may change it in place, as it may what another rank sends.
                result = result.of_tensors(tuple(tensor.clone() for tensor in result.tensors))
            self._arrivals[wire.direction, wire.target, action.microbatch] = result
        elif key in self._early:
            self.transport.send(wire.leaving, result)
        else:
            self._departures[key] = result

    def _send(self, action: Action, wire: Wire, record: Record) -> None:
        assert wire.leaving is not None
        key = (wire.direction, action.stage, action.microbatch)
        if key not in self._early:
            self.transport.send(wire.leaving, self._departures.pop(key))

    def _start_reduction(self, action: Action, wire: Wire, record: Record) -> None:
        if self.reduce is not None:
            self.reduce(action.stage)

    def _post_receive(self, action: Action, wire: Wire, record: Record) -> None:
        assert wire.arriving is not None
        header = self.stages[action.stage].boundary.header(self._feed(action.microbatch).num_tokens)
        receipt = self.transport.receive(wire.arriving, header)
        self._arrivals[wire.direction, action.stage, action.microbatch] = receipt


def run_together(executors: Sequence[Executor], feeds: Sequence[Sequence[Feed]]) -> list[list[Tensor]]:
    """Run all ranks of a pipeline in this thread, in turn, each as far as its messages allow.

    If one fails, the others cannot finish either, and are closed.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    running = {
        executor: Driven(executor.steps(rank_feeds), partial(torch.set_grad_enabled, executor.training))
        for executor, rank_feeds in zip(executors, feeds, strict=True)
    }
    awaited: dict[Executor, Receipt] = {}
    results: dict[Executor, list[Tensor]] = {}
    try:
        while running:
            able = [one for one in running if one not in awaited or awaited[one].ready()]
            if not able:
                raise Deadlock(f"no rank can go on: {'; '.join(one.recorder.where() for one in running)}")
            for one in able:
                receipt = next(running[one], None)
                if receipt is not None:
                    awaited[one] = receipt
                else:
                    results[one] = running.pop(one).result
    finally:
        for steps in running.values():
            steps.lane.close()
    return [results[executor] for executor in executors]
