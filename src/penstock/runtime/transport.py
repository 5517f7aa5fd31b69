"""Point-to-point messages between the ranks of a pipeline.

A channel is one direction of one edge: (source rank, destination rank, forward or backward). Messages of a channel
arrive in the order in which they were sent. Receives are posted ahead with the shape known to both sides, or, of what a
user's own layers give, for a message that says itself what it holds; a send never blocks and its tensor is released
once it has left. Two implementations share the interface: `DistributedTransport` over
torch.distributed (one communicator a channel) and `InProcessTransport`, in which all ranks live in one thread and
`run_together` (of the executor) lets each go on as far as its messages allow.
"""

import ctypes
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.parallel import Handle, laid_out
from penstock.parallel.staging import host_empty, to_device, to_host
from penstock.runtime.errors import MessageMismatch, PipelineError, TransportError, first_line
from penstock.runtime.message import HEADER_END, Message, read_header
from penstock.schedule import Channel, Direction, Placement
from penstock.schedule.rules import channels_of


class HostChannel(NamedTuple):
    """A one-way line between two ranks for small messages in host memory; `cargo` names their contents."""

    source: int
    destination: int
    cargo: str


Line = Channel | HostChannel


def describe_message(channel: Line) -> str:
    """The channel in words, for messages."""
    if isinstance(channel, HostChannel):
        what = channel.cargo
    else:
        what = "activations" if channel.direction is Direction.FORWARD else "gradients"
    return f"{what} from rank {channel.source} to rank {channel.destination}"


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """The shape and dtype of a message in words."""
    return f"{list(shape)} of {dtype}"


class Receipt(Handle[Any], Protocol):
    """A posted receive. Its `wait` gives the tensor or `Message`, which the caller owns.

    Raises, in `wait`:
        TransportError: the message does not come in time.
        MessageMismatch: another shape or dtype comes.
    """

    def ready(self) -> bool:
        """True if `wait` may be called: always where waiting blocks; in process, once the message is there."""
        ...


class Transport(Protocol):
    """The interface that the executor needs."""

    #: the caller's rank in the pipeline
    rank: int

    def receive(self, channel: Line, shape: Sequence[int], dtype: torch.dtype) -> Receipt:
        """Post the receive of the channel's next message."""
        ...

    def send(self, channel: Line, tensor: Tensor) -> None:
        """Start sending; the tensor must not be written to any more and is released when it has left."""
        ...

    def receive_message(self, channel: Line) -> Receipt:
        """Post the receive of the channel's next message, which is a `Message` and says what it holds."""
        ...

    def send_message(self, channel: Line, message: Message) -> None:
        """Start sending, as `send` does."""
        ...

    def num_pending(self) -> int:
        """Posted receives not waited for plus sends not yet known to have left."""
        ...

    def settle(self) -> None:
        """Return when every send of this rank has left. Raises TransportError."""
        ...

    def abandon(self) -> None:
        """Give up the messages under way after a failed step, so that the next step does not receive them."""
        ...

    def close(self) -> None:
        """Stop helper threads; process groups stay with torch.distributed."""
        ...


# ---- in one thread


@dataclass(eq=False)
class InProcessHub:
    """The queues that join the in-process transports of one pipeline."""

    #: messages sent and not received yet
    queues: defaultdict[Line, deque[Tensor | Message]] = field(default_factory=partial(defaultdict, deque))
    #: messages sent so far
    num_messages: int = 0


