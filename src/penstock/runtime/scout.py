"""What a rank knows of the visits to come: the rank of the first stage decides them, headers tell the others.

A scout does what needs no stage. It takes the tokens that have come back, or a header, and so learns the next visit;
and it tells the next rank. Where ranks are processes it does so in a thread while its rank computes, as far ahead as
the tokens that are back allow: between two visits there is next to nothing left to do.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model import CachedRows
from penstock.runtime.errors import TransportError
from penstock.runtime.transport import HostChannel, Receipt, Transport
from penstock.schedule import Conductor, Piece, Placement, RingShape, Visit

NUMBERS_PER_TOKEN = 3
"""What comes back of a drawn token: itself, and the bits of two log-probabilities in fp64."""

HEADERS, TOKENS = "headers", "tokens"
_CLOSING = -1
_HEAD, _PIECE = 3, 6


def host_channels(placement: Placement) -> list[HostChannel]:
    """The lines of headers, from each rank to the next, and the one of tokens, in the order of their creation."""
    channels = [HostChannel(rank, rank + 1, HEADERS) for rank in range(placement.num_ranks - 1)]
    drawer = placement.output_rank
    return channels if drawer == 0 else [*channels, HostChannel(drawer, 0, TOKENS)]


@dataclass(frozen=True, eq=False)
class Lead:
    """What only the rank of the first stage needs.

    prompts: token ids of each prompt. heard: told of each sequence's new token and the numbers that came with it.
    goes_on: where pipelines keep in step, from whether this one has anything left to whether any has; called once a
    round, on the leading ranks of all of them together.
    """

    conductor: Conductor
    prompts: Sequence[Sequence[int]]
    heard: Callable[[int, Sequence[int]], None]
    goes_on: Callable[[bool], bool] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A visit to come, with what every unit receives beside the activations.

    rows: on the host. tokens: on the leading rank the token ids that it reads [T], on the host.
    """

    visit: Visit
    rows: CachedRows
    tokens: Tensor | None = None


