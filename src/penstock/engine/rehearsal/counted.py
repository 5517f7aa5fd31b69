"""Process groups, a transport and host memory that only count: nothing is sent, and what comes has no values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.rehearsal.meter import Meter
from penstock.parallel import laid_out
from penstock.parallel.renewable import RenewableGroup
from penstock.runtime.message import Header, Message
from penstock.runtime.offload import Arena, HostPlace
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Channel
from penstock.schedule.recording import CollectiveKind
from penstock.schedule.rehearsal import CollectiveTraffic, MemoryKind, MessageTraffic

_KINDS = {
    "allgather": CollectiveKind.ALL_GATHER,
    "_allgather_base": CollectiveKind.ALL_GATHER,
    "all_gather_single": CollectiveKind.ALL_GATHER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "alltoall_base": CollectiveKind.ALL_TO_ALL,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.GRADIENTS,
    "_reduce_scatter_base": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_single": CollectiveKind.REDUCE_SCATTER,
    "send": CollectiveKind.SEND_RECEIVE,
}
"""Method of a process group that torch.distributed calls -> the kind that is counted."""

# The input is their second argument; that of all others is the first.
_INPUT_SECOND = frozenset(name for name in _KINDS if "gather" in name or "scatter" in name or "to_all" in name)
_INPUT_SECOND |= {"alltoall_base"}


class CountedArena(Arena):
    """Host memory for what has no values: nothing is moved."""

    def put(self, block: Tensor) -> HostPlace:
        return HostPlace(block.nbytes, block.dtype, None, 0)

    def take(self, place: HostPlace, device: torch.device) -> Tensor:
        return torch.empty(place.num_bytes // place.dtype.itemsize, dtype=place.dtype, device=device)


@dataclass(eq=False)
class TrafficCount:
    """Counts a rank's messages and collectives, and notes the order of the latter."""

    #: (group's ranks, collective in words), in the order of launches
    launches: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    #: collectives and messages of one kind and size -> their number
    _collectives: Counter[CollectiveTraffic] = field(default_factory=Counter)
    _messages: Counter[MessageTraffic] = field(default_factory=Counter)

    def restart(self) -> None:
        self.launches, self._collectives, self._messages = [], Counter(), Counter()

    def launched(self, kind: CollectiveKind, group: CountedGroup, x: Tensor) -> None:
        self._collectives[CollectiveTraffic(kind, group.axis, group.size(), x.nbytes)] += 1
        self.launches.append((group.ranks, f"{kind} of {x.numel()} {str(x.dtype).removeprefix('torch.')}"))

    def sent(self, channel: Channel, x: Tensor) -> None:
        self._messages[MessageTraffic(channel, x.nbytes)] += 1

    @property
    def collectives(self) -> tuple[CollectiveTraffic, ...]:
        """The collectives so far, equal ones added up, in the order of their first launch."""
        return tuple(replace(traffic, number=count) for traffic, count in self._collectives.items())

    @property
    def messages(self) -> tuple[MessageTraffic, ...]:
        """The messages so far, equal ones added up."""
        return tuple(replace(traffic, number=count) for traffic, count in self._messages.items())


class Done:
    """A collective that ends as soon as it is launched."""

    def wait(self, *limits: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class GroupHere(RenewableGroup):
    """A process group whose calls are answered in this process."""

    #: the group's name, and the receiver of the calls to its communicators
    _own_name: str
    inner: Any
    backend: Any

    def __init__(self, place: int, size: int, name: str, calls: Any) -> None:
        dist.ProcessGroup.__init__(self, place, size)  # pyright: ignore[reportCallIssue]
        self._own_name, self.inner, self.backend = name, calls, calls


@dataclass(eq=False)
class _Nowhere:
    """Counts every call that torch.distributed makes to a group, and does nothing else."""

    #: the group that it stands for
    _group: CountedGroup
    #: counts the calls
    _traffic: TrafficCount

    def __getattr__(self, name: str) -> Any:
        if name not in _KINDS:
            raise AttributeError(f"{name} cannot be rehearsed")

        def call(*arguments: Any, **settings: Any) -> Done:
            kind, sent = _KINDS[name], arguments[1 if name in _INPUT_SECOND else 0]
            self._traffic.launched(kind, self._group, sent[0] if isinstance(sent, list) else sent)
            return Done()

        return call


class CountedGroup(GroupHere):
    """A process group without its other ranks, whose collectives are counted."""

    #: the global ranks of the group
    ranks: tuple[int, ...]
    #: the axes of the layout along which the ranks lie; the group's name
    axis: str

    def __init__(self, rank: int, ranks: tuple[int, ...], axis: str, traffic: TrafficCount) -> None:
        super().__init__(ranks.index(rank), len(ranks), axis, _Nowhere(self, traffic))
        self.ranks, self.axis = ranks, axis

    def send_receive(self, sent: Tensor, to: int, arrived: Tensor, source: int) -> list[Any]:
        """Count a step round a ring as one exchange, however a backend would split it."""
        return [self.inner.send([sent], to, 0)]


@dataclass(eq=False)
class _Arrival:
    """A posted receive, whose message is there at once."""

    #: filled by the message; counted by the meter
    buffer: Tensor
    meter: Meter

    def ready(self) -> bool:
        return True

    def wait(self) -> Message:
        self.meter.claim(MemoryKind.TRANSIENT, [self.buffer])
        return Message((self.buffer,))


@dataclass(eq=False)
class CountedTransport:
    """A transport without other ranks: a receive allocates, and a send is held until the link's next one."""

    #: the rank in the pipeline, and its device
    rank: int
    _device: torch.device
    #: counts the messages' memory
    _meter: Meter
    #: counts the messages
    _traffic: TrafficCount
    #: the last tensor of each link
    _leaving: dict[Line, Tensor] = field(default_factory=dict, init=False)

    def receive(self, channel: Line, header: Header | None) -> Receipt:
        assert header is not None, "a rehearsal's layers give the plain stream"
        [(shape, dtype)] = header.parts
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        self._meter.claim(MemoryKind.TRANSPORT, [buffer])
        return _Arrival(buffer, self._meter)

    def send(self, channel: Line, message: Message) -> None:
        assert isinstance(channel, Channel)
        tensor = laid_out(message.tensors[0])
        self._traffic.sent(channel, tensor)
        self._meter.claim(MemoryKind.TRANSPORT, [tensor])
        self._leaving[channel] = tensor

    def num_pending(self) -> int:
        return len(self._leaving)

    def settle(self) -> None:
        self._leaving.clear()

    def abandon(self) -> None:
        self._leaving.clear()

    def close(self) -> None:
        """Nothing to do."""
