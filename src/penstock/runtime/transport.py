"""Point-to-point messages between the ranks of a pipeline.

A channel is one direction of one edge: (source rank, destination rank, forward or backward). Messages of a channel
arrive in the order in which they were sent. Receives are posted ahead: what a message holds is known to both ends, or
on an open boundary said by a header that goes ahead of it. A send never blocks, and its tensors are released once they
have left. Two implementations share the interface: `DistributedTransport` over torch.distributed (one communicator a
channel) and `InProcessTransport`, in which all ranks live in one thread and `run_together` (of the executor) lets each
go on as far as its messages allow.
"""

import itertools
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
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
from penstock.parallel.renewable import NCCL, nccl_options
from penstock.parallel.staging import host_empty, to_device, to_host
from penstock.runtime.errors import TransportError, first_line
from penstock.runtime.message import HEADER_END, Header, Message
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


def in_rounds(lines: Iterable[Line]) -> list[Line]:
    """The lines in the order in which ranks make them, each of them one after another.

    To make a line is to wait for the rank at its other end. In each round no rank makes two, and the number of rounds
    does not grow with that of the ranks: it is below twice the number of lines that begin or end at one of them.
    """
    taken, rounds = defaultdict[int, set[int]](set), dict[Line, int]()
    for line in lines:
        ends = taken[line.source], taken[line.destination]
        rounds[line] = next(number for number in itertools.count() if not any(number in busy for busy in ends))
        for busy in ends:
            busy.add(rounds[line])
    return sorted(rounds, key=rounds.__getitem__)


class Receipt(Handle[Message], Protocol):
    """A posted receive. Its `wait` gives the message, which the caller owns.

    Raises, in `wait`:
        TransportError: the message does not come in time.
    """

    def ready(self) -> bool:
        """True if `wait` may be called: always where waiting blocks; in process, once the message is there."""
        ...


class Transport(Protocol):
    """The interface that the executor needs."""

    #: the caller's rank in the pipeline
    rank: int

    def receive(self, channel: Line, header: Header | None) -> Receipt:
        """Post the receive of the channel's next message; without a header, of one whose header goes ahead of it."""
        ...

    def send(self, channel: Line, message: Message) -> None:
        """Start sending; the tensors must not be written to any more and are released when they have left."""
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
    queues: defaultdict[Line, deque[Message]] = field(default_factory=partial(defaultdict, deque))
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

    def receive(self, channel: Line, header: Header | None) -> "_QueueReceipt":
        receipt = _QueueReceipt(self, channel)
        self._posted[channel].append(receipt)
        return receipt

    def send(self, channel: Line, message: Message) -> None:
        self.hub.num_messages += 1
        self.hub.queues[channel].append(message)

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
    #: the transport on which it is posted, and the channel
    transport: InProcessTransport
    channel: Line

    def ready(self) -> bool:
        return self.transport._posted[self.channel][0] is self and bool(self.transport.hub.queues[self.channel])

    def wait(self) -> Message:
        if not self.ready():
            raise TransportError(f"the next of the {describe_message(self.channel)} is not there yet")
        self.transport._posted[self.channel].popleft()
        return self.transport.hub.queues[self.channel].popleft()


# ---- over torch.distributed: one communicator a channel, all made at start in one order, tested at once
#
# Both ends know what a message holds: its receive has a buffer for each tensor, and nothing else travels. Ranks find
# out where they agree on a batch, and at construction, that they would expect different shapes: gloo fills a part of a
# buffer that is too large, and aborts a process whose buffer is too small.
#
# When a link is cut, gloo wakes nobody who waits for a tensor of which a part is there. So a large tensor in host
# memory has a byte behind it, which is awaited first: it is there once the tensor is as a whole.


_END_S = 5.0
"""The longest that a process waits at its end for a message that nobody takes."""
_MOST_HELD_SENDS = 256
"""More than are ever under way in a ring: the first of them has long been taken when one more is sent."""
_MOST_BATCH_BYTES = 512 << 10
"""Bytes of a link's sends after which it checks whether they have left."""
_MOST_AT_ONCE_BYTES = 64 << 10
"""The largest tensor that comes as a whole or not at all."""
_TENSOR_TAG, _HEADER_TAG = 0, 1
_MOST_HEADER_BYTES = 16 << 10
"""The names, shapes and dtypes of some hundred tensors."""
# Written by every receive, and never read.
_BYTE_BEHIND = torch.frombuffer(bytearray(1), dtype=torch.uint8)

