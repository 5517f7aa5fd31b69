"""Headers and tokens: each rank learns of a batch from the rank before it, and the first rank gets the tokens back.

A small header goes from rank to rank on host memory, ahead of the batch's activations; the rank of the last stage sends
the sampled tokens straight to the first. Where ranks are processes a thread takes the headers while its rank computes,
as far ahead as tokens allow, so that little is left to do between two batches.
"""

import json
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
from penstock.runtime.message import Header, Message
from penstock.runtime.recovery import Alarm
from penstock.runtime.trace import Recorder
from penstock.runtime.transport import HostChannel, Receipt, Transport
from penstock.schedule import Batch, BatchItem, Placement, RingShape, Token
from penstock.settings import SamplingParams, walk_settings
from penstock.settings.declare import plain

# ---- A batch as a message: a header of numbers, and news of sequences if there are any


_CLOSING = -1
_HEAD, _ITEM = 4, 7
"""Numbers at the head of a header, and of each item behind it."""


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


def unpacked_header(header: Sequence[int], news: Tensor | None = None) -> Batch | None:
    if header[0] == _CLOSING:
        return None
    slot, num_items, ends_round = header[: _HEAD - 1]
    items = []
    for begin in range(_HEAD, _HEAD + _ITEM * num_items, _ITEM):
        sequence, row, start, length, sampled, source, cleaned = header[begin : begin + _ITEM]
        items.append(BatchItem(sequence, row, start, length, bool(sampled), source, cleaned))
    arrived, ended = ([], []) if news is None else json.loads(news.numpy().tobytes())
    sequences = (
        schedule.Sequence(number, prompt, sample, prompt_tokens, SamplingParams(**params), identity)
        for number, prompt, sample, prompt_tokens, params, identity in arrived
    )
    return Batch(slot, tuple(items), bool(ends_round), tuple(sequences), tuple(ended))


def packed_news(batch: Batch) -> Tensor | None:
    """A batch's arrivals and departures of sequences, as bytes; None if there are none."""
    if not (batch.arrived or batch.ended):
        return None
    text = json.dumps([[_sequence_values(sequence) for sequence in batch.arrived], batch.ended])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _sequence_values(sequence: schedule.Sequence) -> list[object]:
    defaults = {setting.key: setting.default for setting in walk_settings(SamplingParams())}
    changed = {
        setting.key: plain(setting.default)
        for setting in walk_settings(sequence.params)
        if setting.default != defaults[setting.key]
    }
    place = [sequence.number, sequence.prompt, sequence.sample]
    return [*place, list(sequence.prompt_tokens), changed, sequence.identity]


# ---- Headers and tokens


HEADERS, TOKENS = "headers", "tokens"


def host_channels(placement: Placement) -> list[HostChannel]:
    """The channels of headers, from each rank to the next, and that of tokens, in the order of their creation."""
    channels = [HostChannel(rank, rank + 1, HEADERS) for rank in range(placement.num_ranks - 1)]
    last = placement.output_rank
    return channels if last == 0 else [*channels, HostChannel(last, 0, TOKENS)]