@dataclass(eq=False)
class InProcessTransport:
    """All ranks in one thread: a send appends to the channel's queue, a receipt is ready once its message is there."""

    #: the queues that all ranks share
    hub: InProcessHub
    #: the caller's rank
    rank: int
    #: receives that are posted and not waited for, oldest first
    _posted: defaultdict[Line, deque["_QueueReceipt"]] = field(default_factory=partial(defaultdict, deque), init=False)

    def receive(self, channel: Line, shape: Sequence[int], dtype: torch.dtype) -> "_QueueReceipt":
        return self._post(_QueueReceipt(self, channel, (tuple(shape), dtype)))

    def receive_message(self, channel: Line) -> "_QueueReceipt":
        return self._post(_QueueReceipt(self, channel, None))

    def _post(self, receipt: "_QueueReceipt") -> "_QueueReceipt":
        self._posted[receipt.channel].append(receipt)
        return receipt

    def send(self, channel: Line, tensor: Tensor) -> None:
        self._put(channel, tensor)

    def send_message(self, channel: Line, message: Message) -> None:
        self._put(channel, message)

    def _put(self, channel: Line, parcel: Tensor | Message) -> None:
        self.hub.num_messages += 1
        self.hub.queues[channel].append(parcel)

    def num_pending(self) -> int:
        return sum(map(len, self._posted.values())) + sum(
            len(queue) for channel, queue in self.hub.queues.items() if channel.source == self.rank
        )

    def settle(self) -> None:
        """Nothing to do: a queued message has left its sender."""

    def abandon(self) -> None:
        """Drop what is under way to and from this rank."""
        self._posted.clear()
        for channel in [c for c in self.hub.queues if self.rank in c[:2]]:
            del self.hub.queues[channel]

    def close(self) -> None:
        """Nothing to do: there is no helper thread."""


@dataclass(eq=False, slots=True)
class _QueueReceipt:
    #: the transport on which it is posted
    transport: InProcessTransport
    #: the channel, and the shape and dtype expected from it; None for a message that says what it holds
    channel: Line
    expected: tuple[tuple[int, ...], torch.dtype] | None

    def ready(self) -> bool:
        return self.transport._posted[self.channel][0] is self and bool(self.transport.hub.queues[self.channel])

    def wait(self) -> Tensor | Message:
        if not self.ready():
            raise TransportError(f"the next of the {describe_message(self.channel)} is not there yet")
        self.transport._posted[self.channel].popleft()
        came = self.transport.hub.queues[self.channel].popleft()
        if isinstance(came, Tensor) and (came.shape, came.dtype) != self.expected:
            expected = "what it holds" if self.expected is None else described(*self.expected)
            raise MessageMismatch(
                f"{describe_message(self.channel)}: expected {expected}, got {described(came.shape, came.dtype)}"
            )
        return came


# ---- over torch.distributed: one communicator a channel, all made at start in one order, tested at once
#
# Each message is announced: its shape and dtype go beside it in host memory, and its receiver compares them with what
# it awaits before it takes the message. A small message in host memory travels inside its announcement, so that the
# check costs little where messages are many. Any other has its size as its tag: gloo matches none with a buffer of
# another size, of which it would fill a part only, or abort the receiving process.
#
# Such a message goes first, and its announcement, which is awaited before it, behind it. When a link is cut, gloo wakes
# nobody who waits for a message of which a part is there; but the announcement is there once the message is as a whole.


_END_S = 5.0
"""The longest that a process waits at its end for a message that nobody takes."""
_MOST_HELD_SENDS = 256
"""More than are ever under way in a ring: the first of them has long been taken when one more is sent."""
_MOST_KEPT_BYTES = 512 << 10
"""Bytes of a link's sends that are kept before the link checks whether they have left."""
_ANNOUNCEMENT_BYTES = 128
"""Enough for eight dimensions of ten digits."""
_MOST_INSIDE_BYTES = 64 << 10
"""The largest message inside an announcement: to copy it twice takes less time than gloo takes for a second message."""
_ANNOUNCEMENT_TAG = 0
_HEADER_TAG = 2
_MOST_HEADER_BYTES = 16 << 10
"""The names, shapes and dtypes of some hundred tensors."""

MakeBackend = Callable[[Store, int], Any]


