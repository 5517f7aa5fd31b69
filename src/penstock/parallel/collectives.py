"""Collectives that are launched without waiting, and the handle that waits for them.

Inputs must not be written to before `wait` has returned. Nothing here is differentiable: a segment or an autograd
function defines the backward. An `Observer` sees every launch and, through the handle that it returns, the wait and the
end. So the trace knows which time was hidden by compute, and no layer knows of the trace.

Shapes: N rows of this rank, P ranks of the group; all dimensions after the first are carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.renewable import RenewableGroup
from penstock.schedule.recording import CollectiveKind

T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A collective that has been launched, such as torch.distributed's own `Work`."""

    def wait(self) -> T_co:
        """Wait for the result and return it; on a GPU, order the current stream after the collective."""
        ...


class Observer(Protocol):
    """Sees every collective as soon as it has been launched."""

    def follow(
        self, kind: CollectiveKind, num_bytes: int, work: Handle[object], group: dist.ProcessGroup | None = None
    ) -> Handle[object]:
        """Return a handle to wait for in place of `work`.

        `num_bytes` counts this rank's input; `group` are the ranks that take part.
        """
        ...


@dataclass(frozen=True, eq=False)
class Pending(Handle[T_co]):
    """Waits for the backend and then makes the result."""

    #: makes the result
    finish: Callable[[], T_co]
    #: the backend's handles
    works: Sequence[Handle[object]] = ()
    #: the input, which must live until then
    sent: Tensor | None = None

    def wait(self) -> T_co:
        for work in self.works:
            work.wait()
        return self.finish()