MakeBackend = Callable[[Store, int], Any]


class DistributedTransport:
    """Messages of one rank over torch.distributed (gloo on CPU, NCCL on CUDA, or with `is_staged` gloo there too).

    `group` holds the pipeline's ranks in order, on host memory; all of them construct the transport at the same time.
    `lines` are a placement's channels, or any given, the same on all ranks. With `is_open` a header goes ahead of each
    message. The links are tested before the constructor returns.

    Raises:
        TransportError: a link fails its test within `timeout_s`; the message names it.
    """

    #: this rank in the pipeline
    rank: int
    #: where messages are received
    device: torch.device
    #: True if messages travel as copies in host memory
    is_staged: bool
    #: True if a header goes ahead of each message
    is_open: bool
    #: the longest that a link's test or a message may take
    timeout_s: float
    #: the channels that begin or end here, in the order in which all ranks make them
    _lines: list[Line]
    #: channel -> its communicator
    _links: dict[Line, "_ChannelEnd"]
    #: where the ends of a link meet, and how its communicators are made there
    _store: Store
    _makers: Sequence[MakeBackend]
    #: messages that are posted and not waited for
    _num_awaited: int
    #: channel -> those whose header has not been read yet, oldest first
    _unread: defaultdict[Line, deque["_PostedReceive"]]
    #: True after a failed step, until the links are renewed
    _abandoned: bool

    def __init__(
        self,
        lines: Placement | Sequence[Line],
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        is_staged: bool = False,
        is_open: bool = False,
    ) -> None:
        self.rank, self.device, self.timeout_s = group.rank(), device, timeout_s
        self.is_staged, self.is_open = is_staged, is_open
        self._store = PrefixStore(f"penstock/{unique_number(group)}", default_store())
        host = torch.device("cpu")
        on_device = [] if device.type == "cpu" or is_staged else [device]
        devices = on_device + [host] * (is_open or not on_device)
        self._makers = [_backend_maker(group, each, timedelta(seconds=timeout_s)) for each in devices]
        lines = channels_of(lines) if isinstance(lines, Placement) else lines
        self._lines = [line for line in in_rounds(lines) if self.rank in (line.source, line.destination)]
        self._links = {}
        self.renew(0)

    def backends(self) -> Sequence[Any]:
        """The links' communicators, and those who wait for their sends."""
        backends: list[Any] = []
        for link in self._links.values():
            backends += link.backends
            if isinstance(link.sends, _ThreadedSends):
                backends.append(link.sends)
        return backends

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
                word = Message((torch.tensor([crc32(describe_message(channel).encode())], device=self.device),))
                if channel.source == self.rank:
                    self.send(channel, word)
                else:
                    arrivals.append((channel, word, self.receive(channel, None if self.is_open else word.header)))
            for channel, word, receipt in arrivals:
                if not torch.equal(receipt.wait().tensors[0], word.tensors[0]):
                    raise TransportError(f"something else came in place of {describe_message(channel)}")
            self.settle()
        except TransportError as error:
            raise TransportError(f"the link test failed: {error}") from error

    def receive(self, channel: Line, header: Header | None) -> "_PostedReceive":
        assert (header is None) is self.is_open, "headers go ahead of all messages or of none"
        self._check_usable()
        self._num_awaited += 1
        posted = _PostedReceive(self, channel)
        if header is not None:
            posted.post(header)
        else:
            posted.post_header()
            self._unread[channel].append(posted)
            self.read_arrived()
        return posted

    def _new_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return host_empty(shape, dtype) if self.is_staged else torch.empty(shape, dtype=dtype, device=self.device)

    def read_arrived(self) -> None:
        """Post the receives of the tensors of all messages whose header has come, before others compute."""
        for unread in self._unread.values():
            while unread and unread[0].header_has_come():
                unread.popleft().read_header()

    def send(self, channel: Line, message: Message) -> None:
        self._check_usable()
        header = message.header.packed() if self.is_open else b""
        if len(header) > _MOST_HEADER_BYTES:
            raise ValueError(f"{len(message.tensors)} tensors are too many for a message; give some of them as one")
        self._links[channel].send([to_host(x) if self.is_staged else laid_out(x) for x in message.tensors], header)

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


