"""Generation: slots of sequences go round the ring of stages until all have ended.

The rank of the first stage leads: its conductor decides what each slot carries. A small header goes ahead from rank to
rank on host memory and says it to the others (`penstock.runtime.scout`), the activations follow from stage to stage,
and the rank of the last stage sends the tokens it has drawn straight back to the first. Every rank takes the slots of a
round in order, stage by stage, so all messages of a line come in the order in which they are awaited, and nothing else
is ever sent.

Shapes: T tokens of a visit, S sampled ones, D hidden size, V vocabulary, R rows of a slot.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.model import CachedRows
from penstock.runtime.errors import TransportError
from penstock.runtime.graphs import FixedDecoder
from penstock.runtime.in_turn import Participant, run_in_turn
from penstock.runtime.scout import Ahead, Known, Lead, Scout
from penstock.runtime.stage import Stage
from penstock.runtime.trace import Awaited, Record, Recorder
from penstock.runtime.transport import Receipt, Transport
from penstock.schedule import Action, Direction, Op, Piece, Placement, RingShape, Visit

Waiting = Generator[Receipt, None, Any]

_HOST = torch.device("cpu")

_PREPARED = 2
"""Visits whose input is awaited at the same time: one that comes while another is computed is there when it ends."""


@dataclass(frozen=True, eq=False)
class Journey:
    """One generation as a rank sees it.

    caches: of each local stage, a cache per unit. draw: on the rank of the last stage, from the logits [S, V] and their
    pieces to the numbers that come back, [S, 3] int64 on the host. lead: on the rank of the first stage. in_step:
    whether stages compute together with those of other pipelines, which share experts with them: then all make the
    same visits in the same order, each slot one a round, and a pipeline that has nothing to carry comes without tokens.
    fixed: of the local stages that decode over fixed shapes, who does it.
    """

    shape: RingShape
    caches: Mapping[int, Sequence[Any]]
    draw: Callable[[Tensor, Sequence[Piece]], Tensor] | None = None
    lead: Lead | None = None
    in_step: bool = False
    fixed: Mapping[int, FixedDecoder] = field(default_factory=dict)

    def decode(self, stage: Stage, x: Tensor, rows: CachedRows, slot: int) -> Tensor:
        """What the stage makes of a slot's visit."""
        fixed = self.fixed.get(stage.index)
        if fixed is None:
            return stage.decode(x, self.caches[stage.index], rows)
        return fixed.decode(x, rows, self.shape.rows_of(slot))


@dataclass(slots=True)
class RingReport:
    """What a rank did: rounds, forwards and their tokens, the time they took, and that of the whole journey."""

    num_rounds: int = 0
    num_forwards: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0

    def count(self, record: Record, visit: Visit) -> None:
        self.num_forwards += 1
        self.num_tokens += visit.num_tokens
        self.busy_s += (record.end_ns - record.start_ns) * 1e-9


class Ring:
    """One rank's place in the ring; runs any number of journeys.

    Args:
        stages: the local stages by number; of a model that is held twice, the first copy's are used.
        transport: carries activations between stages.
        host: carries headers and tokens.
    """

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[int, Stage],
        transport: Transport,
        host: Transport,
        recorder: Recorder,
        device: torch.device | str = "cpu",
    ) -> None:
        self.placement, self.transport, self.host = placement, transport, host
        self.recorder, self.device = recorder, torch.device(device)
        self.rank = transport.rank
        self.drawer = placement.output_rank
        self.stages = [stage for number, stage in sorted(stages.items()) if number < placement.stages_per_route]

    def run(self, journey: Journey) -> RingReport:
        """Take part until all sequences have ended. Blocks in the transport.

        Raises:
            TransportError: a message did not come or was not taken in time.
        """
        # In step the leading rank's word with the others has its place among what the stages exchange.
        steps = self.steps(journey, scouts_ahead=self.placement.num_ranks > 1 and not journey.in_step)
        with torch.inference_mode():
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    return stop.value

    def steps(self, journey: Journey, scouts_ahead: bool = False) -> Generator[Receipt, None, RingReport]:
        """`run` as a generator that yields the receipts it can not yet take, for ranks that share a thread.

        `scouts_ahead`: learn of visits in a thread of its own, in which receipts block.
        """
        scout = Scout(self.host, self.placement, journey.shape, journey.lead)
        trip, finished = _Trip(self, journey, scout, Ahead(scout) if scouts_ahead else None), False
        try:
            report = yield from trip.rounds()
            self.transport.settle()
            self.host.settle()
            finished = True
            return report
        except TransportError as error:
            raise TransportError(f"{self.recorder.where()}: {error}") from error
        except Exception as error:
            error.add_note(self.recorder.where())
            raise
        finally:
            if not finished:
                scout.cancel()
                self.transport.abandon()
                self.host.abandon()


@dataclass(frozen=True, eq=False)
class _Carried:
    """A visit with what every unit receives beside the activations; `tokens` [T] where the first stage is."""

    visit: Visit
    rows: CachedRows
    tokens: Tensor | None


@dataclass(frozen=True, eq=False)
class _Step:
    """A visit to one stage whose input is awaited; `receipt` is None where it comes from this rank."""

    stage: Stage
    carried: _Carried
    receipt: Receipt | None


