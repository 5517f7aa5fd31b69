"""Operations between ranks that end as late as they may, and say who misused their tensors meanwhile.

An output holds poison from the launch until its rank has waited. An input is read when the operation ends: when no rank
can go on otherwise, or, by seed, at some moment before. Operations of one stream of a rank end in the order in which
they were launched: a stream is a channel of messages, a group on host memory, or all groups on the device, whose
kernels would wait for each other there.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.late.turns import Turns

POISON = 0x5A
"""The byte that fills numbers without NaN: far out of the range of any index."""

Combine = Callable[[Sequence[Sequence[Tensor]], Sequence[Any]], Sequence[Sequence[Tensor]]]
"""From the inputs of every place of a group, and each place's own arguments, to the outputs of every place."""


class Misuse(AssertionError):
    """A tensor was freed or written to while an operation between ranks used it, or ranks launched different ones."""


@dataclass(frozen=True)
class Lateness:
    """One way for operations to end.

    Args:
        seed: decides every choice.
        prompt: every operation ends as soon as all ranks have launched it: as on a quick network.
        early: the share of launches at which some other operation ends, long before it must.
        blocking_sends: a send of activations or gradients holds its rank until the receive is posted.
    """

    seed: int = 0
    prompt: bool = False
    early: float = 0.0
    blocking_sends: bool = False

    @classmethod
    def of(cls, seed: int) -> Lateness:
        """The way of a seed: 0 is as late as possible, and even ones make sends block."""
        return cls(seed, early=0.0 if seed < 2 else 0.25 * (seed % 4), blocking_sends=seed % 2 == 0)


def poison(tensor: Tensor) -> None:
    """Fill with NaN, or with bytes that are no sensible integer."""
    data = tensor.data
    if data.is_floating_point():
        data.fill_(torch.nan)
    elif data.dtype is torch.bool:
        data.fill_(True)
    else:
        data.fill_(255 if data.dtype is torch.uint8 else int.from_bytes(bytes([POISON] * data.element_size())))


class Lent:
    """A tensor that an operation uses while its owner must keep it: only its owner keeps it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())  # pyright: ignore[reportAttributeAccessIssue]
        self._form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype
        # Views share the count, but only a tensor itself tells it.
        self._tensor = weakref.ref(tensor)
        self._version = _version(tensor)

    @property
    def was_written(self) -> bool:
        """True if its owner has written to it, as far as that can be known."""
        tensor = self._tensor()
        return tensor is not None and _version(tensor) != self._version

    def tensor(self) -> Tensor | None:
        """The tensor; None once its memory has been given back."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


@dataclass(eq=False)
class Part:
    """What one rank has launched of an operation."""

    rank: int
    stream: deque[Operation]
    inputs: list[Lent]
    outputs: list[Lent]
    #: the inputs' values at the launch
    given: list[Tensor]
    #: True if the outputs are the inputs
    in_place: bool
    #: what the rank alone knows of the operation
    argument: Any


@dataclass(eq=False)
class Operation:
    """One operation of a communicator; it can end once every place has launched its part."""

    name: str
    kind: str
    combine: Combine
    places: Sequence[int]
    #: by place
    parts: dict[int, Part] = field(default_factory=dict)
    #: by place, once it has ended
    results: Sequence[Sequence[Tensor]] | None = None

    @property
    def has_ended(self) -> bool:
        return self.results is not None

    def can_end(self) -> bool:
        return len(self.parts) == len(self.places) and all(part.stream[0] is self for part in self.parts.values())

    def end(self) -> None:
        """Read all inputs now. Raises: Misuse."""
        inputs = []
        for place in range(len(self.places)):
            part = self.parts[place]
            inputs.append(
                part.given if part.in_place else [self._read(part, number) for number in range(len(part.inputs))]
            )
        with torch.no_grad():
            self.results = self.combine(inputs, [self.parts[place].argument for place in range(len(self.places))])
        for part in self.parts.values():
            part.stream.popleft()
            part.given, part.inputs = [], []

    def _read(self, part: Part, number: int) -> Tensor:
        tensor = part.inputs[number].tensor()
        if tensor is None:
            raise Misuse(f"rank {part.rank} freed what it gave to {self.name} before it had left")
        if not _same_bits(tensor, part.given[number]):
            raise Misuse(f"rank {part.rank} wrote to what it gave to {self.name} before it had left")
        return tensor.clone()

    def deliver(self, place: int) -> None:
        """Give a rank that has waited its outputs. Raises: Misuse."""
        part = self.parts[place]
        assert self.results is not None
        for lent, result in zip(part.outputs, self.results[place], strict=True):
            tensor = lent.tensor()
            if tensor is None:
                raise Misuse(f"rank {part.rank} freed what {self.name} was to fill before it had arrived")
            if lent.was_written:
                raise Misuse(f"rank {part.rank} wrote to what {self.name} was to fill before it had arrived")
            tensor.data.copy_(result.view(tensor.shape))
        part.outputs = []

    def awaited(self) -> str:
        """What it is still waiting for."""
        missing = [rank for place, rank in enumerate(self.places) if place not in self.parts]
        if missing:
            return f"waits for {self.name}, which {_ranks(missing)} has not launched"
        behind = {
            f"{part.stream[0].name} on rank {part.rank}"
            for part in self.parts.values()
            if part.stream and part.stream[0] is not self
        }
        return f"waits for {self.name}, which stands behind {' and '.join(sorted(behind))}"


