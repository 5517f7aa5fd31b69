"""Point-to-point messages between the ranks of a pipeline.

A channel is one direction of one edge: (source rank, destination rank, forward or backward). Messages of a channel
arrive in the order in which they were sent. Receives are posted ahead with the shape known to both sides; a send never
blocks and its tensor is released once it has left. Two implementations share the interface: `DistributedTransport` over
torch.distributed (one communicator a channel) and `InProcessTransport`, in which all ranks live in one thread and
`run_together` (of the executor) lets each go on as far as its messages allow.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.parallel import Handle
from penstock.runtime.errors import MessageMismatch, TransportError
from penstock.schedule import Channel, Direction


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


def described(tensor: "Tensor | _QueueReceipt") -> str:
    """The shape and dtype of a message in words."""
    return f"{list(tensor.shape)} of {tensor.dtype}"


class Receipt(Handle[Tensor], Protocol):
    """A posted receive. Its `wait` gives the message, which the caller owns.

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


@dataclass(eq=False)
class InProcessHub:
    """The queues that join the in-process transports of one pipeline."""

    #: messages sent and not received yet
    queues: defaultdict[Line, deque[Tensor]] = field(default_factory=partial(defaultdict, deque))
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
        receipt = _QueueReceipt(self, channel, tuple(shape), dtype)
        self._posted[channel].append(receipt)
        return receipt

    def send(self, channel: Line, tensor: Tensor) -> None:
        self.hub.num_messages += 1
        self.hub.queues[channel].append(tensor)

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
    #: the channel, and what is expected from it
    channel: Line
    shape: tuple[int, ...]
    dtype: torch.dtype

    def ready(self) -> bool:
        return self.transport._posted[self.channel][0] is self and bool(self.transport.hub.queues[self.channel])

    def wait(self) -> Tensor:
        if not self.ready():
            raise TransportError(f"the next of the {describe_message(self.channel)} is not there yet")
        self.transport._posted[self.channel].popleft()
        tensor = self.transport.hub.queues[self.channel].popleft()
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise MessageMismatch(
                f"{describe_message(self.channel)}: expected {described(self)}, got {described(tensor)}"
            )
        return tensor
