"""The rows of the KV cache: how many there are, and which prompts' beginnings they hold.

A prompt that several sequences have is read once, into the row of the first of them, its *reader*; the others copy it.
A prompt that begins like what a row holds copies the whole pieces in which the two are alike.
"""

from dataclasses import dataclass

from penstock.schedule.actions import check_count
from penstock.schedule.generation.sequence import NO_ROW, Sequence


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
        """The number of rows of all slots."""
        return self.num_slots * self.rows_per_slot

    def rows_of(self, slot: int) -> range:
        """The slot's rows of the KV cache."""
        return range(slot * self.rows_per_slot, (slot + 1) * self.rows_per_slot)


class Rows:
    """The sequence that has each row of the KV cache, or had it last.

    >>> from penstock import SamplingParams
    >>> one, two = Sequence.all_of([[5, 3, 8], [5, 3, 9]], [SamplingParams()] * 2)
    >>> rows = Rows(RingShape(num_slots=1, rows_per_slot=2, prefill_tokens=2))
    >>> rows.give(0, one)
    >>> rows.will_share(two)
    True
    >>> one.num_cached = 3
    >>> rows.best_source(two, 1), rows.has_read(0)
    ((0, 2), True)
    """

    #: Row -> the sequence that has it, or had it last, whose prompt still begins the row.
    holders: list[Sequence | None]
    #: Prompt of waiting sequences -> the row that has read it or is reading it.
    readers: dict[int, int]
    #: Row that was lost -> its tokens that may not be finite, to be cleaned with the next sequence's first batch.
    lost: dict[int, int]
    #: Tokens of a piece of a prompt.
    _piece: int

    def __init__(self, shape: RingShape) -> None:
        self.holders = [None] * shape.num_rows
        self.readers = {}
        self.lost = {}
        self._piece = shape.prefill_tokens

    def give(self, row: int, sequence: Sequence) -> None:
        """Let the sequence have the row, and read its prompt there unless another row does."""
        self.holders[row], sequence.row = sequence, row
        self.readers.setdefault(sequence.prompt, row)

    def lose(self, row: int, num_tokens: int) -> None:
        """Forget the tokens that the row holds: its prompt was not read to the end, or its numbers are not finite."""
        holder, self.holders[row] = self.holders[row], None
        self.lost[row] = max(num_tokens, self.lost.get(row, 0))
        if holder is not None and self.readers.get(holder.prompt) == row:
            del self.readers[holder.prompt]

    def forget(self, prompt: int) -> None:
        """Forget who reads a prompt, which no sequence waits for any more."""
        self.readers.pop(prompt, None)

    def clear(self) -> None:
        """Forget what all rows hold."""
        self.readers.clear()
        self.holders = [None] * len(self.holders)

    def has_read(self, row: int) -> bool:
        """True if the row's prompt will be in the KV cache by the time the next batch is computed."""
        holder = self.holders[row]
        return holder is not None and holder.num_unread <= 0

    def best_source(self, sequence: Sequence, row: int) -> tuple[int, int]:
        """The row from which to copy the beginning of a prompt that `row` is to have, and how many tokens.

        Only whole pieces of a prompt count, so that a prompt is cut as if it were alone, and no number changes.
        `NO_ROW` where there are none, or where they are in `row` itself, whose own beginning needs no copy.
        """
        if len(sequence.prompt_tokens) <= self._piece:
            return NO_ROW, 0
        num_shared = {other: self._num_shared(sequence, other) for other in range(len(self.holders))}
        source = max(num_shared, key=lambda other: (num_shared[other], other == row))
        return NO_ROW if source == row or not num_shared[source] else source, num_shared[source]

    def will_share(self, sequence: Sequence) -> bool:
        """True if more of a prompt's beginning will be in some row than is there yet."""
        return any(
            holder is not None and holder.num_unread > 0 and self._num_alike(sequence, holder) > holder.num_cached
            for holder in self.holders
        )

    def _num_shared(self, sequence: Sequence, row: int) -> int:
        """The tokens at the beginning of a prompt that a row holds by the time the next batch is computed."""
        holder = self.holders[row]
        if holder is None or holder.source != NO_ROW:
            return 0
        return min(self._num_alike(sequence, holder), holder.num_cached)

    def _num_alike(self, one: Sequence, other: Sequence) -> int:
        """The tokens of the whole pieces with which two prompts begin alike, without the last token of `one`."""
        piece, ours, theirs = self._piece, one.prompt_tokens, other.prompt_tokens
        most, length = min(len(ours) - 1, len(theirs)), 0
        while length + piece <= most and ours[length : length + piece] == theirs[length : length + piece]:
            length += piece
        return length