@dataclass(frozen=True, eq=False)
class Call:
    """One rank's part of an operation that is about to be launched; operations of one stream end in their order."""

    communicator: Hashable
    stream: Hashable
    kind: str
    name: str
    places: Sequence[int]
    place: int
    combine: Combine
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    argument: Any = None


class LateWork:
    """The handle of a launched operation, as torch.distributed's `Work`."""

    def __init__(self, operations: Operations, operation: Operation, place: int) -> None:
        self._operations, self._operation, self._place = operations, operation, place

    def is_completed(self) -> bool:
        return self._operation.has_ended

    def wait_for_all(self) -> None:
        """Return when every rank has launched its part."""
        operation = self._operation
        everyone = len(operation.places)
        self._operations.turns.wait(lambda: len(operation.parts) == everyone, operation.awaited)

    def wait(self, timeout: object = None) -> bool:
        operation = self._operation
        self._operations.turns.wait(lambda: operation.has_ended, operation.awaited, operation)
        operation.deliver(self._place)
        return True


class Operations:
    """All operations between the ranks of one world."""

    def __init__(self, lateness: Lateness) -> None:
        self.lateness, self.random = lateness, Random(lateness.seed)
        self.turns = Turns(self.random, self.end_one, helpers_last=lateness.seed == 0 and not lateness.prompt)
        #: launched by all of their ranks or some, in order
        self._open: list[Operation] = []
        #: communicator and number -> the operation
        self._by_number: dict[tuple[Hashable, int], Operation] = {}
        #: communicator and place -> the number of its next operation
        self._next: dict[tuple[Hashable, int], int] = {}
        self._streams: dict[Hashable, deque[Operation]] = {}
        #: operations that have ended
        self.num_ended = 0
        #: links made so far, by group, line and rank
        self.num_links = Counter[Hashable]()

    def launch(self, call: Call) -> LateWork:
        """Launch this rank's part of a communicator's next operation. Raises: Misuse."""
        rank, key = call.places[call.place], (call.communicator, call.place)
        number = self._next.get(key, 0)
        self._next[key] = number + 1
        operation = self._by_number.get((call.communicator, number))
        if operation is None:
            operation = Operation(f"{call.name} {number}", call.kind, call.combine, call.places)
            self._by_number[call.communicator, number] = operation
            self._open.append(operation)
        if operation.kind != call.kind:
            raise Misuse(f"rank {rank} launches {call.kind} where another rank launches {operation.name}")
        stream = self._streams.setdefault((call.stream, rank), deque())
        stream.append(operation)
        given = [x.detach().clone() for x in call.inputs]
        in_place = bool(given) and any(call.inputs[0] is output for output in call.outputs)
        for output in call.outputs:
            poison(output)
        operation.parts[call.place] = Part(
            rank,
            stream,
            [Lent(x) for x in call.inputs],
            [Lent(y) for y in call.outputs],
            given,
            in_place,
            call.argument,
        )
        self._after_launch()
        return LateWork(self, operation, call.place)

    def _after_launch(self) -> None:
        if self.lateness.prompt:
            while self.end_one():
                pass
        elif self.random.random() < self.lateness.early:
            self.end_one()

    def end_one(self) -> bool:
        """End one operation, mostly one that somebody waits for, or that stands before it; False if none can end."""
        able = [operation for operation in self._open if operation.can_end()]
        if not able:
            return False
        wanted = set()
        for task in self.turns.tasks:
            if isinstance(task.awaited, Operation):
                wanted |= {part.stream[0] for part in task.awaited.parts.values() if part.stream}
        pool = [operation for operation in able if operation in wanted]
        exact = self.lateness.seed == 0 or self.random.random() < 0.75
        chosen = self.random.choice(pool if pool and exact else able)
        self._open.remove(chosen)
        chosen.end()
        self.num_ended += 1
        return True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(one: Tensor, other: Tensor) -> bool:
    mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(mine, theirs)


def _ranks(ranks: Sequence[Any]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' and '.join(map(str, ranks))}"
