"""The form in which batches travel from rank to rank: a header of numbers, and news of sequences if there are any."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import schedule
from penstock.schedule import Batch, BatchItem
from penstock.settings import SamplingParams, walk
from penstock.settings.declare import plain

_CLOSING = -1
_HEAD, _ITEM = 4, 7
"""Numbers at the head of a header, and of each item behind it."""


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch with the sequences of its items, in their order."""

    batch: Batch
    sequences: tuple[schedule.Sequence, ...]

    @property
    def sampled(self) -> list[schedule.Sequence]:
        """The sequences of which a token is sampled, in order."""
        pairs = zip(self.batch.items, self.sequences, strict=True)
        return [sequence for item, sequence in pairs if item.sampled]


class KnownSequences:
    """The sequences that one rank knows, from the batch that says they have arrived to the one that says they ended."""

    #: number -> sequence
    _by_number: dict[int, schedule.Sequence]

    def __init__(self, sequences: Iterable[schedule.Sequence]) -> None:
        self._by_number = {sequence.number: sequence for sequence in sequences}

    def __len__(self) -> int:
        return len(self._by_number)

    def take(self, batch: Batch) -> TakenBatch:
        """Take note of a batch's news; every rank does so batch by batch, in order."""
        self._by_number |= {sequence.number: sequence for sequence in batch.arrived}
        for number in batch.ended:
            del self._by_number[number]
        return TakenBatch(batch, tuple(self._by_number[item.sequence] for item in batch.items))


def header_size(rows_per_slot: int) -> int:
    """Numbers of a header, whatever the batch."""
    return _HEAD + _ITEM * rows_per_slot


def packed_header(batch: Batch | None, size: int, num_news_bytes: int = 0) -> Tensor:
    """A header: slot, number of items, whether the round ends, bytes of news; then seven numbers an item.

    None closes the ring.
    """
    numbers = [_CLOSING]
    if batch is not None:
        numbers = [batch.slot, len(batch.items), int(batch.ends_round), num_news_bytes]
        for item in batch.items:
            place = item.row, item.start, item.length
            numbers += (item.sequence, *place, int(item.sampled), item.source, item.cleaned)
    return torch.tensor(numbers + [0] * (size - len(numbers)))


def num_news_bytes(header: Sequence[int]) -> int:
    """The size of the message that follows this header; 0: none does."""
    return 0 if header[0] == _CLOSING else header[_HEAD - 1]


def unpacked_header(header: Sequence[int], news: Tensor | None = None) -> Batch | None:
    """The batch of a header and of its news."""
    if header[0] == _CLOSING:
        return None
    slot, num_items, ends_round = header[: _HEAD - 1]
    items = []
    for begin in range(_HEAD, _HEAD + _ITEM * num_items, _ITEM):
        sequence, row, start, length, sampled, source, cleaned = header[begin : begin + _ITEM]
        items.append(BatchItem(sequence, row, start, length, bool(sampled), source, cleaned))
    arrived, ended = ((), ()) if news is None else _unpacked_news(news)
    return Batch(slot, tuple(items), bool(ends_round), arrived, ended)


def packed_news(batch: Batch) -> Tensor | None:
    """The sequences that a batch says have arrived or ended, as bytes; None if there are none."""
    if not (batch.arrived or batch.ended):
        return None
    text = json.dumps([[_described(sequence) for sequence in batch.arrived], batch.ended])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _unpacked_news(news: Tensor) -> tuple[tuple[schedule.Sequence, ...], tuple[int, ...]]:
    arrived, ended = json.loads(news.numpy().tobytes())
    return tuple(map(_sequence, arrived)), tuple(ended)


def _described(sequence: schedule.Sequence) -> list[object]:
    defaults = {own.key: own.default for own in walk(SamplingParams())}
    given = {own.key: plain(own.default) for own in walk(sequence.params) if own.default != defaults[own.key]}
    place = [sequence.number, sequence.prompt, sequence.sample]
    return [*place, list(sequence.prompt_tokens), given, sequence.identity]


def _sequence(described: list[object]) -> schedule.Sequence:
    *request, params, identity = described
    return schedule.Sequence(*request, SamplingParams(**params), identity)  # pyright: ignore