@dataclass(eq=False)
class Collectives:
    """Launches the collectives of one group; every rank of it makes the same calls in the same order.

    Without a group this rank is alone, and every call returns its input.
    """

    #: the ranks; None for this rank alone
    group: dist.ProcessGroup | None
    #: learns of every launch
    observer: Observer | None = None

    @property
    def size(self) -> int:
        """The number of ranks, P."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else self.group.rank()

    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Handle[Tensor]:
        """Send each rank its part of the rows, and receive each rank's part for this one, in the order of ranks.

        `sent` and `received` count the rows for and from each rank; by default, all parts are equal.
        """
        if self.group is None:
            return Pending(lambda: x)
        x = x.contiguous()
        arrived = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
        splits = None if received is None else list(received), None if sent is None else list(sent)
        work = dist.all_to_all_single(arrived, x, *splits, group=self.group, async_op=True)
        return self._launched(CollectiveKind.ALL_TO_ALL, work, x, lambda: arrived)

    def all_gather(self, x: Tensor) -> Handle[Tensor]:
        """Concatenate all ranks' rows: [N, ...] -> [P N, ...]; N is equal on all ranks."""
        if self.group is None:
            return Pending(lambda: x)
        x = x.contiguous()
        arrived = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        work = _all_gather(arrived, x, group=self.group, async_op=True)
        return self._launched(CollectiveKind.ALL_GATHER, work, x, lambda: arrived)

    def reduce_scatter(self, x: Tensor) -> Handle[Tensor]:
        """Sum this rank's part of the rows over ranks: [P N, ...] -> [N, ...]."""
        if self.group is None:
            return Pending(lambda: x)
        return self._reduce_scatter(CollectiveKind.REDUCE_SCATTER, x.contiguous(), None)

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        """Sum over ranks into a new tensor; the input keeps its values."""
        if self.group is None:
            return Pending(lambda: x)
        total = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return self._launched(CollectiveKind.ALL_REDUCE, work, x, lambda: total)

    def send_receive(self, x: Tensor, to: int, source: int, num_rows: int | None = None) -> Handle[Tensor]:
        """Send to one rank of the group, and receive `num_rows` (by default the same number): a step round a ring."""
        if self.group is None:
            return Pending(lambda: x)
        x = x.contiguous()
        arrived = torch.empty_like(x) if num_rows is None else x.new_empty(num_rows, *x.shape[1:])
        if isinstance(self.group, RenewableGroup):
            works = self.group.send_receive(x, to, arrived, source)
        else:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, group_peer=to, group=self.group),
                    dist.P2POp(dist.irecv, arrived, group_peer=source, group=self.group),
                ]
            )
        return self._launched(CollectiveKind.SEND_RECEIVE, Pending(lambda: None, works), x, lambda: arrived)

    # ---- in place, on flat tensors: of P equal parts, rank r owns the r-th

    def sum_gradients(self, flat: Tensor) -> Handle[Tensor]:
        """Sum over the group, in place on all ranks."""
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return self._launched(CollectiveKind.GRADIENTS, work, flat, lambda: flat)

    def sum_owned_gradients(self, flat: Tensor) -> Handle[Tensor]:
        """Sum over the group into the part that this rank owns; the rest of `flat` becomes undefined."""
        return self._reduce_scatter(CollectiveKind.GRADIENTS, flat, self.owned_part(flat))

    def gather_owned(self, flat: Tensor) -> Handle[Tensor]:
        """Give every rank the parts that the others own, in place."""
        # As bytes, since gloo does not support every type. A copy, since input and output must not overlap.
        part = self.owned_part(flat).clone()
        work = _all_gather(flat.view(torch.uint8), part.view(torch.uint8), group=self.group, async_op=True)
        return self._launched(CollectiveKind.ALL_GATHER, work, part, lambda: flat)

    def sum_gradients_at(self, flat: Tensor, owner: int) -> Handle[Tensor]:
        """Sum over the group on its rank `owner`; elsewhere `flat` becomes undefined."""
        work = dist.reduce(flat, group=self.group, group_dst=owner, async_op=True)
        return self._launched(CollectiveKind.GRADIENTS, work, flat, lambda: flat)

    def spread_from(self, flat: Tensor, owner: int) -> Handle[Tensor]:
        """Give every rank the values of the group's rank `owner`, in place."""
        # As bytes, since gloo does not support every type.
        work = dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=owner, async_op=True)
        return self._launched(CollectiveKind.BROADCAST, work, flat, lambda: flat)

    def owned_part(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor that this rank owns, as a view."""
        length = flat.numel() // self.size
        return flat[self.rank * length : (self.rank + 1) * length]

    def _reduce_scatter(self, kind: CollectiveKind, x: Tensor, out: Tensor | None) -> Handle[Tensor]:
        num_rows = x.shape[0] // self.size
        if x.device.type == "cpu" or (isinstance(self.group, RenewableGroup) and self.group.is_staged):
            # gloo would sum all rows on every rank and drop most: twice the bytes, and a sum that delays all ranks.
            parts = torch.empty_like(x)
            work = dist.all_to_all_single(parts, x, group=self.group, async_op=True)
            return self._launched(
                kind, work, x, lambda: torch.sum(parts.unflatten(0, (self.size, num_rows)), 0, out=out)
            )
        arrived = x.new_empty(num_rows, *x.shape[1:]) if out is None else out
        work = _reduce_scatter(arrived, x, group=self.group, async_op=True)
        return self._launched(kind, work, x, lambda: arrived)

    def _launched(
        self, kind: CollectiveKind, work: Handle[object] | None, x: Tensor, finish: Callable[[], Tensor]
    ) -> Handle[Tensor]:
        assert work is not None, "a rank outside of the group has launched a collective"
        if self.observer is not None:
            work = self.observer.follow(kind, x.nbytes, work, self.group)
        return Pending(finish, (work,), x)


def gather_uneven(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None, dim: int = 0) -> list[Tensor]:
    """Give every rank all ranks' tensors, which differ only in their length along `dim`; `lengths` are by rank."""
    if group is None:
        return [x]
    # gloo gathers equal lengths only.
    longest = max(lengths)
    padded = x.new_zeros([longest if d == dim else size for d, size in enumerate(x.shape)])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]


def share_buffers(buffers: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give these buffers, on every rank of the group, the values that its first rank has; they are written in place."""
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for of_one_dtype in by_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in of_one_dtype])
        # As bytes, since gloo does not support every type.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        for buffer, values in zip(of_one_dtype, flat.split([b.numel() for b in of_one_dtype]), strict=True):
            buffer.copy_(values.view_as(buffer))


# Newer releases of PyTorch warn about the older names.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
