"""Generation: slots of sequences go round the ring of stages until all have ended.

The rank of the first stage leads: its conductor decides what each slot carries. A small header goes ahead from rank to
rank on host memory and says it to the others, the activations follow from stage to stage, and the rank of the last
stage sends the tokens it has drawn straight back to the first. Every rank takes the slots of a round in order, stage
by stage, so all messages of a line come in the order in which they are awaited, and nothing else is ever sent.

Shapes: T tokens of a visit, S sampled ones, D hidden size, V vocabulary, R rows of a slot.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model import CachedRows
from penstock.runtime.errors import Deadlock, TransportError
from penstock.runtime.stage import Stage
from penstock.runtime.trace import Awaited, Record, Recorder
from penstock.runtime.transport import HostChannel, Receipt, Transport
from penstock.schedule import Action, Channel, Conductor, Op, Piece, Placement, RingShape, Visit

Waiting = Generator[Receipt, None, Any]

NUMBERS_PER_TOKEN = 3
"""What comes back of a drawn token: itself, and the bits of two log-probabilities in fp64."""

HEADERS, TOKENS = "headers", "tokens"
_CLOSING = -1
_HEAD, _PIECE = 3, 6


def host_channels(placement: Placement) -> list[HostChannel]:
    """The lines of headers, from each rank to the next, and the one of tokens, in the order of their creation."""
    channels = [HostChannel(rank, rank + 1, HEADERS) for rank in range(placement.num_ranks - 1)]
    drawer = placement.rank_of(placement.stages_per_route - 1)
    return channels if drawer == 0 else [*channels, HostChannel(drawer, 0, TOKENS)]


@dataclass(frozen=True, eq=False)
class Lead:
    """What only the rank of the first stage needs.

    prompts: token ids of each prompt. heard: told of each sequence's new token and the numbers that came with it.
    """

    conductor: Conductor
    prompts: Sequence[Sequence[int]]
    heard: Callable[[int, Sequence[int]], None]


@dataclass(frozen=True, eq=False)
class Journey:
    """One generation as a rank sees it.

    caches: of each local stage, a cache per unit. draw: on the rank of the last stage, from the logits [S, V] and their
    pieces to the numbers that come back, [S, 3] int64 on the host. lead: on the rank of the first stage.
    """

    shape: RingShape
    caches: Mapping[int, Sequence[Any]]
    draw: Callable[[Tensor, Sequence[Piece]], Tensor] | None = None
    lead: Lead | None = None


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
        self.recorder, self.device = recorder, device
        self.rank = transport.rank
        self.drawer = placement.rank_of(placement.stages_per_route - 1)
        self.stages = [stage for number, stage in sorted(stages.items()) if number < placement.stages_per_route]

    def run(self, journey: Journey) -> RingReport:
        """Take part until all sequences have ended. Blocks in the transport.

        Raises:
            TransportError: a message did not come or was not taken in time.
        """
        steps = self.steps(journey)
        with torch.inference_mode():
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    return stop.value

    def steps(self, journey: Journey) -> Generator[Receipt, None, RingReport]:
        """`run` as a generator that yields the receipts it can not yet take, for ranks that share a thread."""
        trip, finished = _Trip(self, journey), False
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
                self.transport.abandon()
                self.host.abandon()


@dataclass(frozen=True, eq=False)
class _Carried:
    """A visit with what every unit receives beside the activations; `rows` is None where nothing is carried."""

    visit: Visit
    rows: CachedRows | None


class _Trip:
    """One journey of one rank, under way."""

    def __init__(self, ring: Ring, journey: Journey) -> None:
        self.ring, self.journey, self.report = ring, journey, RingReport()
        self._header_shape = (_HEAD + _PIECE * journey.shape.rows_per_slot,)
        self._header: Receipt | None = None
        self._turns: Sequence[int] = ()
        # Under way on this rank: activations between two of its stages, and on the leading one the tokens of slots.
        self._handed: dict[tuple[int, int], Tensor] = {}
        self._returning: dict[int, tuple[int, Receipt | Tensor]] = {}

    def rounds(self) -> Generator[Receipt, None, RingReport]:
        """Round after round, until the leading rank closes the ring."""
        start = time.perf_counter()
        while (carried := (yield from self._first_pass())) is not None:
            for stage in self.ring.stages[1:]:
                for one in carried:
                    yield from self._forward(stage, one)
            self.report.num_rounds += 1
        assert not (self._handed or self._returning), "a ring that closes has nothing under way"
        self.report.wall_s = time.perf_counter() - start
        return self.report

    def _first_pass(self) -> Generator[Receipt, None, list[_Carried] | None]:
        """Learn what the slots carry, each through the first local stage at once; None when the ring closes."""
        carried: list[_Carried] = []
        while not (carried and carried[-1].visit.ends_round):
            lead = self.journey.lead
            visit = yield from (self._heard() if lead is None else self._decided(lead, len(carried)))
            self._tell(visit)
            if visit is None:
                return None
            rows = CachedRows.of(visit.pieces, self.ring.device) if visit.pieces else None
            carried.append(_Carried(visit, rows))
            yield from self._forward(self.ring.stages[0], carried[-1])
        return carried

    # ---- headers and tokens

    def _decided(self, lead: Lead, place: int) -> Generator[Receipt, None, Visit | None]:
        """The leading rank's next visit, the `place`-th of the round."""
        conductor = lead.conductor
        if place == 0:
            self._turns = conductor.begin_round()
            if not self._turns:
                return None
        slot = self._turns[place]
        if conductor.in_flight(slot):
            numbers = (yield from self._returned(slot)).tolist()
            for sequence, row in zip(conductor.take(slot, [row[0] for row in numbers]), numbers, strict=True):
                if sequence is not None:
                    lead.heard(sequence, row)
        return Visit(slot, conductor.visit(slot), ends_round=place + 1 == len(self._turns))

    def _heard(self) -> Generator[Receipt, None, Visit | None]:
        """What the leading rank has decided; the next header is awaited from then on."""
        line, host = HostChannel(self.ring.rank - 1, self.ring.rank, HEADERS), self.ring.host
        receipt = self._header or host.receive(line, self._header_shape, torch.int64)
        while not receipt.ready():
            yield receipt
        visit = _unpacked(receipt.wait().tolist())
        self._header = None if visit is None else host.receive(line, self._header_shape, torch.int64)
        return visit

    def _tell(self, visit: Visit | None) -> None:
        if self.ring.rank + 1 < self.ring.placement.num_ranks:
            line = HostChannel(self.ring.rank, self.ring.rank + 1, HEADERS)
            self.ring.host.send(line, _packed(visit, self._header_shape[0]))

    def _returned(self, slot: int) -> Generator[Receipt, None, Tensor]:
        """What was drawn for the slot's last visit, [S, 3]."""
        num_sampled, numbers = self._returning.pop(slot)
        if not isinstance(numbers, Tensor):
            while not numbers.ready():
                yield numbers
            numbers = numbers.wait()
        return numbers[:num_sampled]

    # ---- compute

    def _forward(self, stage: Stage, carried: _Carried) -> Waiting:
        """Take a visit through one stage and hand on what comes out."""
        visit, rows, ring = carried.visit, carried.rows, self.ring
        if rows is None:
            return
        record = ring.recorder.begin(Action(Op.F, stage.index, visit.slot))
        x = yield from self._input(stage, visit, record)
        ring.recorder.started(record)
        y = stage.decode(x, self.journey.caches[stage.index], rows)
        if ring.placement.is_last(stage.index):
            assert self.journey.draw is not None
            y = self.journey.draw(y, visit.sampled)
        self._hand_on(stage, visit, y)
        ring.recorder.end(record)
        self.report.count(record, visit)

    def _input(self, stage: Stage, visit: Visit, record: Record) -> Generator[Receipt, None, Tensor]:
        ring, lead = self.ring, self.journey.lead
        before = ring.placement.previous(stage.index)
        if before is None:
            assert lead is not None
            # Posted before anything is sent, so that the tokens are awaited when they come.
            self._await_tokens(visit)
            return torch.tensor(_tokens(lead, visit), dtype=torch.int64, device=ring.device)
        giver = ring.placement.rank_of(before)
        if giver == ring.rank:
            return self._handed.pop((before, visit.slot))
        shape, dtype = stage.boundary.whole_shape(visit.num_tokens), stage.boundary.dtype
        receipt = ring.transport.receive(Channel(giver, ring.rank, Op.F), shape, dtype)
        ring.recorder.awaits(record, Awaited(Op.F, before, visit.slot, giver))
        while not receipt.ready():
            yield receipt
        return receipt.wait()

    def _await_tokens(self, visit: Visit) -> None:
        if self.ring.drawer != self.ring.rank:
            line, num_sampled = HostChannel(self.ring.drawer, self.ring.rank, TOKENS), len(visit.sampled)
            receipt = self.ring.host.receive(line, (max(1, num_sampled), NUMBERS_PER_TOKEN), torch.int64)
            self._returning[visit.slot] = (num_sampled, receipt)

    def _hand_on(self, stage: Stage, visit: Visit, y: Tensor) -> None:
        ring = self.ring
        after = ring.placement.next(stage.index)
        if after is None:
            if ring.rank == 0:
                self._returning[visit.slot] = (len(y), y)
            else:
                # Never without a row, so that a slot which only reads is waited for as well.
                ring.host.send(HostChannel(ring.rank, 0, TOKENS), y if len(y) else y.new_zeros(1, NUMBERS_PER_TOKEN))
            return
        taker = ring.placement.rank_of(after)
        if taker == ring.rank:
            self._handed[stage.index, visit.slot] = y
        else:
            ring.transport.send(Channel(ring.rank, taker, Op.F), y.contiguous())