@dataclass(frozen=True, eq=False)
class Ring:
    """One rank's place among the ranks that generate together.

    Args:
        placement: the stages; in a bidirectional model those of the first copy are used.
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

    def late(self, shape: RingShape) -> int:
        """The batches of a slot that may be in flight when its next one is scheduled; see `Scheduler`.

        On one rank without another slot's batch a device would wait for the host to read each token.
        """
        return int(self.is_one_rank and shape.num_slots == 1 and not self.lockstep and self.device.type != "cpu")


@dataclass(eq=False)
class HeaderRelay:
    """One rank's part in passing headers on and tokens back during one generation."""

    #: links to the other ranks
    _ring: Ring
    #: most items of a batch
    _rows_per_slot: int
    #: yields all batches; None before `start`, and if a thread takes them
    _batches: Iterator[Batch] | None = None
    #: batches that the thread has taken ahead; then None for the end, or the exception of a failure
    _taken: queue.SimpleQueue[Batch | Exception | None] = field(default_factory=lambda: queue.SimpleQueue())
    #: takes batches ahead; None if the rank's main thread takes them
    _thread: threading.Thread | None = None
    #: tokens of batches, if the first and the last stage are on this rank; None in it after a failure
    _sampled_here: queue.SimpleQueue[Callable[[], Tensor] | None] = field(default_factory=lambda: queue.SimpleQueue())

    @property
    def _header_size(self) -> int:
        return _HEAD + _ITEM * self._rows_per_slot

    # ---- ahead of the computation

    def start(self, batches: Iterator[Batch], in_thread: bool) -> None:
        """Begin to take batches: in a thread as soon as each is known, else when `next` is called."""
        if not in_thread:
            self._batches = batches
            return

        def take_all() -> None:
            try:
                for batch in batches:
                    self._taken.put(batch)
                self._taken.put(None)
            except Exception as error:
                self._taken.put(error)  # raised where the rank computes

        name = f"penstock headers of rank {self._ring.rank}"
        self._thread = threading.Thread(target=take_all, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, after all batches or a failure."""
        if self._thread is not None:
            self._thread.join()

    def ready(self) -> bool:
        """True if `next` returns at once."""
        return not self._taken.empty()

    def next(self) -> Batch | None:
        """The next batch, None at the end; waits until it is known. Raises: the exception of the thread."""
        if self._batches is not None:
            return next(self._batches, None)
        batch = self._taken.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    # ---- headers

    def announce(self, batch: Batch | None) -> None:
        """Pass a batch on to the next rank; None closes the ring."""
        rank = self._ring.rank
        if rank < self._ring.placement.num_ranks - 1:
            news, channel = None if batch is None else packed_news(batch), HostChannel(rank, rank + 1, HEADERS)
            header = packed_header(batch, self._header_size, 0 if news is None else len(news))
            self._ring.host.send(channel, Message((header,)))
            if news is not None:
                self._ring.host.send(channel, Message((news,)))

    def follow(self) -> Iterator[Batch]:
        """The batches of the first rank's scheduler, on every other rank; each is first passed on."""
        receipt = self._post(self._header_size, torch.int64)
        while (batch := self._received(receipt)) is not None:
            receipt = self._post(self._header_size, torch.int64)
            self.announce(batch)
            yield batch
        self.announce(None)

    def _received(self, receipt: Receipt) -> Batch | None:
        header = receipt.wait().tensors[0].tolist()
        size = header[_HEAD - 1]
        return unpacked_header(header, self._post(size, torch.uint8).wait().tensors[0] if size else None)

    def _post(self, size: int, dtype: torch.dtype) -> Receipt:
        channel = HostChannel(self._ring.rank - 1, self._ring.rank, HEADERS)
        return self._ring.host.receive(channel, Header.of_tensor((size,), dtype))

    # ---- tokens

    def post_tokens(self, sampled: Sequence[schedule.Sequence]) -> Callable[[], list[Token]]:
        """Post the receive of a token of each sequence, on the first rank; returns a function that waits for them."""
        params = [sequence.params for sequence in sampled]
        if self._ring.last_rank == 0:

            def take() -> list[Token]:
                if (read := self._sampled_here.get()) is None:
                    raise TransportError("the tokens of a batch were never sampled")
                return unpacked(read(), params)

            return take
        channel = HostChannel(self._ring.last_rank, 0, TOKENS)
        shape = (max(1, len(params)), numbers_per_token(params))
        receipt = self._ring.host.receive(channel, Header.of_tensor(shape, torch.int64))
        return lambda: unpacked(receipt.wait().tensors[0][: len(params)], params)

    def return_tokens(self, read: Callable[[], Tensor]) -> None:
        """Send a batch's tokens from the last rank to the first, batch by batch in order; see `begin_read`."""
        if self._ring.last_rank == 0:
            self._sampled_here.put(read)
        else:
            # At least one row, so that a batch without samples is awaited as well.
            numbers_SW = read()
            whole = numbers_SW if len(numbers_SW) else numbers_SW.new_zeros(1, numbers_per_token(()))
            self._ring.host.send(HostChannel(self._ring.last_rank, 0, TOKENS), Message((whole,)))

    def cancel(self) -> None:
        """Wake the thread that waits for tokens, because this rank has failed and samples no more."""
        self._sampled_here.put(None)