class DistributedTransport:
    """Messages of one rank over torch.distributed (gloo on CPU, NCCL on CUDA, or with `is_staged` gloo there too).

    `group` holds the pipeline's ranks in order, on host memory; all of them construct the transport at the same time.
    `lines` are a placement's channels, or any given, the same on all ranks. The links are tested before the constructor
    returns.

    Raises:
        TransportError: a link fails its test within `timeout_s`; the message names it.
    """

    #: this rank in the pipeline
    rank: int
    #: where messages are received
    device: torch.device
    #: True if messages travel as copies in host memory
    is_staged: bool
    #: the longest that a link's test or a message may take
    timeout_s: float
    #: the channels that begin or end here, in the order that all ranks share
    _lines: list[Line]
    #: channel -> its communicator
    _links: dict[Line, "_ChannelEnd"]
    #: where the ends of a link meet, and how its communicators are made there
    _store: Store
    _makers: Sequence[MakeBackend]
    #: messages that are posted and not waited for
    _num_awaited: int
    #: channel -> those that say what they hold and have not been read yet, oldest first
    _unread: defaultdict[Line, deque["_PostedMessage"]]
    #: True after a failed step, until the links are renewed
    _abandoned: bool

    def __init__(
        self,
        lines: Placement | Sequence[Line],
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        is_staged: bool = False,
    ) -> None:
        self.rank, self.device, self.timeout_s, self.is_staged = group.rank(), device, timeout_s, is_staged
        self._store = PrefixStore(f"penstock/{unique_number(group)}", default_store())
        host = torch.device("cpu")
        devices = [host] if device.type == "cpu" or is_staged else [device, host]
        self._makers = [_backend_maker(group, each, timedelta(seconds=timeout_s)) for each in devices]
        lines = channels_of(lines) if isinstance(lines, Placement) else lines
        self._lines = [channel for channel in lines if self.rank in (channel.source, channel.destination)]
        self._links = {}
        self.renew(0)

    def backends(self) -> Sequence[Any]:
        """The links' communicators, and those who wait for their sends."""
        found: list[Any] = []
        for link in self._links.values():
            found += link.backends
            if isinstance(link.sends, _ThreadedSends):
                found.append(link.sends)
        return found

    def renew(self, generation: int) -> None:
        """Make all links anew, once they have been cut, and test them; all ranks call it."""
        self.close()
        self._num_awaited, self._abandoned, self._unread = 0, False, defaultdict(deque)
        store = PrefixStore(str(generation), self._store)
        watch_s = self.timeout_s if self.is_staged or self.device.type == "cpu" else None
        self._links = {line: _ChannelEnd(line, self.rank, store, self._makers, watch_s) for line in self._lines}
        # A word over each link: one that cannot carry it is named before any work starts.
        arrivals = []
        try:
            for channel in self._links:
                word = torch.tensor(
                    [channel.source, channel.destination, crc32(describe_message(channel).encode())], device=self.device
                )
                if channel.source == self.rank:
                    self.send(channel, word)
                else:
                    arrivals.append((channel, word, self.receive(channel, word.shape, word.dtype)))
            for channel, word, receipt in arrivals:
                got = receipt.wait()
                if not torch.equal(got, word):
                    raise TransportError(
                        f"the {describe_message(channel)} carried {got.tolist()} instead of {word.tolist()}"
                    )
            self.settle()
        except TransportError as error:
            raise TransportError(f"the link test failed: {error}") from error

    def receive(self, channel: Line, shape: Sequence[int], dtype: torch.dtype) -> "_PostedReceive":
        self._check_usable()
        buffer = host_empty(shape, dtype) if self.is_staged else torch.empty(shape, dtype=dtype, device=self.device)
        self._num_awaited += 1
        return _PostedReceive(self, channel, buffer, *self._links[channel].receive(buffer))

    def send(self, channel: Line, tensor: Tensor) -> None:
        self._check_usable()
        self._send(channel, tensor)

    def _send(self, channel: Line, tensor: Tensor, header: bytes = b"") -> None:
        self._links[channel].send(to_host(tensor) if self.is_staged else tensor, header)

    def receive_message(self, channel: Line) -> "_PostedMessage":
        self._check_usable()
        self._num_awaited += 1
        posted = _PostedMessage(self, channel, *self._links[channel].receive_header())
        self._unread[channel].append(posted)
        self.read_arrived()
        return posted

    def read_arrived(self) -> None:
        """Post the receives of the tensors of all messages that have said what they hold, before others compute."""
        for unread in self._unread.values():
            while unread and unread[0].has_come():
                unread.popleft().read()

    def send_message(self, channel: Line, message: Message) -> None:
        self._check_usable()
        if not message.tensors:
            # The gradient of token ids and their like: something has to travel that can be waited for.
            message = message.of_tensors((torch.zeros(1, device=self.device),))
        header = message.header()
        if len(header) > _MOST_HEADER_BYTES:
            raise ValueError(f"{len(message.tensors)} tensors are too many for a message; give some of them as one")
        for tensor in message.tensors:
            self._send(channel, tensor, header)
            header = b""

    def abandon(self) -> None:
        """Take no more messages: receives that are posted cannot be taken back, and would swallow the next step's."""
        self._abandoned = True

    def _check_usable(self) -> None:
        if self._abandoned:
            raise TransportError("a step failed on this rank with messages under way; make a new engine to go on")

    def num_pending(self) -> int:
        return self._num_awaited + sum(link.sends.num_in_flight() for link in self._links.values())

    def settle(self) -> None:
        for link in self._links.values():
            link.sends.settle()

    def close(self) -> None:
        """Let the helper threads end; the process groups stay with torch.distributed."""
        for link in self._links.values():
            link.sends.close()


