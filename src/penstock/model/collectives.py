"""Collectives as units launch them: at once and without waiting, told to whoever watches.

Each call returns what travels; its `wait` gives what arrived (on a GPU it orders the current stream behind it). A group
of one, given as None, moves nothing. Who watches learns each collective's launch, and through the work that it gives
back the wait and the end: so the trace knows which time was hidden behind compute, and no unit knows of the trace.

Shapes: N rows of this rank, P ranks of the group; what follows the first dimension is carried along.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.model.segments import Travelling
from penstock.schedule.recording import CollectiveKind


class Work(Protocol):
    """A collective under way, as torch.distributed gives it."""

    def wait(self) -> object: ...


class Observer(Protocol):
    """Told of every collective as soon as it has been launched."""

    def follow(self, kind: CollectiveKind, num_bytes: int, work: Work, group: dist.ProcessGroup | None = None) -> Work:
        """The work, to be waited for in its place.

        `num_bytes` are those that this rank holds of the input, `group` the ranks that take part.
        """
        ...


@dataclass(frozen=True, eq=False)
class _Arriving:
    """Under way: `arrived` is made of the input, which is kept until then, once the work is done."""

    work: Work
    sent: Tensor
    arrived: Callable[[], Tensor]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.arrived()


@dataclass(frozen=True, eq=False)
class _Here:
    """In a group of one what is sent has arrived."""

    x: Tensor

    def wait(self) -> Tensor:
        return self.x


@dataclass(frozen=True, eq=False)
class _All:
    """Several works that are one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Collectives:
    """Launches the collectives of one group; every rank of it makes the same calls in the same order.

    Inputs are read until `wait` has returned and must not be written to before. Nothing here is differentiable: a
    segment or an autograd function says what the backward is.

    Args:
        group: the ranks; None for this rank alone.
        observer: told of every launch; `observe` attaches one later.
    """

    def __init__(self, group: dist.ProcessGroup | None, observer: Observer | None = None) -> None:
        self.group, self.observer = group, observer

    @property
    def size(self) -> int:
        """P: how many ranks the group has."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else self.group.rank()

    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Travelling:
        """Give each rank its part of the rows, and take from each its part for this one, in the order of ranks.

        `sent` and `received` are the rows for and from each rank; left out, all parts are equal.
        """
        if self.group is None:
            return _Here(x)
        x = x.contiguous()
        arrived = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
        splits = None if received is None else list(received), None if sent is None else list(sent)
        work = dist.all_to_all_single(arrived, x, *splits, group=self.group, async_op=True)
        return self._under_way(CollectiveKind.ALL_TO_ALL, work, x, lambda: arrived)

    def all_gather(self, x: Tensor) -> Travelling:
        """All ranks' rows one behind the other: [N, ...] -> [P N, ...]; N is equal on all ranks."""
        if self.group is None:
            return _Here(x)
        x = x.contiguous()
        arrived = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        work = _all_gather(arrived, x, group=self.group, async_op=True)
        return self._under_way(CollectiveKind.ALL_GATHER, work, x, lambda: arrived)

    def reduce_scatter(self, x: Tensor) -> Travelling:
        """The sum over ranks of this rank's part of the rows: [P N, ...] -> [N, ...]."""
        if self.group is None:
            return _Here(x)
        x = x.contiguous()
        num_rows = x.shape[0] // self.size
        if x.device.type == "cpu":
            # gloo sums all rows on every rank and cuts the rest off: twice the bytes, and a sum while one waits.
            parts = torch.empty_like(x)
            work = dist.all_to_all_single(parts, x, group=self.group, async_op=True)
            return self._under_way(
                CollectiveKind.REDUCE_SCATTER, work, x, lambda: parts.unflatten(0, (self.size, num_rows)).sum(0)
            )
        arrived = x.new_empty(num_rows, *x.shape[1:])
        work = _reduce_scatter(arrived, x, group=self.group, async_op=True)
        return self._under_way(CollectiveKind.REDUCE_SCATTER, work, x, lambda: arrived)

    def all_reduce(self, x: Tensor) -> Travelling:
        """The sum over ranks; the input keeps its values."""
        if self.group is None:
            return _Here(x)
        total = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return self._under_way(CollectiveKind.ALL_REDUCE, work, x, lambda: total)

    def send_receive(self, x: Tensor, to: int, source: int, num_rows: int | None = None) -> Travelling:
        """Send to one rank of the group, and receive `num_rows` (or as many) from one: a step round a ring."""
        if self.group is None:
            return _Here(x)
        x = x.contiguous()
        arrived = torch.empty_like(x) if num_rows is None else x.new_empty(num_rows, *x.shape[1:])
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group_peer=to, group=self.group),
                dist.P2POp(dist.irecv, arrived, group_peer=source, group=self.group),
            ]
        )
        return self._under_way(CollectiveKind.SEND_RECEIVE, _All(works), x, lambda: arrived)

    def _under_way(
        self, kind: CollectiveKind, work: Work | None, x: Tensor, arrived: Callable[[], Tensor]
    ) -> Travelling:
        assert work is not None, "a rank outside of the group has launched a collective"
        if self.observer is not None:
            work = self.observer.follow(kind, x.numel() * x.element_size(), work, self.group)
        return _Arriving(work, x, arrived)


def observe(module: nn.Module, observer: Observer) -> int:
    """Attach the observer to all `Collectives` that are attributes of the module or its parts; how many there were."""
    found = {
        id(value): value for part in module.modules() for value in vars(part).values() if isinstance(value, Collectives)
    }
    for collectives in found.values():
        collectives.observer = observer
    return len(found)


# Newer releases of PyTorch warn about the older names.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
