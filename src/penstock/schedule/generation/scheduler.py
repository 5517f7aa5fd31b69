"""Generation: which sequences compute next, decided without tensors, messages or clocks.

On one rank with one slot, generation is this loop::

    while (batch := scheduler.schedule()) is not None:
        tokens = run(batch)
        scheduler.update(batch, tokens)

In a ring of ranks several slots go round together. A *slot* is a group of rows of the KV cache, a *row* is the place
of one sequence. In each *round* every slot that has work gets one turn, and a batch's tokens come back before its
slot's next turn. A prompt is read in chunks; from then on a turn computes one token of each sequence in the slot, the
one sampled last. The scheduler sits on the rank of the first stage and decides for all ranks. Sequences may join the
queue at any time; the next batch says which have, and which of them have ended.
"""

import math
from collections import Counter, abc, deque
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from operator import attrgetter

from penstock.schedule.generation.rows import RingShape, Rows
from penstock.schedule.generation.sequence import NO_ROW, Ending, Sequence, Token


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a batch: the `length` tokens from position `start` on.

    row: its row of the KV cache. sampled: True if the token after the last one is sampled. source: the row from which
    the first `start` positions are copied beforehand (`NO_ROW`: none are). cleaned: the first so many
    positions of the row may hold numbers that are not finite; from `start` on they are replaced beforehand.

    >>> BatchItem(sequence=0, row=1, start=4, length=3, sampled=True).end
    7
    """

    sequence: int
    row: int
    start: int
    length: int
    sampled: bool
    source: int = NO_ROW
    cleaned: int = 0

    @property
    def end(self) -> int:
        """The number of tokens in the row once this item is computed."""
        return self.start + self.length


@dataclass(frozen=True)
class Batch:
    """The items that a slot computes in one turn; there may be none.

    arrived: sequences that have joined the queue since the batch before. ended: numbers of such that have ended; no
    batch from this one on computes them.

    >>> prompt = BatchItem(sequence=0, row=0, start=0, length=5, sampled=False)
    >>> token = BatchItem(sequence=1, row=1, start=7, length=1, sampled=True)
    >>> batch = Batch(slot=0, items=(prompt, token))
    >>> batch.num_tokens, [item.sequence for item in batch.sampled]
    (6, [1])
    """

    slot: int
    items: tuple[BatchItem, ...]
    ends_round: bool = True
    arrived: tuple[Sequence, ...] = ()
    ended: tuple[int, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens that the stages read."""
        return sum(item.length for item in self.items)

    @cached_property
    def sampled(self) -> tuple[BatchItem, ...]:
        """The items after which a token is sampled, in order."""
        return tuple(item for item in self.items if item.sampled)


_ROW = attrgetter("row")