def _tokens(lead: Lead, visit: Visit) -> list[int]:
    """The token ids that a visit reads: of prompts, and those that were drawn."""
    tokens: list[int] = []
    for piece in visit.pieces:
        prompt = lead.prompts[lead.conductor.wishes[piece.sequence].prompt]
        if piece.start < len(prompt):
            tokens += prompt[piece.start : piece.end]
        else:
            tokens.append(lead.conductor.tokens[piece.sequence][piece.start - len(prompt)])
    return tokens


def _packed(visit: Visit | None, size: int) -> Tensor:
    """A header: slot, number of pieces, whether the round ends; then six numbers a piece. None closes the ring."""
    numbers = [_CLOSING]
    if visit is not None:
        numbers = [visit.slot, len(visit.pieces), int(visit.ends_round)]
        for p in visit.pieces:
            numbers += (p.sequence, p.row, p.start, p.length, int(p.sampled), p.source)
    return torch.tensor(numbers + [0] * (size - len(numbers)))


def _unpacked(header: Sequence[int]) -> Visit | None:
    if header[0] == _CLOSING:
        return None
    slot, num_pieces, ends_round = header[:_HEAD]
    pieces = []
    for begin in range(_HEAD, _HEAD + _PIECE * num_pieces, _PIECE):
        sequence, row, start, length, sampled, source = header[begin : begin + _PIECE]
        pieces.append(Piece(sequence, row, start, length, bool(sampled), source))
    return Visit(slot, tuple(pieces), bool(ends_round))


def travel_together(rings: Sequence[Ring], journeys: Sequence[Journey]) -> list[RingReport]:
    """Run all ranks of a ring in this thread, in turn, each as far as its messages allow.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    running = {ring.rank: ring.steps(journey) for ring, journey in zip(rings, journeys, strict=True)}
    awaited: dict[int, Receipt] = {}
    reports: dict[int, RingReport] = {}
    try:
        while running:
            able = [r for r in running if r not in awaited or awaited[r].ready()]
            if not able:
                stuck = "; ".join(ring.recorder.where() for ring in rings if ring.rank in running)
                raise Deadlock(f"no rank can go on: {stuck}")
            for rank in able:
                try:
                    with torch.inference_mode():
                        awaited[rank] = next(running[rank])
                except StopIteration as stop:
                    reports[rank] = stop.value
                    del running[rank]
                    awaited.pop(rank, None)
    finally:
        for steps in running.values():
            steps.close()
    return [reports[ring.rank] for ring in rings]