class Scout:
    """One rank's part in telling what the slots of one journey carry.

    Args:
        host: carries headers and tokens; only the scout receives from it.
        lead: on the rank of the first stage.
    """

    def __init__(self, host: Transport, placement: Placement, shape: RingShape, lead: Lead | None) -> None:
        self._host, self._lead, self.rank = host, lead, host.rank
        self._is_last = host.rank + 1 == placement.num_ranks
        self._drawer = placement.output_rank
        self._header_shape = (_HEAD + _PIECE * shape.rows_per_slot,)
        self._header: Receipt | None = None
        self._turns: Sequence[int] = ()
        self._place = 0
        # On the leading rank, the tokens of slots under way; those that are drawn there lie in `_drawn_here`.
        self._returning: dict[int, tuple[int, Receipt]] = {}
        self._drawn_here = _Here()

    def learn(self) -> Generator[Receipt, None, Known | None]:
        """The next visit, which the next rank is told of; None when the ring closes."""
        lead = self._lead
        visit = yield from (self._heard() if lead is None else self._decided(lead))
        if not self._is_last:
            line = HostChannel(self.rank, self.rank + 1, HEADERS)
            self._host.send(line, _packed(visit, self._header_shape[0]))
        if visit is None:
            return None
        tokens = None if lead is None else torch.tensor(_tokens(lead, visit), dtype=torch.int64)
        return Known(visit, CachedRows.of(visit.pieces), tokens)

    def drawn(self, numbers: Tensor) -> None:
        """Hand back what was drawn for a visit, [S, 3]; called on the drawing rank, visit by visit in their order."""
        if self._drawer == 0:
            self._drawn_here.put(numbers)
        else:
            # Never without a row, so that a slot which only reads is waited for as well.
            whole = numbers if len(numbers) else numbers.new_zeros(1, NUMBERS_PER_TOKEN)
            self._host.send(HostChannel(self._drawer, 0, TOKENS), whole)

    def cancel(self) -> None:
        """The rank has failed: nothing more is drawn here."""
        self._drawn_here.put(None)

    @property
    def num_returning(self) -> int:
        """Slots whose tokens have not been taken yet."""
        return len(self._returning)

    def _decided(self, lead: Lead) -> Generator[Receipt, None, Visit | None]:
        """The leading rank's next visit."""
        conductor = lead.conductor
        if self._place == len(self._turns):
            self._turns, self._place = self._begin_round(lead), 0
            if not self._turns:
                return None
        slot = self._turns[self._place]
        self._place += 1
        if conductor.in_flight(slot):
            numbers = (yield from self._returned(slot)).tolist()
            for sequence, row in zip(conductor.take(slot, [row[0] for row in numbers]), numbers, strict=True):
                if sequence is not None:
                    lead.heard(sequence, row)
        visit = Visit(slot, conductor.visit(slot), ends_round=self._place == len(self._turns))
        if visit.pieces:
            # Posted before anything is sent, so that the tokens are awaited when they come.
            self._returning[slot] = (len(visit.sampled), self._awaited_tokens(visit))
        return visit

    def _begin_round(self, lead: Lead) -> Sequence[int]:
        turns = lead.conductor.begin_round()
        if lead.goes_on is None:
            return turns
        # In step every slot has its turn, in all pipelines or in none.
        return range(lead.conductor.shape.num_slots) if lead.goes_on(bool(turns)) else ()

    def _awaited_tokens(self, visit: Visit) -> Receipt:
        if self._drawer == 0:
            return self._drawn_here
        shape = (max(1, len(visit.sampled)), NUMBERS_PER_TOKEN)
        return self._host.receive(HostChannel(self._drawer, 0, TOKENS), shape, torch.int64)

    def _returned(self, slot: int) -> Generator[Receipt, None, Tensor]:
        """What was drawn for the slot's last visit, [S, 3]."""
        num_sampled, receipt = self._returning.pop(slot)
        while not receipt.ready():
            yield receipt
        return receipt.wait()[:num_sampled]

    def _heard(self) -> Generator[Receipt, None, Visit | None]:
        """What the leading rank has decided; the next header is awaited from then on."""
        line = HostChannel(self.rank - 1, self.rank, HEADERS)
        receipt = self._header or self._host.receive(line, self._header_shape, torch.int64)
        while not receipt.ready():
            yield receipt
        visit = _unpacked(receipt.wait().tolist())
        if visit is not None:
            self._header = self._host.receive(line, self._header_shape, torch.int64)
        return visit


class Ahead:
    """A thread that scouts while its rank computes, and hands over what it has learnt."""

    def __init__(self, scout: Scout) -> None:
        self._scout = scout
        self._learnt: queue.SimpleQueue[Known | Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock scout of rank {scout.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (known := _waited_for(self._scout.learn())) is not None:
                self._learnt.put(known)
            self._learnt.put(None)
        except Exception as error:
            self._learnt.put(error)  # raised where the rank computes

    def num_learnt(self) -> int:
        """How often `take` gives something at once."""
        return self._learnt.qsize()

    def take(self) -> Known | None:
        """The next visit, None when the ring closes; waits until it is known.

        Raises: what the thread has failed with.
        """
        known = self._learnt.get()
        if isinstance(known, Exception):
            raise known
        return known


def _waited_for(learning: Generator[Receipt, None, Known | None]) -> Known | None:
    """What is learnt, where each receipt's `wait` blocks: then it does not matter which are ready."""
    while True:
        try:
            next(learning)
        except StopIteration as stop:
            return stop.value


class _Here:
    """The receipt of whatever is drawn next on the leading rank itself."""

    def __init__(self) -> None:
        self._drawn: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def put(self, numbers: Tensor | None) -> None:
        self._drawn.put(numbers)

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        numbers = self._drawn.get()
        if numbers is None:
            raise TransportError("the tokens of a visit were never drawn")
        return numbers


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
