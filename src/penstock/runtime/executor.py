"""The executor: walks one rank's list of a proved program.

Nothing here decides an order. Each action has one handler; what an action needs was either received, handed over by a
neighbouring stage on the same rank, or comes from the microbatch itself.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.model import Lane, Sequences, drain, zip_lanes
from penstock.runtime.errors import PipelineError, TransportError
from penstock.runtime.in_turn import Participant, run_in_turn
from penstock.runtime.pairs import Hooks, Pairs
from penstock.runtime.stage import Boundary, Finish, Stage
from penstock.runtime.tape import Tapes
from penstock.runtime.trace import Awaited, Record, Recorder
from penstock.runtime.transport import Receipt, Transport
from penstock.schedule import Action, Channel, Direction, Op, Pair, Placement, Program, Step, verify
from penstock.schedule.actions import SENDS, TRANSFERS, parts


@dataclass(frozen=True, slots=True)
class Feed:
    """What every rank knows of one microbatch, and what only the model's ends need.

    `tokens` [T] enters the first stage, `finish` turns the last stage's output into its result (for training the
    scaled scalar loss); None on ranks that do not hold that end.
    """

    num_tokens: int
    sequences: Sequences
    tokens: Tensor | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction through one local stage: whence its input comes and where its result goes, looked up once.

    source: the neighbour that gives the input, as (stage, rank); None at the model's end. target: the neighbour that
    takes the result; None at the end. A channel is None where the neighbour is on this rank, or there is none.
    """

    direction: Direction
    stage: Stage
    source: tuple[int, int] | None
    arriving: Channel | None
    target: int | None
    leaving: Channel | None

    @classmethod
    def of(cls, direction: Direction, stage: Stage, placement: Placement) -> "Wire":
        source = placement.source(stage.index, direction)
        return cls(
            direction,
            stage,
            None if source is None else (source, placement.rank_of(source)),
            placement.channel_to(stage.index, direction),
            placement.target(stage.index, direction),
            placement.channel_from(stage.index, direction),
        )


Key = tuple[Direction, int, int]  # (forward: a stage's input or output, backward: a gradient; stage, microbatch)
Waiting = Generator[Receipt, None, Any]


_NO_HOOKS = Hooks()


def _no_reduction(stage: int) -> None:
    return None


