"""Generation's decisions: who is in which row, and what each slot carries next. Without input, output or tensors.

A *slot* is a group of rows of the cache that goes round the ring of stages together, a *row* is the place of one
sequence. A prompt is read in pieces; later visits carry one token a row, the one that was drawn last. The conductor is
told what was drawn and says what the slot carries next; whoever owns it does the rest. It sits where the first stage
is; other ranks are told its visits and decide nothing.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.schedule.actions import check_count

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Wish:
    """One sequence to be generated: a sample of prompt number `prompt`, until a token of `end_tokens` or its length."""

    prompt: int
    num_prompt_tokens: int
    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` tokens of one sequence for the stages to read, the first of which has position `start`.

    row: where its cache lies. sampled: the token that follows the last one is to be drawn. source: the row whose first
    `start` positions hold this prompt already and are copied first (`NO_ROW`: nothing is).
    """

    sequence: int
    row: int
    start: int
    length: int
    sampled: bool
    source: int = NO_ROW

    @property
    def end(self) -> int:
        """Tokens in the cache once the piece is read."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Visit:
    """What a slot carries through the stages once; without pieces there is nothing to compute."""

    slot: int
    pieces: tuple[Piece, ...]
    ends_round: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """The pieces whose next token is drawn, in order."""
        return tuple(piece for piece in self.pieces if piece.sampled)


@dataclass(frozen=True, slots=True)
class RingShape:
    """How many sequences go round together: slots, rows of each, and how many tokens of prompts a visit may read.

    A prompt is always cut at multiples of `prefill_tokens`, whatever else the visit carries, so that its numbers do not
    depend on its company.

    Raises: ValueError for a count below one.
    """

    num_slots: int
    rows_per_slot: int
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        check_count("num_slots", self.num_slots)
        check_count("rows_per_slot", self.rows_per_slot)
        check_count("prefill_tokens", self.prefill_tokens)

    @property
    def num_rows(self) -> int:
        return self.num_slots * self.rows_per_slot

    def rows_of(self, slot: int) -> range:
        return range(slot * self.rows_per_slot, (slot + 1) * self.rows_per_slot)


class Ending(Enum):
    """Why a sequence ended: its end token, its length, or somebody's word (a stop string)."""

    END_TOKEN = "end_token"
    LENGTH = "length"
    STOPPED = "stopped"


@dataclass(slots=True)
class _Row:
    """sequence: who lives here. num_cached: tokens that the visits so far have read. prompt: the one whose tokens lie
    at the head of the cache, also after the sequence has left."""

    sequence: int | None = None
    num_cached: int = 0
    num_prompt_tokens: int = 0
    source: int = NO_ROW
    prompt: int | None = None


@dataclass(slots=True)
class _Slot:
    rows: range
    in_flight: tuple[Piece, ...] | None = None
    live: list[int] = field(default_factory=list)