@dataclass(eq=False, repr=False)
class Scheduler:
    """Decides which sequences compute next, from the tokens sampled so far.

    >>> from penstock import SamplingParams
    >>> sequences = Sequence.all_of([[5, 3], [8]], [SamplingParams(max_new_tokens=2)] * 2)
    >>> scheduler = Scheduler(sequences, RingShape(num_slots=1, rows_per_slot=2))
    >>> while (batch := scheduler.schedule()) is not None:
    ...     print([(item.sequence, item.start, item.length) for item in batch.items])
    ...     grown = scheduler.update(batch, [Token(9)] * len(batch.sampled))
    [(1, 0, 1), (0, 0, 2)]
    [(0, 2, 1), (1, 1, 1)]
    []
    """

    #: The sequences that it begins with, in the order of the queue; samples of one prompt have the same `prompt`.
    sequences: abc.Sequence[Sequence]
    #: Slots, rows of each, prompt tokens of a batch.
    shape: RingShape
    #: True if a free row is given to the next sequence at once; otherwise only when all rows of its slot are free.
    refill: bool = True
    #: True to begin with the sequences that may become longest, so that none runs alone at the end. Equally long ones
    #: keep their order.
    longest_first: InitVar[bool] = False
    #: For pipelines that compute in lockstep; called once a round with whether this one has work left, it returns
    #: whether any has. Every round then gives every slot a turn.
    any_goes_on: abc.Callable[[bool], bool] | None = None
    #: The batches of a slot that may be in flight when its next one is scheduled. A sequence whose end nobody could
    #: foresee is then computed once too often.
    late: int = 0
    #: Of the weights; each token bears it.
    version: int = field(default=0, init=False)
    #: The order of turns, and the round: slots that still have a turn in it.
    _order: list[int] = field(init=False)
    _turns: deque[int] = field(default_factory=deque, init=False)
    #: Slot -> True if its last batch had items.
    _busy: list[bool] = field(init=False)
    #: Slot -> its batches that have not come back yet.
    _in_flight: Counter[int] = field(default_factory=Counter, init=False)
    #: Which sequence has each row, and which takes the next one.
    _rows: Rows = field(init=False)
    #: The queue: prompt -> its sequences without a row, in order.
    _waiting: dict[int, deque[Sequence]] = field(default_factory=dict, init=False)
    #: Sequences without an ending, by number.
    _unfinished: dict[int, Sequence] = field(default_factory=dict, init=False)
    #: What other ranks must know with the next batch: sequences that have joined, and numbers of such that have ended.
    _arrived: dict[int, Sequence] = field(default_factory=dict, init=False)
    _ended: list[int] = field(default_factory=list, init=False)
    #: Numbers of the unfinished sequences that have joined and were in a batch's news.
    _announced: set[int] = field(default_factory=set, init=False)

    def __post_init__(self, longest_first: bool) -> None:
        num_slots, queue = self.shape.num_slots, self.sequences
        self._order, self._busy, self._rows = list(range(num_slots)), [False] * num_slots, Rows(self.shape)
        self._enqueue(sorted(queue, key=lambda s: -s.params.max_new_tokens) if longest_first else queue)

    def next_slot(self) -> int | None:
        """The slot whose turn is next; None if every sequence has ended. Begins a round when the last is over.

        A round gives a turn to each slot that computed in the last one or may take a sequence from the queue. Idle
        slots come first, as their turn waits for no batch that is in flight; busy ones keep their order, so that none
        waits for a batch that has only begun.
        """
        if not self._turns:
            self._order.sort(key=self._busy.__getitem__)
            turns = [slot for slot in self._order if self._busy[slot] or self._may_take(slot)]
            if self.any_goes_on is None:
                self._turns.extend(turns)
            elif self.any_goes_on(bool(turns)):
                self._turns.extend(range(self.shape.num_slots))
        return self._turns[0] if self._turns else None

    def schedule(self) -> Batch | None:
        """The next slot's batch; None if every sequence has ended, or will have once batches in flight come back.

        All but `late` of the slot's batches must have come back.
        """
        slot = self.next_slot()
        if slot is None:
            return None
        assert self._in_flight[slot] <= self.late, f"slot {slot} is in flight"
        self._turns.popleft()
        if self.refill or not self._rows.live[slot]:
            while self._may_take(slot) and (sequence := self._rows.place(slot, self._waiting)) is not None:
                self._leave_queue(sequence)
        items = self._items(slot)
        self._busy[slot] = bool(items)
        if items:
            self._in_flight[slot] += 1
        arrived, ended = tuple(self._arrived.values()), tuple(self._ended)
        self._announced |= self._arrived.keys()
        self._arrived.clear()
        self._ended.clear()
        return Batch(slot, items, not self._turns, arrived, ended)

    def sampled(self, batch: Batch) -> list[Sequence]:
        """The sequences of which the batch just scheduled samples a token, in order."""
        return [self._unfinished[item.sequence] for item in batch.sampled]

    def update(self, batch: Batch, tokens: abc.Sequence[Token]) -> list[Sequence]:
        """Take the tokens of a batch that has come back, one for each sampled item.

        Returns the sequences that have grown; a sequence stopped in the meantime does not grow.
        """
        if batch.items:
            assert self._in_flight[batch.slot], f"slot {batch.slot} is not in flight"
            self._in_flight[batch.slot] -= 1
        sampled = batch.sampled
        assert len(sampled) == len(tokens), f"slot {batch.slot} has sampled {len(tokens)} tokens, not {len(sampled)}"
        grown: list[Sequence] = []
        for item, token in zip(sampled, tokens, strict=True):
            sequence = self._unfinished.get(item.sequence)
            if not math.isfinite(token.log_prob):
                # Also that of a sequence stopped in the meantime. Batches in flight write behind it.
                self._rows.lose(item.row, item.end + self.late)
            if sequence is not None:
                sequence.append(token._replace(version=self.version))
                grown.append(sequence)
                if sequence.ending is not None:
                    self._release(sequence)
        return grown

    def stop(self, sequences: abc.Iterable[int]) -> None:
        """End these sequences where they are, waiting or running."""
        for number in sequences:
            sequence = self._unfinished.get(number)
            if sequence is not None:
                sequence.ending = Ending.STOPPED
                self._release(sequence)

    @property
    def is_between_rounds(self) -> bool:
        """True if every slot has had its turn of the round."""
        return not self._turns

    def read_again(self) -> None:
        """Forget all that rows of the cache hold; sequences under way are read again, new tokens with their prompts.

        Nothing may be in flight. Prompts and new tokens are cut like a prompt made of both.
        """
        assert not self._in_flight.total(), "batches in flight read the cache"
        self._rows.read_again(self._waiting)

    def add(self, sequences: abc.Iterable[Sequence]) -> None:
        """Let sequences join at the end of the queue; their numbers and those of their prompts are new."""
        joined = list(sequences)
        self._enqueue(joined)
        self._arrived |= {sequence.number: sequence for sequence in joined}

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, is computed or is in flight."""
        return not self._unfinished and not self._in_flight.total()

    @property
    def num_running(self) -> int:
        """The number of sequences that have a row."""
        return sum(map(len, self._rows.live))

    def _enqueue(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._unfinished[sequence.number] = sequence
            self._waiting.setdefault(sequence.prompt, deque()).append(sequence)

    def _may_take(self, slot: int) -> bool:
        """True if the slot has fewer than its even share of the unfinished sequences, and some wait.

        The first slots take the remainder.
        """
        if not self._waiting:
            return False
        share = (len(self._unfinished) + self.shape.num_slots - 1 - slot) // self.shape.num_slots
        return len(self._rows.live[slot]) < share

    def _release(self, sequence: Sequence) -> None:
        """Take an ended sequence out of its row, or out of the queue.

        Other ranks hear of it if they have heard of its arrival.
        """
        del self._unfinished[sequence.number]
        self._arrived.pop(sequence.number, None)
        if sequence.number in self._announced:
            self._announced.remove(sequence.number)
            self._ended.append(sequence.number)
        if sequence.row is None:
            self._leave_queue(sequence)
        else:
            self._rows.leave(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        prompt = sequence.prompt
        self._waiting[prompt].remove(sequence)
        if not self._waiting[prompt]:
            del self._waiting[prompt]
            self._rows.forget(prompt)

    def _items(self, slot: int) -> tuple[BatchItem, ...]:
        """One token of each sequence that has at most one unread, by row; then chunks of prompts within the budget.

        The first include the last token of a prompt: a row must copy from another before the other is overwritten.
        """
        single: list[BatchItem] = []
        chunks: list[BatchItem] = []
        budget = self.shape.prefill_tokens
        for sequence in self._rows.live[slot]:
            start, row = sequence.num_cached, sequence.row
            assert row is not None
            length = max(1, min(self.shape.prefill_tokens, sequence.num_to_read - start))
            is_single = sequence.num_to_read - start <= 1
            is_last_in_flight = start + 1 - len(sequence.prompt_tokens) >= sequence.params.max_new_tokens
            if is_last_in_flight or (not is_single and length > budget):
                continue
            sampled = start + length >= sequence.num_to_read
            cleaned = self._rows.lost.pop(row, 0)
            item = BatchItem(sequence.number, row, start, length, sampled, sequence.source, cleaned)
            sequence.num_cached, sequence.source = start + length, NO_ROW
            if is_single:
                single.append(item)
            else:
                chunks.append(item)
                budget -= length
        single.sort(key=_ROW)
        return (*single, *chunks)