def open_transport(
    lines: Placement | Sequence[Line],
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout_s: float,
    is_staged: bool = False,
) -> Transport:
    """The transport of a rank whose pipeline is `group`: in process where that is None, and the rank is alone.

    Arguments and errors are those of `DistributedTransport`.
    """
    if group is None:
        return InProcessTransport(InProcessHub(), 0)
    return DistributedTransport(lines, group, device, timeout_s, is_staged)


@dataclass(eq=False, slots=True)
class _PostedReceive:
    #: the transport that counts it
    transport: DistributedTransport
    #: the channel, and where its message is received
    channel: Line
    buffer: Tensor
    #: where the announcement is received, and the handles of the backend: its own, and the message's if that is apart
    envelope: Tensor
    works: Sequence[dist.Work]

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        start = time.monotonic()
        announcement, *apart = self.works
        try:
            announcement.wait()
            came = ctypes.string_at(self.envelope.data_ptr(), _ANNOUNCEMENT_BYTES)
            if came != _announcement(self.buffer):
                expected = described(self.buffer.shape, self.buffer.dtype)
                raise MessageMismatch(
                    f"{describe_message(self.channel)}: expected {expected}, got {came.decode().rstrip()}"
                )
            for work in apart:
                work.wait()
        except PipelineError:
            raise
        except RuntimeError as error:
            raise TransportError(
                f"no {describe_message(self.channel)} after {time.monotonic() - start:.1f} s ({first_line(error)})"
            ) from error
        if not apart:
            message = self.envelope.data_ptr() + _ANNOUNCEMENT_BYTES
            ctypes.memmove(self.buffer.data_ptr(), message, self.buffer.nbytes)
        self.transport._num_awaited -= 1
        if not self.transport.is_staged:
            return self.buffer
        return to_device(self.buffer, torch.empty_like(self.buffer, device=self.transport.device))


