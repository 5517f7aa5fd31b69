"""A rehearsed step: arithmetic, memory and traffic of one rank, action by action. Plain data; sizes are in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from penstock.schedule.actions import Op
from penstock.schedule.recording import CollectiveKind
from penstock.schedule.rules import Channel


class RehearsalError(ValueError):
    """A step that would fail, or wait for the device, where it runs; the message names the rank's action."""


class MemoryKind(StrEnum):
    """The uses of a rank's memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    #: fp32 copies of 16-bit parameters
    MASTERS = "masters"
    OPTIMIZER = "optimizer"
    #: what the modules hold beside parameters, and the batch
    OTHER = "other"
    #: kept from one action to a later one, for backward
    TAPE = "tape"
    #: receives that are posted, and sends under way
    TRANSPORT = "transport"
    #: freed by the end of the action in which it was allocated
    TRANSIENT = "transient"
    #: what NCCL takes on a GPU, estimated
    COMMUNICATORS = "communicators"


# A communicator of two ranks takes half a gigabyte for the network since NCCL 2.28 (NVIDIA/nccl#2363), and one of more
# 12 MB for each of 32 channels (NVIDIA/nccl#1685).
_LINK_BYTES, _GROUP_BYTES = 500_000_000, 400_000_000


def communicator_bytes(num_links: int, num_groups: int) -> int:
    """Memory of a GPU that NCCL takes for a rank's links to its neighbours and for groups, estimated from reports."""
    return num_links * _LINK_BYTES + num_groups * _GROUP_BYTES


STATE = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.MASTERS, MemoryKind.OPTIMIZER)
"""The kinds that last throughout training."""

BytesByKind = Mapping[MemoryKind, int]
"""Bytes by kind; kinds that are absent have none."""


@dataclass(frozen=True)
class ActionCost:
    """The cost of one action of one unit."""

    op: Op
    #: floating point operations of matrix products and attention, an addition and a multiplication counting as two
    flops: float
    #: bytes that all of its operations read and write, each operation by itself
    read_bytes: int
    written_bytes: int
    #: what is kept afterwards for the microbatch's next action
    kept_bytes: int
    #: the most that is allocated during the action, without what was there before it
    peak_bytes: int
    #: collectives inside the unit
    collectives: tuple[CollectiveTraffic, ...] = ()


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind and size on one axis of the grid."""

    kind: CollectiveKind
    #: the axes of the layout whose ranks take part, such as "tp" or "dp,cp"
    axis: str
    num_ranks: int
    #: this rank's input of each
    num_bytes: int
    number: int = 1


@dataclass(frozen=True)
class MessageTraffic:
    """Messages of one size between two ranks of the pipeline."""

    channel: Channel
    num_bytes: int
    number: int = 1


@dataclass(frozen=True)
class UnitCost:
    """The actions of one unit for one microbatch: F and B, and the two parts of a split backward, I and W."""

    name: str
    stage: int
    parameter_bytes: int
    actions: tuple[ActionCost, ...]

    def of(self, op: Op) -> ActionCost:
        """The cost of one action. Raises: KeyError if the unit has none of that kind."""
        for action in self.actions:
            if action.op is op:
                return action
        raise KeyError(f"{self.name} has no {op}")


@dataclass(frozen=True)
class MemoryPoint:
    """A rank's memory in one action of its program."""

    #: the action, as schedules print it
    action: str
    #: at the moment of the action at which most was allocated
    at_peak: BytesByKind
    #: when the action was over
    after: BytesByKind
    #: arithmetic of the whole action, see `ActionCost`
    flops: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Rehearsal:
    """One rank's step as the engine's own code runs it, without data."""

    #: the rank among all, and its place in the layout
    rank: int
    place: str
    #: the device that was rehearsed for: "cpu" or "cuda"
    device: str
    schedule: str
    num_microbatches: int
    units: tuple[UnitCost, ...]
    #: each action of the rank's program in order, the optimizer's step last
    timeline: tuple[MemoryPoint, ...]
    #: messages that this rank sends
    messages: tuple[MessageTraffic, ...]
    #: collectives of the step
    collectives: tuple[CollectiveTraffic, ...]
    #: in the order in which they were launched: the group's ranks and the call in words, for comparison between ranks
    launches: tuple[tuple[tuple[int, ...], str], ...] = field(default=(), repr=False)

    @property
    def state_bytes(self) -> BytesByKind:
        """The bytes that last throughout training, by kind."""
        return {kind: self.timeline[-1].after.get(kind, 0) for kind in STATE}

    @property
    def fullest(self) -> MemoryPoint:
        """The action with the highest peak, the first of equals."""
        return max(self.timeline, key=lambda point: point.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.fullest.peak_bytes

    def most(self, kind: MemoryKind) -> int:
        """The most bytes of one kind at once: of the tape between two actions, of all else within one."""
        points = (point.after if kind is MemoryKind.TAPE else point.at_peak for point in self.timeline)
        return max(memory.get(kind, 0) for memory in points)

    @property
    def flops(self) -> float:
        """Arithmetic of the step on this rank."""
        return sum(point.flops for point in self.timeline)


def check_order(rehearsals: Sequence[Rehearsal]) -> None:
    """Refuse ranks that do not launch the collectives of a group that they share alike and in one order.

    Raises:
        RehearsalError: naming the first collective at which two of them differ.
    """
    for ranks in dict.fromkeys(ranks for one in rehearsals for ranks, _ in one.launches):
        members = [one for one in rehearsals if one.rank in ranks]
        (first, expected), *others = (
            (one.rank, [call for group, call in one.launches if group == ranks]) for one in members
        )
        for rank, calls in others:
            for i, (a, b) in enumerate(zip_longest(expected, calls, fillvalue="nothing")):
                if a != b:
                    raise RehearsalError(
                        f"among the ranks {', '.join(map(str, ranks))}, collective {i + 1} of the step is {a} on rank "
                        f"{first} and {b} on rank {rank}; each would wait for the other"
                    )