@dataclass(eq=False, slots=True)
class _PostedReceive:
    """A posted receive; that of a message whose header goes ahead gets its tensors' once the header is read.

    Headers are read in the order in which they were sent, whichever message is waited for first: so are their tensors.
    """

    #: the transport that counts it, and the channel
    transport: DistributedTransport
    channel: Line
    #: what the message holds, once it is known
    header: Header | None = None
    #: where its tensors are received, and the backend's handles to wait for, in order
    buffers: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    #: where a header that goes ahead is received
    header_bytes: bytearray = field(default_factory=bytearray)

    def post(self, header: Header) -> None:
        """Post the receives of the tensors."""
        link = self.transport._links[self.channel]
        self.header = header
        for shape, dtype in header.parts:
            buffer = self.transport._new_buffer(shape, dtype)
            self.buffers.append(buffer)
            self.works += link.receive(buffer)

    def post_header(self) -> None:
        """Post the receive of the header."""
        self.header_bytes = bytearray(_MOST_HEADER_BYTES)
        memory = torch.frombuffer(self.header_bytes, dtype=torch.uint8)
        self.works += self.transport._links[self.channel].receive(memory, is_header=True)

    def header_has_come(self) -> bool:
        """True once the header is there as a whole: gloo's works cannot be asked."""
        return HEADER_END in self.header_bytes

    def read_header(self) -> None:
        """Wait for the header, and post the receives of the tensors."""
        _wait_for(self.works, "no {}", self.channel)
        self.works.clear()
        self.post(Header.unpacked(self.header_bytes))

    def ready(self) -> bool:
        return True

    def wait(self) -> Message:
        if self.transport.is_open:
            while self.header is None:
                self.transport._unread[self.channel].popleft().read_header()
            self.transport.read_arrived()
        assert self.header is not None
        _wait_for(self.works, "no {}", self.channel)
        self.transport._num_awaited -= 1
        tensors = self.buffers
        if self.transport.is_staged:
            tensors = [to_device(x, torch.empty_like(x, device=self.transport.device)) for x in tensors]
        return Message(tuple(tensors), self.header.form, self.header.names)


def _wait_for(works: Sequence[dist.Work], failure: str, channel: Line) -> None:
    """Wait for handles of the backend. Raises: TransportError, which names the channel in the words of `failure`."""
    start = time.monotonic()
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        words, waited = failure.format(describe_message(channel)), time.monotonic() - start
        raise TransportError(f"{words} after {waited:.1f} s ({first_line(error)})") from error


class _ChannelEnd:
    """One channel's communicators, seen from one of its two ends.

    `makers` make the one that carries tensors and, where these are not in host memory, one for headers.
    `watch_s`: the longest that a thread waits for a send, for a backend whose works cannot be polled; None: they can.
    """

    #: the channel, and which end of the communicators the other rank is
    channel: Line
    peer: int
    #: the communicators, of which the first carries tensors and the last headers
    backends: Sequence[Any]
    #: holds sent tensors until they have left; nothing at the receiving end
    sends: "_ThreadedSends | _HeldSends"

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
            self.sends = _HeldSends(channel, are_polled=not isinstance(channel, HostChannel))
        else:
            self.sends = _ThreadedSends(channel, watch_s)

    def receive(self, buffer: Tensor, is_header: bool = False) -> list[dist.Work]:
        """Post the receive of a tensor, or of a header, at most as long as the buffer."""
        backend, tag = (self.backends[-1], _HEADER_TAG) if is_header else (self.backends[0], _TENSOR_TAG)
        try:
            works = [backend.recv([buffer], self.peer, tag)]
            if _comes_in_parts(buffer):
                works.insert(0, backend.recv([_BYTE_BEHIND], self.peer, tag))
        except RuntimeError as error:
            raise self._lost("received", error) from error
        return works

    def send(self, tensors: Sequence[Tensor], header: bytes) -> None:
        """Start sending tensors, behind a header if there is one."""
        assert self.peer == 1, f"this rank is not the source of the {describe_message(self.channel)}"
        held, works = list(tensors), []
        try:
            if header:
                held.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                works.append(self.backends[-1].send(held[-1:], self.peer, _HEADER_TAG))
            for tensor in tensors:
                works.append(self.backends[0].send([tensor], self.peer, _TENSOR_TAG))
                if _comes_in_parts(tensor):
                    works.append(self.backends[0].send([_BYTE_BEHIND], self.peer, _TENSOR_TAG))
        except RuntimeError as error:
            raise self._lost("sent", error) from error
        self.sends.add((held, works))

    def _lost(self, done: str, error: RuntimeError) -> TransportError:
        """Over a link whose other end is gone a backend refuses even to begin."""
        return TransportError(f"{describe_message(self.channel)} can no longer be {done} ({first_line(error)})")