class Executor:
    """Runs one rank of a program over its local stages.

    Args:
        program: proved in the constructor; an unproved program never runs.
        rank: this rank of the pipeline.
        stages: the local stages by number.
        transport: carries messages between ranks.
        recorder: told of every action.
        reduce: called for a REDUCE_GRAD action with the stage's number; starts the reduction, does not wait.
        pairs: how fused pairs run, and who is told of their halves.

    Raises:
        ScheduleError: the program can not be proved.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        recorder: Recorder,
        reduce: Callable[[int], None] = _no_reduction,
        pairs: Pairs | None = None,
    ) -> None:
        verify(program)
        self.program, self.rank, self.stages = program, rank, stages
        self.transport, self.recorder, self.reduce = transport, recorder, reduce
        self.pairs = pairs or Pairs()
        self.training = program.schedule.training
        self._feeds: Sequence[Feed] = ()
        self._tapes = Tapes()
        self._arrivals: dict[Key, Receipt | Tensor] = {}
        self._departures: dict[Key, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._wires = {
            (direction, number): Wire.of(direction, stage, program.placement)
            for number, stage in stages.items()
            for direction in Direction
        }
        # The optimizer step is a line of train_batch.
        steps = [step for step in program.ranks[rank] if step != Action(Op.STEP)]
        self._leaving_at_once = frozenset(self._sends_at_once(steps))
        self._steps = [(step, *self._bind(step)) for step in steps]

    def _bind(self, step: Step) -> tuple[Callable[[], None] | None, Callable[[Record], Waiting]]:
        """How to run a step: at once, or, where it may have to wait for messages, as a generator."""
        if isinstance(step, Pair):
            return None, partial(self._pair, [(half, self._wire(half)) for half in (step.forward, step.backward)])
        handlers: dict[Op, Callable[[Action, Wire], None]] = {
            Op.W: self._weight_backward,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.REDUCE_GRAD: self._reduce_gradients,
        }
        wire, handler = self._wire(step), handlers.get(step.op)
        return (None if handler is None else partial(handler, step, wire)), partial(self._single, step, wire)

    def _sends_at_once(self, steps: Sequence[Step]) -> Iterator[Key]:
        """What leaves as soon as it is there, while its step goes on: the other half, or weight gradients.

        Only sends among the transfers right behind the step, so that none overtakes another on its channel.
        """
        for at, step in enumerate(steps):
            if not isinstance(step, Pair) and not (step.op is Op.B and self.stages[step.stage].exchanges):
                continue
            made = {(action.op.direction, action.stage, action.microbatch) for action in parts(step)}
            for transfer in steps[at + 1 :]:
                if not isinstance(transfer, Action) or transfer.op not in TRANSFERS:
                    break
                key = (transfer.op.direction, transfer.stage, transfer.microbatch)
                if transfer.op in SENDS and key in made:
                    yield key

    def _wire(self, action: Action) -> Wire:
        return self._wires[action.op.direction, action.stage]

    @property
    def peak_live_tapes(self) -> int:
        """The most tapes that this rank held at a time in the last step."""
        return self._tapes.peak

    def run(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Run the program once; `feeds[m]` is microbatch m. Blocks in the transport.

        Returns what the last stage's `finish` gave, by microbatch; an empty list on ranks without the last stage.

        Raises:
            TransportError: a message did not come or was not taken in time.
            PipelineError: a stage gave another shape or dtype than its neighbour awaits.
        """
        with torch.set_grad_enabled(self.training):
            return drain(self.steps(feeds))

    def steps(self, feeds: Sequence[Feed]) -> Generator[Receipt, None, list[Tensor]]:
        """`run` as a generator that yields the receipts it can not yet take, for ranks that share a thread."""
        if len(feeds) != self.program.schedule.num_microbatches:
            raise ValueError(
                f"{len(feeds)} microbatches given; the program was built for {self.program.schedule.num_microbatches}"
            )
        self._feeds, self._tapes.peak = feeds, 0
        begin, end, finished = self.recorder.begin, self.recorder.end, False
        try:
            for step, at_once, waiting in self._steps:
                record = begin(step)
                if at_once is not None:
                    at_once()
                else:
                    yield from waiting(record)
                end(record)
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
            self._clear()
            if not finished:
                self.transport.abandon()

    # Compute actions: wait for the input, run the lane, hand on the result.

    def _single(self, action: Action, wire: Wire, record: Record) -> Waiting:
        x = yield from self._input(action, wire, record)
        self.recorder.started(record)
        drain(self._lane(action, wire, x, self.pairs.hooks if self.pairs.hooks.alone else _NO_HOOKS))

    def _pair(self, halves: list[tuple[Action, Wire]], record: Record) -> Waiting:
        lanes = []
        for action, wire in halves:
            x = yield from self._input(action, wire, record)
            lanes.append(self._lane(action, wire, x, self.pairs.hooks, self.pairs.overlap))
        self.recorder.started(record)
        forward, backward = lanes
        if self.pairs.overlap:
            # The backward goes first: it has something to send at once, which travels while the forward computes.
            zip_lanes(backward, forward)
        else:
            drain(forward)
            drain(backward)

    def _lane(self, action: Action, wire: Wire, x: Tensor | None, hooks: Hooks, in_pair: bool = False) -> Lane[None]:
        """The action's lane, which also hands its result on; `in_pair`: another lane goes on when it yields."""
        hooks.before(action)
        if action.op is Op.F:
            feed, tape = self._feeds[action.microbatch], None
            if self.training:
                tape = self._tapes.make(action.stage, action.microbatch)
            x = feed.tokens if x is None else x
            assert x is not None, f"{action} needs the microbatch's tokens"
            finish = feed.finish if wire.target is None else None
            self._hand_on(action, wire, (yield from wire.stage.forward(tape, x, feed.sequences, finish)), hooks)
            return
        tape, fill = self._tapes.get(action.stage, action.microbatch), action.op is Op.B and wire.stage.exchanges
        lane = wire.stage.backward(tape, x, fill or action.op is Op.I, fill, self.pairs if in_pair else None)
        self._hand_on(action, wire, (yield from lane), hooks)
        if fill:
            if wire.leaving is not None:
                yield  # the other half's message leaves before this rank is busy with weights again
            wire.stage.weight_backward(tape)
        if action.op is Op.B:
            self._tapes.take(action.stage, action.microbatch)

    def _weight_backward(self, action: Action, wire: Wire) -> None:
        wire.stage.weight_backward(self._tapes.take(action.stage, action.microbatch))

    # Data flow: where an action's input comes from and where its result goes.

    def _input(self, action: Action, wire: Wire, record: Record) -> Waiting:
        """What the neighbour gives for an action; None at the model's end."""
        receipt = self._arrivals.pop((wire.direction, action.stage, action.microbatch), None)
        if receipt is None or isinstance(receipt, Tensor):
            return receipt
        assert wire.source is not None
        self.recorder.awaits(record, Awaited(wire.direction, wire.source[0], action.microbatch, wire.source[1]))
        while not receipt.ready():
            yield receipt
        return receipt.wait()

    def _hand_on(self, action: Action, wire: Wire, result: Tensor | None, hooks: Hooks) -> None:
        if wire.target is not None:
            self._to_neighbour(action, wire, result)
        elif wire.direction is Direction.FORWARD and result is not None:
            self._results[action.microbatch] = result
        hooks.after(action)

    def _to_neighbour(self, action: Action, wire: Wire, result: Tensor | None) -> None:
        self._check(action, wire.stage.boundary, result)
        assert result is not None and wire.target is not None
        if wire.leaving is None:
            self._arrivals[wire.direction, wire.target, action.microbatch] = result
        else:
            key = (wire.direction, action.stage, action.microbatch)
            if key in self._leaving_at_once:
                self.transport.send(wire.leaving, result.contiguous())
            else:
                self._departures[key] = result

    def _check(self, action: Action, boundary: Boundary, result: Tensor | None) -> None:
        """The neighbour has posted its receive with the shape known from the metadata; anything else must not leave."""
        shape = boundary.shape(self._feeds[action.microbatch].num_tokens)
        if result is None or result.shape != shape or result.dtype != boundary.dtype:
            got = "nothing" if result is None else f"{list(result.shape)} of {result.dtype}"
            raise PipelineError(
                f"{action} on rank {self.rank}: stage {action.stage} gives {got} for microbatch {action.microbatch}; "
                f"its neighbour awaits {list(shape)} of {boundary.dtype}"
            )

    def _send(self, action: Action, wire: Wire) -> None:
        assert wire.leaving is not None
        key = (wire.direction, action.stage, action.microbatch)
        if key not in self._leaving_at_once:
            self.transport.send(wire.leaving, self._departures.pop(key).contiguous())

    def _receive(self, action: Action, wire: Wire) -> None:
        assert wire.arriving is not None
        boundary = wire.stage.boundary
        self._arrivals[wire.direction, action.stage, action.microbatch] = self.transport.receive(
            wire.arriving, boundary.shape(self._feeds[action.microbatch].num_tokens), boundary.dtype
        )

    def _reduce_gradients(self, action: Action, wire: Wire) -> None:
        self.reduce(action.stage)

    def _clear(self) -> None:
        """Nothing of a step outlives it, however it ended."""
        self._feeds = ()
        for store in (self._tapes, self._arrivals, self._departures, self._results):
            store.clear()


def run_together(executors: Sequence[Executor], feeds: Sequence[Sequence[Feed]]) -> list[list[Tensor]]:
    """Run all ranks of a pipeline in this thread, in turn, each as far as its messages allow.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    ranks = {
        e.rank: Participant(e.steps(feed), e.recorder.where, partial(torch.set_grad_enabled, e.training))
        for e, feed in zip(executors, feeds, strict=True)
    }
    results = run_in_turn(ranks)
    return [results[e.rank] for e in executors]
