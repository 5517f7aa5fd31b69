"""The rows of the KV cache: how many there are, and which prompts' beginnings they hold.

A prompt that several sequences have is read once, into the row of the first of them, its *reader*; the others copy it.
A prompt that begins like what a row holds copies the whole pieces in which the two are alike.
"""

from collections import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.schedule.generation.sequence import NO_ROW, Sequence
from penstock.schedule.placement import check_count


@dataclass(frozen=True, slots=True)
class RingShape:
    """The number of slots in the ring, the rows of each, and the prompt tokens that a batch may read.

    A prompt is always cut at multiples of `prefill_tokens`, so its numbers do not depend on the rest of the batch. Such
    pieces at the beginning of several prompts are read once.

    >>> RingShape(num_slots=2, rows_per_slot=3).rows_of(1)
    range(3, 6)

    Raises:
        ValueError: a count is below one.
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
        """The slot's rows of the KV cache."""
        return range(slot * self.rows_per_slot, (slot + 1) * self.rows_per_slot)


class Rows:
    """The rows of the KV cache: the sequence that has each, or had it last, and where the next one may begin.

    >>> from penstock import SamplingParams
    >>> one, two = Sequence.all_of([[5, 3, 8], [5, 3, 9]], [SamplingParams()] * 2)
    >>> rows = Rows(RingShape(num_slots=1, rows_per_slot=2, prefill_tokens=2))
    >>> rows.place(0, {0: [one], 1: [two]}) is one, one.row
    (True, 0)
    >>> rows.place(0, {1: [two]}) is None  # it begins like the one that is being read
    True
    >>> one.num_cached = 3
    >>> rows.place(0, {1: [two]}) is two, two.row, two.source, two.num_cached
    (True, 1, 0, 2)
    """

    #: Slots, rows of each, tokens of a piece of a prompt.
    shape: RingShape
    #: Slot -> the sequences that have its rows, in order of arrival.
    live: list[list[Sequence]]
    #: Row that was lost -> its tokens that may not be finite, to be cleaned with the next sequence's first batch.
    lost: dict[int, int]
    #: Row -> the sequence that has it, or had it last, whose prompt still begins the row.
    _holders: list[Sequence | None]
    #: Prompt of waiting sequences -> the row that has read it or is reading it.
    _readers: dict[int, int]

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.live = [[] for _ in range(shape.num_slots)]
        self.lost = {}
        self._holders = [None] * shape.num_rows
        self._readers = {}

    def place(self, slot: int, queue: Mapping[int, abc.Sequence[Sequence]]) -> Sequence | None:
        """Give a free row of the slot to a sequence of the queue (prompt -> its sequences); None if none can begin.

        The sequence then says where it begins: its `row`, the tokens that are there beforehand (`num_cached`), and the
        row from which they are to be copied (`source`).
        """
        # Rows whose beginning is to be copied by a later batch than the next are not free yet.
        copied = {s.source for live in self.live for s in live if s.num_to_read - s.num_cached > 1}
        holders = ((row, self._holders[row]) for row in self.shape.rows_of(slot) if row not in copied)
        free = [row for row, holder in holders if holder is None or holder.row != row]
        ready = self._first_ready(queue) if free else None
        for row in free:
            last = self._holders[row]
            # A row whose prompt is still wanted stays with it, so that every prompt is read once.
            stays = last is not None and last.prompt in queue
            prompt = last.prompt if last is not None and stays else ready
            if prompt is None:
                continue
            sequence = queue[prompt][0]
            if prompt in self._readers:
                # Only the prompt's last token is computed again, for its logits.
                sequence.num_cached = len(sequence.prompt_tokens) - 1
                sequence.source = NO_ROW if stays else self._readers[prompt]
            else:
                sequence.source, sequence.num_cached = self._beginning(sequence, row)
            self._hold(row, sequence)
            self.live[slot].append(sequence)
            return sequence
        return None

    def leave(self, sequence: Sequence) -> None:
        """Free the row of a sequence that has ended."""
        row = sequence.row
        assert row is not None
        sequence.row = None
        self.live[row // self.shape.rows_per_slot].remove(sequence)
        if sequence.num_cached < sequence.num_to_read:
            # Stopped in the middle of its prompt, so other samples must read it again.
            self.lose(row, sequence.num_cached)

    def lose(self, row: int, num_tokens: int) -> None:
        """Forget the tokens that the row holds: its prompt was not read to the end, or its numbers are not finite."""
        holder, self._holders[row] = self._holders[row], None
        self.lost[row] = max(num_tokens, self.lost.get(row, 0))
        if holder is not None and self._readers.get(holder.prompt) == row:
            del self._readers[holder.prompt]

    def forget(self, prompt: int) -> None:
        """Forget who reads a prompt, which no sequence waits for any more."""
        self._readers.pop(prompt, None)

    def read_again(self, queue: Collection[int]) -> None:
        """Forget what all rows hold; sequences under way are read again, new tokens with their prompts."""
        self._readers.clear()
        self._holders = [None] * len(self._holders)
        for sequence in (sequence for live in self.live for sequence in live):
            sequence.num_cached, sequence.source = 0, NO_ROW
            sequence.num_to_read = len(sequence.token_ids)
            assert sequence.row is not None
            self._hold(sequence.row, sequence)
            if sequence.prompt not in queue:
                self.forget(sequence.prompt)

    def _hold(self, row: int, sequence: Sequence) -> None:
        """Let the sequence have the row, and read its prompt there unless another row does."""
        self._holders[row], sequence.row = sequence, row
        self._readers.setdefault(sequence.prompt, row)

    def _first_ready(self, queue: Mapping[int, abc.Sequence[Sequence]]) -> int | None:
        """The first prompt in the queue that no row is reading at the moment; others wait until that is done.

        So do those that begin like one which a row is reading, unless too many wait to look at each.
        """
        for number, (prompt, waiting) in enumerate(queue.items()):
            if (reader := self._readers.get(prompt)) is not None:
                holder = self._holders[reader]
                is_ready = holder is not None and holder.num_cached >= holder.num_to_read
            else:
                is_ready = number >= self.shape.num_rows or not any(
                    holder.num_cached < holder.num_to_read and self._num_alike(waiting[0], holder) > holder.num_cached
                    for holder in self._holders
                    if holder is not None
                )
            if is_ready:
                return prompt
        return None

    def _beginning(self, sequence: Sequence, row: int) -> tuple[int, int]:
        """The row from which to copy the beginning of a prompt that `row` is to have, and how many tokens.

        Only whole pieces of a prompt count, so that a prompt is cut as if it were alone, and no number changes.
        `NO_ROW` where there are none, or where they are in `row` itself, whose own beginning needs no copy.
        """
        if len(sequence.prompt_tokens) <= self.shape.prefill_tokens:
            return NO_ROW, 0
        num_shared = [
            0
            if holder is None or holder.source != NO_ROW
            else min(self._num_alike(sequence, holder), holder.num_cached)
            for holder in self._holders
        ]
        source = max(range(len(num_shared)), key=lambda other: (num_shared[other], other == row))
        return NO_ROW if source == row or not num_shared[source] else source, num_shared[source]

    def _num_alike(self, one: Sequence, other: Sequence) -> int:
        """The tokens of the whole pieces with which two prompts begin alike, without the last token of `one`."""
        piece, ours, theirs = self.shape.prefill_tokens, one.prompt_tokens, other.prompt_tokens
        most, length = min(len(ours) - 1, len(theirs)), 0
        while length + piece <= most and ours[length : length + piece] == theirs[length : length + piece]:
            length += piece
        return length
