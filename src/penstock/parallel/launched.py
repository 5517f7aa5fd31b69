"""The collectives on flat buckets, launched and left to travel: sums of gradients, and of parameters what others own.

In a group of P ranks rank r owns the r-th of P equal parts of a flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.schedule.recording import CollectiveKind

Follow = Callable[[CollectiveKind, int, Any, dist.ProcessGroup], Any]
"""Told of a collective that has been launched: kind, bytes, work and group; gives the work to wait for."""


class Launched(Protocol):
    """A collective under way; after `wait` its result stands in place (on a GPU: for the current stream)."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class _Ending:
    """What is left to do once the work is done; keeps what travels until then."""

    work: Any
    end: Callable[[], Any]

    def wait(self) -> None:
        self.work.wait()
        self.end()


def launch_sum(tensor: Tensor, group: dist.ProcessGroup, follow: Follow | None) -> Launched:
    """Sum over the group, in place on all ranks."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return _followed(work, follow, CollectiveKind.GRADIENTS, tensor, group)


def launch_own_sum(flat: Tensor, group: dist.ProcessGroup, follow: Follow | None) -> Launched:
    """Sum over the group into the part of `flat` that this rank owns; the rest of it is of no use then."""
    own = owned_part(flat, group)
    if flat.device.type != "cpu":
        work = _reduce_scatter(own, flat, group=group, async_op=True)
        return _followed(work, follow, CollectiveKind.GRADIENTS, flat, group)
    # gloo knows no other way than to sum everything on every rank: twice the bytes.
    parts = torch.empty_like(flat)
    work = dist.all_to_all_single(parts, flat, group=group, async_op=True)
    launched = _followed(work, follow, CollectiveKind.GRADIENTS, flat, group)
    return _Ending(launched, lambda: torch.sum(parts.view(group.size(), -1), 0, out=own))


def launch_gather(flat: Tensor, group: dist.ProcessGroup, follow: Follow | None) -> Launched:
    """Give every rank the parts that the others own, in place."""
    # As bytes: gloo does not know every type. A copy: what is sent must not be where something arrives.
    own = owned_part(flat, group).clone()
    work = _all_gather(flat.view(torch.uint8), own.view(torch.uint8), group=group, async_op=True)
    return _Ending(_followed(work, follow, CollectiveKind.ALL_GATHER, own, group), lambda: own)


def owned_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The part of a flat tensor that this rank of the group owns, as a view."""
    length = flat.numel() // group.size()
    return flat[group.rank() * length : (group.rank() + 1) * length]


def _followed(
    work: Any, follow: Follow | None, kind: CollectiveKind, tensor: Tensor, group: dist.ProcessGroup
) -> Launched:
    assert work is not None, "a rank outside of the group has launched a collective"
    return work if follow is None else follow(kind, tensor.nbytes, work, group)


# Newer releases of PyTorch warn about the older names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
