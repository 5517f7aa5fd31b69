"""Headers and tokens: each rank learns the next batch from the rank before it, and the first rank gets the tokens back.

A small header goes from rank to rank on host memory, ahead of the batch's activations; the rank of the last stage sends
the sampled tokens straight to the first. Where ranks are processes a thread takes the headers while its rank computes,
as far ahead as tokens allow, so that next to nothing is left to do between two batches.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock import schedule
from penstock.model.sampling import numbers_per_token, unpacked
from penstock.runtime.errors import TransportError
from penstock.runtime.recovery import Alarm
from penstock.runtime.trace import Recorder
from penstock.runtime.transport import HostChannel, Receipt, Transport
from penstock.schedule import Batch, BatchItem, Placement, Token

HEADERS, TOKENS = "headers", "tokens"
_CLOSING = -1
_HEAD, _ITEM = 3, 6
"""Numbers at the head of a header, and of each item behind it."""


def host_channels(placement: Placement) -> list[HostChannel]:
    """The channels of headers, from each rank to the next, and that of tokens, in the order of their creation."""
    channels = [HostChannel(rank, rank + 1, HEADERS) for rank in range(placement.num_ranks - 1)]
    last = placement.output_rank
    return channels if last == 0 else [*channels, HostChannel(last, 0, TOKENS)]


@dataclass(frozen=True, eq=False)
class Ring:
    """One rank's place among the ranks that generate together.

    Args:
        placement: of a bidirectional model, the stages of the first copy are used.
        transport: carries activations between stages.
        host: carries headers and tokens, over `host_channels`.
        lockstep: True if stages share experts with those of other pipelines. Then all pipelines compute the same
            slots in the same order, and one without work takes part with empty batches.
        alarm: rings when another rank has failed.
    """

    placement: Placement
    transport: Transport
    host: Transport
    recorder: Recorder
    device: torch.device
    lockstep: bool = False
    alarm: Alarm = field(default_factory=Alarm)

    @cached_property
    def rank(self) -> int:
        return self.transport.rank

    @cached_property
    def last_rank(self) -> int:
        """The rank of the last stage, which samples."""
        return self.placement.output_rank

    @property
    def is_one_rank(self) -> bool:
        return self.placement.num_ranks == 1


class HeaderRelay:
    """One rank's part in passing batches on as headers, and their tokens back, during one generation.

    Args:
        rows_per_slot: items of a batch, at most.
        sequences: to be generated; the same on all ranks of the ring.
    """

    #: links to the other ranks
    _ring: Ring
    #: all sequences, by number
    _sequences: Sequence[schedule.Sequence]
    #: numbers that each token is sent as
    token_width: int
    #: shape of a header: its head, then the items
    _header_shape: tuple[int]
    #: the batches of all turns, one by one; None before `start`, and where a thread takes them
    _batches: Iterator[Batch] | None
    #: batches that the thread has taken ahead; then None for the end, or the exception that it has failed with
    _taken: queue.SimpleQueue[Batch | Exception | None]
    #: takes batches ahead; None where the rank that computes takes them
    _thread: threading.Thread | None
    #: tokens of the batches, if the first and the last stage are on this rank; None once it has failed
    _sampled_here: queue.SimpleQueue[Tensor | None]

    def __init__(self, ring: Ring, rows_per_slot: int, sequences: Sequence[schedule.Sequence]) -> None:
        self._ring, self._sequences = ring, sequences
        self.token_width = numbers_per_token(sequence.params for sequence in sequences)
        self._header_shape = (_HEAD + _ITEM * rows_per_slot,)
        self._batches = None
        self._taken = queue.SimpleQueue[Batch | Exception | None]()
        self._thread = None
        self._sampled_here = queue.SimpleQueue[Tensor | None]()

    # ---- ahead of the computation

    def start(self, batches: Iterator[Batch], in_thread: bool) -> None:
        """Begin to take batches, in a thread as soon as each is known; else each when `next` asks for it."""
        if in_thread:
            name = f"penstock headers of rank {self._ring.rank}"
            self._thread = threading.Thread(target=self._take_all, args=(batches,), name=name, daemon=True)
            self._thread.start()
        else:
            self._batches = batches

    def join(self) -> None:
        """Wait for the end of the thread, after all batches or after the links were cut."""
        if self._thread is not None:
            self._thread.join()

    def ready(self) -> bool:
        """True if `next` returns at once."""
        return not self._taken.empty()

    def next(self) -> Batch | None:
        """The next batch, None at the end; waits until it is known.

        Raises:
            Exception: the one that the thread has failed with.
        """
        if self._batches is not None:
            return next(self._batches, None)
        batch = self._taken.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _take_all(self, batches: Iterator[Batch]) -> None:
        try:
            for batch in batches:
                self._taken.put(batch)
            self._taken.put(None)
        except Exception as error:
            self._taken.put(error)  # raised where the rank computes

    # ---- headers

    def announce(self, batch: Batch | None) -> None:
        """Pass a batch on to the next rank; None closes the ring."""
        rank = self._ring.rank
        if rank < self._ring.placement.num_ranks - 1:
            header = _packed(batch, self._header_shape[0])
            self._ring.host.send(HostChannel(rank, rank + 1, HEADERS), header)

    def follow(self) -> Iterator[Batch]:
        """The batches that the first rank decides, on every other rank; each is passed on first."""
        receipt = self._post_header()
        while (batch := _unpacked(receipt.wait().tolist())) is not None:
            receipt = self._post_header()
            self.announce(batch)
            yield batch
        self.announce(None)

    def _post_header(self) -> Receipt:
        channel = HostChannel(self._ring.rank - 1, self._ring.rank, HEADERS)
        return self._ring.host.receive(channel, self._header_shape, torch.int64)

    # ---- tokens

    def post_tokens(self, batch: Batch) -> Callable[[], list[Token]]:
        """Post the receive of the batch's tokens, on the first rank; gives what waits for them."""
        params = [self._sequences[item.sequence].params for item in batch.sampled]
        if self._ring.last_rank == 0:
            return lambda: unpacked(self._take_sampled_here(), params)
        channel = HostChannel(self._ring.last_rank, 0, TOKENS)
        receipt = self._ring.host.receive(channel, (max(1, len(params)), self.token_width), torch.int64)
        return lambda: unpacked(receipt.wait()[: len(params)], params)

    def return_tokens(self, numbers_SW: Tensor) -> None:
        """Give the first rank what was sampled for a batch; on the last rank, batch by batch in their order."""
        if self._ring.last_rank == 0:
            self._sampled_here.put(numbers_SW)
        else:
            # Never without a row, so that a batch which samples nothing is waited for as well.
            whole = numbers_SW if len(numbers_SW) else numbers_SW.new_zeros(1, self.token_width)
            self._ring.host.send(HostChannel(self._ring.last_rank, 0, TOKENS), whole)

    def cancel(self) -> None:
        """Wake the thread that waits here for tokens: the rank has failed, and samples no more."""
        self._sampled_here.put(None)

    def _take_sampled_here(self) -> Tensor:
        numbers_SW = self._sampled_here.get()
        if numbers_SW is None:
            raise TransportError("the tokens of a batch were never sampled")
        return numbers_SW


def _packed(batch: Batch | None, size: int) -> Tensor:
    """A header: slot, number of items, whether the round ends; then six numbers an item. None closes the ring."""
    numbers = [_CLOSING]
    if batch is not None:
        numbers = [batch.slot, len(batch.items), int(batch.ends_round)]
        for item in batch.items:
            numbers += (item.sequence, item.row, item.start, item.length, int(item.sampled), item.source)
    return torch.tensor(numbers + [0] * (size - len(numbers)))


def _unpacked(header: Sequence[int]) -> Batch | None:
    if header[0] == _CLOSING:
        return None
    slot, num_items, ends_round = header[:_HEAD]
    items = []
    for begin in range(_HEAD, _HEAD + _ITEM * num_items, _ITEM):
        sequence, row, start, length, sampled, source = header[begin : begin + _ITEM]
        items.append(BatchItem(sequence, row, start, length, bool(sampled), source))
    return Batch(slot, tuple(items), bool(ends_round))