@dataclass(eq=False, slots=True)
class _PostedMessage:
    """A posted receive of a message that says what it holds; its tensors are received once it is read.

    Messages are read in the order in which they were sent, whichever is waited for first: so are their tensors.
    """

    #: the transport that counts it
    transport: DistributedTransport
    #: the channel
    channel: Line
    #: where the header is received, as memory and as a tensor, and the handle of the backend
    header: bytearray
    envelope: Tensor
    work: dist.Work
    #: the form of the message, and its tensors, once it has been read
    form: Message | None = None
    parts: Sequence[_PostedReceive] = ()

    def ready(self) -> bool:
        return True

    def wait(self) -> Message:
        unread = self.transport._unread[self.channel]
        while self.form is None:
            unread.popleft().read()
        self.transport.read_arrived()
        message = self.form.of_tensors(tuple(part.wait() for part in self.parts))
        self.transport._num_awaited -= 1
        return message

    def has_come(self) -> bool:
        """True once the header is there as a whole: gloo's works cannot be asked."""
        return HEADER_END in self.header

    def read(self) -> None:
        """Wait for the header, and post the receives of the tensors."""
        start = time.monotonic()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"no {describe_message(self.channel)} after {time.monotonic() - start:.1f} s ({first_line(error)})"
            ) from error
        self.form, shapes = read_header(self.header)
        self.parts = [self.transport.receive(self.channel, shape, dtype) for shape, dtype in shapes]


def _announcement(tensor: Tensor) -> bytes:
    """The bytes that go with this tensor. Raises: ValueError for more dimensions than they can tell."""
    text = described(tensor.shape, tensor.dtype)
    if len(text) > _ANNOUNCEMENT_BYTES:
        raise ValueError(f"{text} has too many dimensions for a message; eight are always possible")
    return text.encode().ljust(_ANNOUNCEMENT_BYTES)


def _envelope(content: bytearray) -> Tensor:
    """An announcement, with a message inside or without: memory of Python's, none of the tensors that a step counts."""
    return torch.frombuffer(content, dtype=torch.uint8)


def _travels_inside(tensor: Tensor) -> bool:
    return tensor.nbytes <= _MOST_INSIDE_BYTES and tensor.device.type == "cpu"


def _tag(tensor: Tensor) -> int:
    """A tag for messages of this size; odd, so that it is neither an announcement's nor `cut_backends`'s."""
    return tensor.nbytes % (1 << 30) * 2 + 1


