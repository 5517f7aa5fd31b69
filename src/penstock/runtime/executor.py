"""The executor: walks one rank's list of a proved program.

Nothing here decides an order. Each action has one handler; what an action needs was either received, handed over by a
neighbouring stage on the same rank, or comes from the microbatch itself.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model import Sequences
from penstock.runtime.errors import Deadlock, PipelineError, TransportError
from penstock.runtime.lanes import Lane, drain, zip_lanes
from penstock.runtime.stage import Finish, Stage
from penstock.runtime.tape import Tape
from penstock.runtime.trace import Awaited, Record, Recorder
from penstock.runtime.transport import Receipt, Transport
from penstock.schedule import Action, Op, Pair, Program, verify
from penstock.schedule.rules import Channel


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


Key = tuple[Op, int, int]  # (F: a stage's input or output | B: a gradient, stage, microbatch)
Waiting = Generator[Receipt, None, Any]


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
    ) -> None:
        verify(program)
        self.program, self.rank, self.stages = program, rank, stages
        self.transport, self.recorder, self.reduce = transport, recorder, reduce
        self.training = program.schedule.training
        self.peak_live_tapes = 0
        self._placement = program.schedule.placement
        self._split = any(isinstance(a, Action) and a.op is Op.I for a in program.ranks[rank])
        self._feeds: Sequence[Feed] = ()
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._arrivals: dict[Key, Receipt | Tensor] = {}
        self._departures: dict[Key, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        immediate: dict[Op, Callable[[Action], None]] = {
            Op.W: self._weight_backward,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.REDUCE_GRAD: self._reduce_gradients,
        }
        self._actions = [
            (step, None if isinstance(step, Pair) else immediate.get(step.op))
            for step in program.ranks[rank]
            if isinstance(step, Pair) or step.op is not Op.STEP  # the step is a line of train_batch
        ]

    def run(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Run the program once; `feeds[m]` is microbatch m. Blocks in the transport.

        Returns what the last stage's `finish` gave, by microbatch; an empty list on ranks without the last stage.

        Raises:
            TransportError: a message did not come or was not taken in time.
            PipelineError: a stage gave another shape or dtype than its neighbour awaits.
        """
        return _finish(self.steps(feeds))

    def steps(self, feeds: Sequence[Feed]) -> Generator[Receipt, None, list[Tensor]]:
        """`run` as a generator that yields the receipts it can not yet take, for ranks that share a thread."""
        if len(feeds) != self.program.schedule.num_microbatches:
            raise ValueError(
                f"{len(feeds)} microbatches given; the program was built for {self.program.schedule.num_microbatches}"
            )
        self._feeds, self.peak_live_tapes = feeds, 0
        begin, end = self.recorder.begin, self.recorder.end
        try:
            for step, immediate in self._actions:
                record = begin(step)
                if immediate is not None:
                    immediate(step)  # type: ignore[arg-type]  # pairs have no immediate handler
                elif isinstance(step, Pair):
                    yield from self._pair(step, record)
                elif step.op is Op.F:
                    yield from self._single(step, record, self._forward)
                else:
                    yield from self._single(step, record, self._backward)
                end(record)
            self.transport.settle()
            assert not (self._tapes or self._arrivals or self._departures), "a proved program leaves nothing behind"
            return [self._results[m] for m in sorted(self._results)]
        except TransportError as error:
            raise TransportError(f"{self.recorder.where()}: {error}") from error
        except Exception as error:
            error.add_note(f"{self.recorder.where()}")
            raise
        finally:
            self._clear()

    # Compute actions: wait for the input, run the lane, hand on the result.

    def _single(self, action: Action, record: Record, make: Callable[[Action, Tensor | None], Lane[Any]]) -> Waiting:
        x = yield from self._input(action, record)
        self.recorder.started(record)
        with torch.set_grad_enabled(self.training):
            self._hand_on(action, drain(make(action, x)))

    def _pair(self, pair: Pair, record: Record) -> Waiting:
        x = yield from self._input(pair.forward, record)
        grad = yield from self._input(pair.backward, record)
        self.recorder.started(record)
        with torch.enable_grad():
            out, grad_in = zip_lanes(self._forward(pair.forward, x), self._backward(pair.backward, grad))
        self._hand_on(pair.forward, out)
        self._hand_on(pair.backward, grad_in)

    def _forward(self, action: Action, x: Tensor | None) -> Lane[Tensor]:
        feed = self._feeds[action.microbatch]
        tape = None
        if self.training:
            tape = self._tapes[action.stage, action.microbatch] = Tape()
            self.peak_live_tapes = max(self.peak_live_tapes, len(self._tapes))
        x = feed.tokens if x is None else x
        assert x is not None, f"{action} needs the microbatch's tokens"
        finish = feed.finish if self._placement.next(action.stage) is None else None
        return self.stages[action.stage].forward(tape, x, feed.sequences, finish)

    def _backward(self, action: Action, grad: Tensor | None) -> Lane[Tensor | None]:
        key = (action.stage, action.microbatch)
        split = action.op is Op.I
        tape = self._tapes[key] if split else self._tapes.pop(key)
        return self.stages[action.stage].backward(tape, grad, split)

    def _weight_backward(self, action: Action) -> None:
        self.stages[action.stage].weight_backward(self._tapes.pop((action.stage, action.microbatch)))

    # Data flow: where an action's input comes from and where its result goes.

    def _input(self, action: Action, record: Record) -> Waiting:
        """The tensor that the action waits for; None at the model's ends."""
        flow = Op.F if action.op is Op.F else Op.B
        arrival = self._arrivals.pop((flow, action.stage, action.microbatch), None)
        if arrival is None or isinstance(arrival, Tensor):
            return arrival
        source = self._neighbour(flow, action.stage)
        assert source is not None
        awaited = Awaited(flow, source, action.microbatch, self._placement.rank_of(source))
        self.recorder.awaits(record, awaited)
        while not arrival.ready():
            yield arrival
        return arrival.wait()

    def _neighbour(self, flow: Op, stage: int) -> int | None:
        """The stage from which `stage` gets its input (F) or the gradient of its output (B)."""
        return self._placement.previous(stage) if flow is Op.F else self._placement.next(stage)

    def _hand_on(self, action: Action, result: Tensor | None) -> None:
        flow = Op.F if action.op is Op.F else Op.B
        target = self._neighbour(Op.B if flow is Op.F else Op.F, action.stage)
        if target is None:
            if flow is Op.F and result is not None:
                self._results[action.microbatch] = result
            return
        self._check(action, result)
        assert result is not None
        if self._placement.rank_of(target) == self.rank:
            self._arrivals[flow, target, action.microbatch] = result
        else:
            self._departures[flow, action.stage, action.microbatch] = result

    def _check(self, action: Action, result: Tensor | None) -> None:
        """The neighbour has posted its receive with the shape known from the metadata; anything else must not leave."""
        boundary = self.stages[action.stage].boundary
        shape = boundary.shape(self._feeds[action.microbatch].num_tokens)
        if result is None or result.shape != shape or result.dtype != boundary.dtype:
            got = "nothing" if result is None else f"{list(result.shape)} of {result.dtype}"
            raise PipelineError(
                f"{action} on rank {self.rank}: stage {action.stage} gives {got} for microbatch {action.microbatch}; "
                f"its neighbour awaits {list(shape)} of {boundary.dtype}"
            )

    def _send(self, action: Action) -> None:
        flow = Op.F if action.op is Op.SEND_F else Op.B
        target = self._neighbour(Op.B if flow is Op.F else Op.F, action.stage)
        assert target is not None
        tensor = self._departures.pop((flow, action.stage, action.microbatch))
        self.transport.send(Channel(self.rank, self._placement.rank_of(target), flow), tensor.contiguous())

    def _receive(self, action: Action) -> None:
        flow = Op.F if action.op is Op.RECV_F else Op.B
        source = self._neighbour(flow, action.stage)
        assert source is not None
        boundary = self.stages[action.stage].boundary
        self._arrivals[flow, action.stage, action.microbatch] = self.transport.receive(
            Channel(self._placement.rank_of(source), self.rank, flow),
            boundary.shape(self._feeds[action.microbatch].num_tokens),
            boundary.dtype,
        )

    def _reduce_gradients(self, action: Action) -> None:
        self.reduce(action.stage)

    def _clear(self) -> None:
        """Nothing of a step outlives it, however it ended."""
        self._feeds = ()
        for store in (self._tapes, self._arrivals, self._departures, self._results):
            store.clear()


def _finish(steps: Generator[Receipt, None, list[Tensor]]) -> list[Tensor]:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def run_together(executors: Sequence[Executor], feeds: Sequence[Sequence[Feed]]) -> list[list[Tensor]]:
    """Run all ranks of a pipeline in this thread, in turn, each as far as its messages allow.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    running = {e.rank: e.steps(f) for e, f in zip(executors, feeds, strict=True)}
    awaited: dict[int, Receipt] = {}
    results: dict[int, list[Tensor]] = {}
    while running:
        able = [rank for rank in running if rank not in awaited or awaited[rank].ready()]
        if not able:
            stuck = "; ".join(e.recorder.where() for e in executors if e.rank in running)
            for steps in running.values():
                steps.close()
            raise Deadlock(f"no rank can go on: {stuck}")
        for rank in able:
            try:
                awaited[rank] = next(running[rank])
            except StopIteration as stop:
                results[rank] = stop.value
                del running[rank]
                awaited.pop(rank, None)
    return [results[e.rank] for e in executors]