def _comes_in_parts(tensor: Tensor) -> bool:
    return tensor.nbytes > _MOST_AT_ONCE_BYTES and tensor.device.type == "cpu"


_Sent = tuple[Sequence[Tensor], Sequence[dist.Work]]
"""Tensors under way, a header among them, and the backend's handles, of which that of a header is the first."""

_Sends = deque[_Sent]

_NOT_TAKEN = "{} were not taken"


@dataclass(eq=False)
class _HeldSends:
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
            works = self._in_flight[0][1]
            if not works[-1].is_completed():
                break
            # Dropped before its end, a send of gloo never comes: that of a header, which has been read by now.
            for work in works:
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
        _wait_for(self._in_flight[0][1], _NOT_TAKEN, self.channel)
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
    _unwatched: _Sends = field(default_factory=deque, init=False)
    _unwatched_bytes: int = field(default=0, init=False)
    #: the thread's work, call after call, and None for the end
    _calls: queue.SimpleQueue[Callable[[], None] | None] = field(
        default_factory=lambda: queue.SimpleQueue(), init=False
    )
    #: sends so far, and those that have left
    _num_added: int = field(default=0, init=False)
    _num_left: int = field(default=0, init=False)
    #: the reason why a message has not left
    _error: TransportError | None = field(default=None, init=False)
    #: set once all sends that `settle` waits for have left, or when the link is cut
    _settled: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        name = f"penstock sends {describe_message(self.channel)}"
        thread = threading.Thread(target=self._watch, name=name, daemon=True)
        thread.start()
        # At the interpreter's end too: a thread that comes back from torch then would abort the process.
        weakref.finalize(self, _end_thread, self._calls, thread)

    def _watch(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _wait_for_all(self, sends: _Sends) -> None:
        while sends:
            try:
                if self._error is None:
                    _wait_for(sends[0][1], _NOT_TAKEN, self.channel)
            except TransportError as error:
                self._error = error
            sends.popleft()
            self._num_left += 1

    def add(self, sent: _Sent) -> None:
        if self._error is not None:
            raise self._error
        self._num_added += 1
        self._unwatched.append(sent)
        self._unwatched_bytes += sum(tensor.nbytes for tensor in sent[0])
        if self._unwatched_bytes >= _MOST_BATCH_BYTES:
            self._watch_all()

    def _watch_all(self) -> None:
        self._calls.put(partial(self._wait_for_all, self._unwatched))
        self._unwatched, self._unwatched_bytes = deque(), 0

    def num_in_flight(self) -> int:
        return self._num_added - self._num_left

    def settle(self) -> None:
        if self.num_in_flight() > 0:
            self._settled = settled = threading.Event()
            self._watch_all()
            self._calls.put(settled.set)
            # The works have the same limit; the margin lets their own, more specific error come first.
            if self._error is None and not settled.wait(self.timeout_s + 5.0):
                raise TransportError(f"{describe_message(self.channel)} were not taken after {self.timeout_s:.1f} s")
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Let nobody wait for sends of a link that was cut: gloo may forget one that it has written in part."""
        words = f"{describe_message(self.channel)} were not taken before the link was cut"
        self._error = self._error or TransportError(words)
        self._settled.set()

    def close(self) -> None:
        self._calls.put(None)


def _end_thread(work: "queue.SimpleQueue[Any]", thread: threading.Thread) -> None:
    work.put(None)
    # The thread itself may be the last that holds what it works for.
    if thread is not threading.current_thread():
        thread.join(_END_S)


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
        nccl = nccl_options(timeout, is_link=True)
        return lambda store, place: NCCL(store, place, 2, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    gloo._devices = group._get_backend(torch.device("cpu")).options._devices  # pyright: ignore[reportAttributeAccessIssue]
    gloo._threads, gloo._timeout = 1, timeout
    return lambda store, place: dist.ProcessGroupGloo(store, place, 2, gloo)