class _Trip:
    """One journey of one rank, under way."""

    def __init__(self, ring: Ring, journey: Journey, scout: Scout, ahead: Ahead | None) -> None:
        self.ring, self.journey, self.report = ring, journey, RingReport()
        self._scout, self._ahead = scout, ahead
        self._known: deque[Known] = deque()
        self._closed = False
        self._prepared: deque[_Step] = deque()
        self._handed: dict[tuple[int, int], Tensor] = {}  # between two stages of this rank

    def rounds(self) -> Generator[Receipt, None, RingReport]:
        """Round after round, until the leading rank closes the ring."""
        start, steps = time.perf_counter(), self._steps()
        while True:
            self._look_ahead(steps)
            if self._prepared:
                yield from self._forward(self._prepared.popleft())
            elif self._closed:
                break
            else:
                self._note((yield from self._scout.learn()) if self._ahead is None else self._ahead.take())
        assert not (self._handed or self._known or self._scout.num_returning), "a closing ring has nothing under way"
        self.report.wall_s = time.perf_counter() - start
        return self.report

    # ---- what is to be done

    def _note(self, known: Known | None) -> None:
        if known is None:
            self._closed = True
        else:
            self._known.append(known)

    def _look_ahead(self, steps: Iterator[_Step | None]) -> None:
        """Await the inputs of the next visits, as far as they are known."""
        while self._ahead is not None and not self._closed and self._ahead.num_learnt():
            self._note(self._ahead.take())
        while len(self._prepared) < _PREPARED and (step := next(steps, None)) is not None:
            self._prepared.append(step)

    def _steps(self) -> Iterator[_Step | None]:
        """What this rank computes, in its order; None where the next visit is not known yet."""
        first, *others = self.ring.stages
        while True:
            carried: list[_Carried] = []
            ends_round = False
            while not ends_round:
                while not self._known:
                    if self._closed:
                        return
                    yield None
                known = self._known.popleft()
                ends_round = known.visit.ends_round
                if known.visit.pieces or self.journey.in_step:
                    carried.append(self._carried(known))
                    yield self._step(first, carried[-1])
            for stage in others:
                for one in carried:
                    yield self._step(stage, one)
            self.report.num_rounds += 1

    def _carried(self, known: Known) -> _Carried:
        # Copied to a device here and not by the scout, whose thread must not disturb a graph that is being captured.
        device = self.ring.device
        rows = known.rows if device == _HOST else CachedRows.of(known.visit.pieces, device)
        return _Carried(known.visit, rows, None if known.tokens is None else known.tokens.to(device))

    def _step(self, stage: Stage, carried: _Carried) -> _Step:
        """Post the receive of what the stage is to be given."""
        ring, channel = self.ring, self.ring.placement.channel_to(stage.index, Direction.FORWARD)
        if channel is None or not carried.visit.pieces:
            return _Step(stage, carried, None)
        shape, dtype = stage.boundary.whole_shape(carried.visit.num_tokens), stage.boundary.dtype
        return _Step(stage, carried, ring.transport.receive(channel, shape, dtype))

    # ---- compute

    def _forward(self, step: _Step) -> Waiting:
        """Take a visit through one stage and hand on what comes out."""
        stage, visit, ring = step.stage, step.carried.visit, self.ring
        record = ring.recorder.begin(Action(Op.F, stage.index, visit.slot))
        if not visit.pieces:
            stage.keep_step(step.carried.rows)
            ring.recorder.end(record)
            return
        x = yield from self._input(step, record)
        ring.recorder.started(record)
        y = self.journey.decode(stage, x, step.carried.rows, visit.slot)
        if ring.placement.is_last(stage.index):
            assert self.journey.draw is not None
            y = self.journey.draw(y, visit.sampled)
        self._hand_on(stage, visit, y)
        ring.recorder.end(record)
        self.report.count(record, visit)

    def _input(self, step: _Step, record: Record) -> Generator[Receipt, None, Tensor]:
        ring, visit, receipt = self.ring, step.carried.visit, step.receipt
        before = ring.placement.previous(step.stage.index)
        if before is None:
            assert step.carried.tokens is not None
            return step.carried.tokens
        if receipt is None:
            return self._handed.pop((before, visit.slot))
        ring.recorder.awaits(record, Awaited(Direction.FORWARD, before, visit.slot, ring.placement.rank_of(before)))
        while not receipt.ready():
            yield receipt
        return receipt.wait()

    def _hand_on(self, stage: Stage, visit: Visit, y: Tensor) -> None:
        ring = self.ring
        if ring.placement.is_last(stage.index):
            self._scout.drawn(y)
        elif (channel := ring.placement.channel_from(stage.index, Direction.FORWARD)) is None:
            self._handed[stage.index, visit.slot] = y
        else:
            ring.transport.send(channel, y.contiguous())


def travel_together(rings: Sequence[Ring], journeys: Sequence[Journey]) -> list[RingReport]:
    """Run all ranks of a ring in this thread, in turn, each as far as its messages allow.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    ranks = {
        ring.rank: Participant(ring.steps(journey), ring.recorder.where, torch.inference_mode)
        for ring, journey in zip(rings, journeys, strict=True)
    }
    reports = run_in_turn(ranks)
    return [reports[ring.rank] for ring in rings]
