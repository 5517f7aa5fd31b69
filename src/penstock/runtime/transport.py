"""Point-to-point messages between the ranks of a pipeline.

A channel is one direction of one edge: (source rank, destination rank, forward or backward). Messages of a channel
arrive in the order in which they were sent. Receives are posted ahead with the shape known to both sides; a send never
blocks and its tensor is released once it has left. Two implementations share the interface: `DistributedTransport` over
torch.distributed (one communicator a channel) and `InProcessTransport`, in which all ranks live in one thread and
`run_in_turn` lets each go on as far as its messages allow.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.model import Driven
from penstock.runtime.errors import Deadlock, MessageMismatch, TransportError
from penstock.schedule import Channel, Direction

T = TypeVar("T")


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


class Receipt(Protocol):
    """A posted receive."""

    def ready(self) -> bool:
        """True if `wait` may be called: always where waiting blocks; in process, once the message is there."""
        ...

    def wait(self) -> Tensor:
        """The message; the caller owns it.

        Raises:
            TransportError: it does not come in time.
            MessageMismatch: another shape or dtype comes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Receipts:
    """The posted receives of one message of several tensors, which were sent together."""

    each: tuple[Receipt, ...]

    def ready(self) -> bool:
        return not self.each or self.each[0].ready()

    def wait(self) -> Any:
        """All tensors, in the order in which they were sent."""
        return tuple(receipt.wait() for receipt in self.each)


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


# ---- ranks that share one thread


@dataclass(frozen=True, eq=False)
class Participant(Generic[T]):
    """One rank's work."""

    #: yields the receipts that it cannot take yet, and returns the rank's result
    steps: Generator[Receipt, None, T]
    #: one sentence on the action that the rank is in
    where: Callable[[], str]
    #: torch's gradient mode while this rank works
    mode: Callable[[], AbstractContextManager[object]]


def run_in_turn(ranks: Mapping[int, Participant[T]]) -> dict[int, T]:
    """Run all ranks and return their results. If one fails, the others cannot finish either, and are closed.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    running, awaited, results = dict(ranks), dict[int, Receipt](), dict[int, T]()
    driven = {rank: Driven(one.steps, one.mode) for rank, one in ranks.items()}
    try:
        while running:
            able = [rank for rank in running if rank not in awaited or awaited[rank].ready()]
            if not able:
                stuck = "; ".join(one.where() for one in running.values())
                raise Deadlock(f"no rank can go on: {stuck}")
            for rank in able:
                receipt = next(driven[rank], None)
                if receipt is not None:
                    awaited[rank] = receipt
                else:
                    results[rank] = driven[rank].result
                    del running[rank]
    finally:
        for one in running.values():
            one.steps.close()
    return results