class _ChannelEnd:
    """One channel's communicators, seen from one of its two ends.

    `makers` make the one that carries messages and, where these are not in host memory, one for announcements.
    `watch_s`: the longest that a thread waits for a send, for a backend whose works cannot be polled; None: they can.
    """

    #: the channel, and which end of the communicators the other rank is
    channel: Line
    peer: int
    #: the communicators, of which the first carries messages and the last announcements
    backends: Sequence[Any]
    #: keeps sent tensors until they have left; none at the receiving end
    sends: "_ThreadedSends | _KeptSends"

    def __init__(
        self,
        channel: Line,
        rank: int,
        store: Store,
        makers: Sequence[MakeBackend],
        watch_s: float | None,
    ) -> None:
        # Made from the backend's class: torch.distributed.new_group wants either the whole world to take part in every
        # group, or equally many groups on every rank, and a rank has as many as it has links.
        outgoing = rank == channel.source
        store = PrefixStore(describe_message(channel), store)
        self.channel, self.peer = channel, int(outgoing)
        self.backends = [make(PrefixStore(str(n), store), 1 - self.peer) for n, make in enumerate(makers)]
        if watch_s is None or isinstance(channel, HostChannel) or not outgoing:
            self.sends = _KeptSends(channel, are_polled=not isinstance(channel, HostChannel))
        else:
            self.sends = _ThreadedSends(channel, watch_s)

    def receive(self, buffer: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Post the receive of an announcement, and of the message if it is apart; returns the first's buffer, and both.

        The buffer holds any announcement, also one that nobody awaits here.
        """
        most_inside = _MOST_INSIDE_BYTES if buffer.device.type == "cpu" else 0
        envelope = _envelope(bytearray(_ANNOUNCEMENT_BYTES + most_inside))
        try:
            apart = [] if _travels_inside(buffer) else [self.backends[0].recv([buffer], self.peer, _tag(buffer))]
            works = [self.backends[-1].recv([envelope], self.peer, _ANNOUNCEMENT_TAG), *apart]
        except RuntimeError as error:
            raise self._lost("received", error) from error
        return envelope, works

    def receive_header(self) -> tuple[bytearray, Tensor, dist.Work]:
        """Post the receive of what a message says of itself; returns its memory too."""
        envelope = _envelope(header := bytearray(_MOST_HEADER_BYTES))
        try:
            return header, envelope, self.backends[-1].recv([envelope], self.peer, _HEADER_TAG)
        except RuntimeError as error:
            raise self._lost("received", error) from error

    def send(self, tensor: Tensor, header: bytes = b"") -> None:
        """Start sending a tensor, behind the header of the message that begins with it, if that has one."""
        assert self.peer == 1, f"this rank is not the source of the {describe_message(self.channel)}"
        tensor = laid_out(tensor)
        inside, content = _travels_inside(tensor), bytearray(_announcement(tensor))
        if inside:
            content += ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        envelopes = [_envelope(content)]
        try:
            works = []
            if header:
                envelopes.append(_envelope(bytearray(header)))
                works.append(self.backends[-1].send([envelopes[-1]], self.peer, _HEADER_TAG))
            apart = [] if inside else [self.backends[0].send([tensor], self.peer, _tag(tensor))]
            works += [self.backends[-1].send([envelopes[0]], self.peer, _ANNOUNCEMENT_TAG), *apart]
        except RuntimeError as error:
            raise self._lost("sent", error) from error
        self.sends.add((tensor, envelopes, works))

    def _lost(self, done: str, error: RuntimeError) -> TransportError:
        """Over a link whose other end is gone a backend refuses even to begin."""
        return TransportError(f"{describe_message(self.channel)} can no longer be {done} ({first_line(error)})")


_Sent = tuple[Tensor, Sequence[Tensor], Sequence[dist.Work]]
"""A tensor under way, what goes beside it in host memory, in which it may be too, and the backend's handles.

The tensor's is the last."""

_Sends = deque[_Sent]


@dataclass(eq=False)
class _KeptSends:
    """Holds sent tensors until they are known to have left, without a thread: it would wake when its rank computes.

    Works that can be polled, as CUDA's can, are polled whenever another is sent. Of the others, which are those of
    small messages in host memory, the last are held, as it matters little when they have left.
    """

    #: the channel, and True if its works can be polled
    channel: Line
    are_polled: bool
    #: sends that may be under way, oldest first
    _in_flight: _Sends = field(default_factory=deque)

    def add(self, sent: _Sent) -> None:
        self._in_flight.append(sent)
        if self.num_in_flight() > _MOST_HELD_SENDS and not self.are_polled:
            self._wait_for_first()

    def num_in_flight(self) -> int:
        while self.are_polled and self._in_flight:
            *announcements, message = self._in_flight[0][2]
            if not message.is_completed():
                break
            # Dropped before its end, a send of gloo never comes. The receiver awaits the announcement first.
            for work in announcements:
                work.wait()
            self._in_flight.popleft()
        return len(self._in_flight)

    def settle(self) -> None:
        while self._in_flight:
            self._wait_for_first()

    def close(self) -> None:
        self._in_flight.clear()

    def _wait_for_first(self) -> None:
        # Popped first, the tensor would be freed before the wait.
        _wait_until_left(self.channel, self._in_flight[0])
        self._in_flight.popleft()


@dataclass(eq=False)
class _ThreadedSends:
    """Holds sent tensors until their work is complete, known by waiting in a thread (gloo's works cannot be polled).

    The main thread must not wait: it would block compute. The thread spends its life inside gloo without the GIL; but
    to wake it costs the main thread as much as half a send, and then it wants the GIL. So small tensors are handed over
    several at a time.
    """

    #: the channel, and the longest that a message may take
    channel: Line
    timeout_s: float
    #: sends that the thread has not been given yet, and their bytes
    _kept: _Sends = field(default_factory=deque, init=False)
    _kept_bytes: int = field(default=0, init=False)
    #: the thread's work: sends to wait for, a call to make behind them, or None for the end
    _queue: queue.SimpleQueue[_Sends | Callable[[], None] | None] = field(init=False)
    #: sends so far, and those that have left
    _num_added: int = field(default=0, init=False)
    _num_left: int = field(default=0, init=False)
    #: the reason why a message has not left
    _error: TransportError | None = field(default=None, init=False)
    #: set once all sends that `settle` waits for have left, or when the link is cut
    _settled: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._queue = queue.SimpleQueue()
        name = f"penstock sends {describe_message(self.channel)}"
        thread = threading.Thread(target=self._watch, name=name, daemon=True)
        thread.start()
        # At the interpreter's end too: a thread that comes back from torch then would abort the process.
        weakref.finalize(self, _end_thread, self._queue, thread)

    def _watch(self) -> None:
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            while item:
                try:
                    if self._error is None:
                        _wait_until_left(self.channel, item[0])
                except TransportError as error:
                    self._error = error
                item.popleft()
                self._num_left += 1

    def add(self, sent: _Sent) -> None:
        if self._error is not None:
            raise self._error
        self._num_added += 1
        self._kept.append(sent)
        self._kept_bytes += sent[0].nbytes
        if self._kept_bytes >= _MOST_KEPT_BYTES:
            self._queue.put(self._kept)
            self._kept, self._kept_bytes = deque(), 0

    def num_in_flight(self) -> int:
        return self._num_added - self._num_left

    def settle(self) -> None:
        if self.num_in_flight() > 0:
            self._settled = settled = threading.Event()
            self._queue.put(self._kept)
            self._kept, self._kept_bytes = deque(), 0
            self._queue.put(settled.set)
            # The works have the same limit; the margin lets their own, more specific error come first.
            if self._error is None and not settled.wait(self.timeout_s + 5.0):
                raise TransportError(f"{describe_message(self.channel)} were not taken after {self.timeout_s:.1f} s")
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Let nobody wait for sends of a link that was cut: gloo may forget one that it has written in part."""
        self._error = self._error or TransportError(
            f"{describe_message(self.channel)} were not taken before the link was cut"
        )
        self._settled.set()

    def close(self) -> None:
        self._queue.put(None)


def _end_thread(work: "queue.SimpleQueue[Any]", thread: threading.Thread) -> None:
    work.put(None)
    # The thread itself may be the last that holds what it works for.
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _wait_until_left(channel: Line, sent: _Sent) -> None:
    """Raises: TransportError where that takes longer than the backend waits."""
    start = time.monotonic()
    try:
        for work in sent[2]:
            work.wait()
    except RuntimeError as error:
        waited = time.monotonic() - start
        raise TransportError(
            f"{describe_message(channel)} were not taken after {waited:.1f} s ({first_line(error)})"
        ) from error


def default_store() -> Store:
    """The store where torch.distributed met."""
    return dist.distributed_c10d._get_default_store()


def unique_number(group: dist.ProcessGroup) -> int:
    """A number that nothing else in the world has, the same on all ranks of the group."""
    number = torch.zeros(1, dtype=torch.int64)
    if group.rank() == 0:
        number += default_store().add("penstock/transports", 1)
    dist.broadcast(number, group=group, group_src=0)
    return int(number)


def _backend_maker(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> MakeBackend:
    """Makes communicators of two ranks, given a store and the place among the two.

    gloo's devices each have a thread that wakes a hundred times a second: all links of a rank share the group's.
    """
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return lambda store, place: dist.ProcessGroupNCCL(store, place, 2, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    gloo._devices = group._get_backend(torch.device("cpu")).options._devices  # pyright: ignore[reportAttributeAccessIssue]
    gloo._threads, gloo._timeout = 1, timeout
    return lambda store, place: dist.ProcessGroupGloo(store, place, 2, gloo)