class Conductor:
    """Decides what each slot carries, from what was drawn before.

    A round is one pass of the slots of `begin_round`, in order; for each, whoever owns the conductor gives `take` what
    the slot's last visit has drawn, if it is in flight, and asks for its next `visit`. Generation is over when a round
    has no slots.

    Args:
        wishes: the sequences, several samples of one prompt with the same `prompt`. Their order is that of the queue.
        shape: slots and rows.
        refill: give a row to the next sequence as soon as it is free; else only once all of the slot's are.
        longest_first: the queue begins with those that may become longest, so that none of them runs alone at the end;
            equally long ones keep their order.
    """

    def __init__(
        self, wishes: Sequence[Wish], shape: RingShape, refill: bool = True, longest_first: bool = False
    ) -> None:
        self.wishes, self.shape, self.refill = tuple(wishes), shape, refill
        self.tokens: list[list[int]] = [[] for _ in self.wishes]
        self.endings: list[Ending | None] = [None] * len(self.wishes)
        self._rows = [_Row() for _ in range(shape.num_rows)]
        self._slots = [_Slot(shape.rows_of(slot)) for slot in range(shape.num_slots)]
        self._home: dict[int, int] = {}  # sequence -> row
        # Prompts with samples that wait, in the queue's order, and the row that holds, or will hold, each one begun.
        self._waiting: dict[int, deque[int]] = {}
        self._holder: dict[int, int] = {}
        queue = range(len(self.wishes))
        if longest_first:
            queue = sorted(queue, key=lambda sequence: -self.wishes[sequence].max_new_tokens)
        for sequence in queue:
            self._waiting.setdefault(self.wishes[sequence].prompt, deque()).append(sequence)
        self._num_unfinished = len(self.wishes)

    # ---- what the ring asks

    def begin_round(self) -> tuple[int, ...]:
        """The slots that have a turn in the next round; none when all sequences have ended."""
        return tuple(
            number
            for number, slot in enumerate(self._slots)
            if slot.in_flight is not None or (self._waiting and self._share(number) > len(slot.live))
        )

    def in_flight(self, slot: int) -> bool:
        """Whether the slot's last visit has not come back yet."""
        return self._slots[slot].in_flight is not None

    def take(self, slot: int, tokens: Sequence[int]) -> list[int | None]:
        """The slot has come back with the tokens drawn, one for each sampled piece.

        Returns the sequence that each has gone to; None for one that was stopped meanwhile and takes no more.
        """
        here = self._slots[slot]
        assert here.in_flight is not None, f"slot {slot} is not under way"
        drawn, here.in_flight = [piece.sequence for piece in here.in_flight if piece.sampled], None
        assert len(drawn) == len(tokens), f"slot {slot} has drawn {len(drawn)} tokens, not {len(tokens)}"
        takers = [None if self.endings[sequence] else sequence for sequence in drawn]
        for sequence, token in zip(takers, tokens):
            if sequence is not None:
                self._append(sequence, token)
        return takers

    def visit(self, slot: int) -> tuple[Piece, ...]:
        """Fill the slot's free rows and say what it carries next; nothing if there is nothing to do."""
        here = self._slots[slot]
        assert here.in_flight is None, f"slot {slot} is under way"
        self._fill(slot)
        pieces = self._decode_pieces(here) + self._prefill_pieces(here)
        for piece in pieces:
            row = self._rows[piece.row]
            row.num_cached, row.source = piece.end, NO_ROW
        here.in_flight = pieces or None
        return pieces

    def stop(self, sequences: Iterable[int]) -> None:
        """End these sequences where they are, whether they wait or are under way."""
        for sequence in sequences:
            if self.endings[sequence] is None:
                self._end(sequence, Ending.STOPPED)

    # ---- decisions

    def _append(self, sequence: int, token: int) -> None:
        wish = self.wishes[sequence]
        self.tokens[sequence].append(token)
        if token in wish.end_tokens:
            self._end(sequence, Ending.END_TOKEN)
        elif len(self.tokens[sequence]) == wish.max_new_tokens:
            self._end(sequence, Ending.LENGTH)

    def _end(self, sequence: int, ending: Ending) -> None:
        self.endings[sequence] = ending
        self._num_unfinished -= 1
        place = self._home.pop(sequence, None)
        if place is None:
            self._leave_queue(sequence)
            return
        row = self._rows[place]
        row.sequence = None
        self._slots[place // self.shape.rows_per_slot].live.remove(place)
        if not self._is_read(place):
            # Stopped in the middle of its prompt: whoever waits for that must read it anew.
            if self._holder.get(self.wishes[sequence].prompt) == place:
                del self._holder[self.wishes[sequence].prompt]
            row.prompt = None

    def _leave_queue(self, sequence: int) -> None:
        prompt = self.wishes[sequence].prompt
        self._waiting[prompt].remove(sequence)
        if not self._waiting[prompt]:
            del self._waiting[prompt]
            self._holder.pop(prompt, None)

    def _fill(self, number: int) -> None:
        """Give free rows to waiting sequences, no more than the slot's even share of all that are left."""
        slot = self._slots[number]
        if not self.refill and slot.live:
            return
        for place in slot.rows:
            if len(slot.live) >= self._share(number) or not self._waiting:
                return
            if self._rows[place].sequence is None:
                self._settle(slot, place)

    def _share(self, number: int) -> int:
        """How many of the sequences that are left a slot may hold: as many as the others, the first ones the rest."""
        return (self._num_unfinished + self.shape.num_slots - 1 - number) // self.shape.num_slots

    def _settle(self, slot: _Slot, place: int) -> None:
        """Give one free row to a sequence, if any can start now."""
        row = self._rows[place]
        # A row whose prompt is still wanted stays with it: so every prompt is read once.
        prompt = row.prompt if row.prompt in self._waiting else self._next_prompt()
        if prompt is None:
            return
        sequence, holder = self._waiting[prompt][0], self._holder.get(prompt)
        row.num_cached, row.source = 0, NO_ROW
        if holder is not None:
            # Only the prompt's last token is read again, for what follows it.
            row.num_cached = self.wishes[sequence].num_prompt_tokens - 1
            row.source = NO_ROW if row.prompt == prompt else holder
        row.prompt, row.sequence, row.num_prompt_tokens = prompt, sequence, self.wishes[sequence].num_prompt_tokens
        self._holder.setdefault(prompt, place)
        self._leave_queue(sequence)
        self._home[sequence] = place
        slot.live.append(place)

    def _next_prompt(self) -> int | None:
        """The first in the queue that has not been begun, or has been read to its end; others must wait for that."""
        for prompt in self._waiting:
            holder = self._holder.get(prompt)
            if holder is None or self._is_read(holder):
                return prompt
        return None

    def _is_read(self, place: int) -> bool:
        """Whether the row's prompt lies in its cache, at the latest when the next visit comes by."""
        return self._num_left(place) <= 0

    def _decode_pieces(self, slot: _Slot) -> tuple[Piece, ...]:
        """One token for each row of which all others are read, in the order of the rows.

        Also where it is the prompt's last: a row that copies from another must do so now, before that is overwritten.
        """
        return tuple(self._piece(place, 1) for place in sorted(slot.live) if self._num_left(place) <= 1)

    def _prefill_pieces(self, slot: _Slot) -> tuple[Piece, ...]:
        """Parts of prompts within the budget, those that came first before the others."""
        pieces, budget = [], self.shape.prefill_tokens
        for place in slot.live:
            length = min(self.shape.prefill_tokens, self._num_left(place))
            if length <= budget and self._num_left(place) > 1:
                pieces.append(self._piece(place, length))
                budget -= length
        return tuple(pieces)

    def _num_left(self, place: int) -> int:
        """Tokens of the row's prompt that are not read yet."""
        return self._rows[place].num_prompt_tokens - self._rows[place].num_cached

    def _piece(self, place: int, length: int) -> Piece:
        row = self._rows[place]
        assert row.sequence is not None
        sampled = row.num_cached + length >= row.num_prompt_tokens
        return Piece(row.sequence, place, row.num_cached, length, sampled, row.source)
