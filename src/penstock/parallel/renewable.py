"""Communicators that can be cut, so that nobody waits in them any longer, and made anew in the same place.

A backend cannot take back what is under way. After a step that failed on some rank, each rank cuts its communicators
from another thread, which wakes the one that waits in them, and then all ranks make new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

# No message of the engine bears this tag.
_UNUSED_TAG = 0x70656E
_AT_ONCE = timedelta(milliseconds=1)


class Communicator(Protocol):
    """A way to other ranks that can be cut and made anew."""

    def backends(self) -> Sequence[Any]:
        """The backends of torch.distributed that it uses at present."""
        ...

    def renew(self, generation: int) -> None:
        """Make new backends in their place; blocks until all ranks that take part have called it."""
        ...


def cut(communicators: Sequence[Communicator]) -> None:
    """End all that is under way on this rank, with an error where it is waited for; may be called from any thread."""
    found = [backend for communicator in communicators for backend in communicator.backends()]
    doomed = []
    for backend in found:
        if isinstance(backend, dist.ProcessGroupGloo):
            # gloo's own abort does nothing, but a receive that times out ends all that its context has under way.
            with contextlib.suppress(RuntimeError):
                doomed.append(backend.recv([torch.empty(1)], int(backend.rank() == 0), _UNUSED_TAG))
        else:
            backend.abort()
    for work in doomed:
        with contextlib.suppress(RuntimeError):
            work.wait(_AT_ONCE)


class RenewableGroup(dist.ProcessGroup):
    """A process group whose backend can be replaced, so that all who hold the group go on with the new one.

    `make` makes the backend, given a store and the one that it replaces (None at first).
    """

    #: carries the collectives
    backend: Any

    def __init__(self, store: Store, rank: int, size: int, make: Callable[[Store, Any], Any]) -> None:
        super().__init__(rank, size)
        self._store, self._make, self._own_name = store, make, ""
        self.backend = make(PrefixStore("0", store), None)

    def backends(self) -> Sequence[Any]:
        return (self.backend,)

    def renew(self, generation: int) -> None:
        self.backend = self._make(PrefixStore(str(generation), self._store), self.backend)

    def send_receive(self, sent: torch.Tensor, to: int, arrived: torch.Tensor, source: int) -> list[dist.Work]:
        """Send to one rank of the group and receive from another at the same time."""
        if not self.backend.supports_coalescing:
            return [self.backend.send([sent], to, 0), self.backend.recv([arrived], source, 0)]
        self.backend._start_coalescing()
        self.backend.send([sent], to, 0)
        self.backend.recv([arrived], source, 0)
        return [self.backend._end_coalescing()]

    # torch.distributed asks for the rest of these.

    @property
    def group_name(self) -> str:
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _set_group_desc(self, desc: str) -> None:
        """Ignore it."""

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    def shutdown(self) -> None:
        self.backend.shutdown()


def _forward(name: str, of_backend: str) -> None:
    """Let calls of a group go to its backend, where this release of PyTorch has them."""

    def call(self: RenewableGroup, *args: Any, **settings: Any) -> Any:
        return getattr(self.backend, of_backend)(*args, **settings)

    if hasattr(dist.ProcessGroup, name):
        setattr(RenewableGroup, name, call)


for _name in (
    "allreduce",
    "allgather",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
):
    _forward(_name, _name)
# The older names, and those that newer releases give them.
for _of_backend, _newer in (
    ("_allgather_base", "all_gather_single"),
    ("alltoall_base", "all_to_all_single"),
    ("_reduce_scatter_base", "reduce_scatter_single"),
):
    _forward(_of_backend, _of_backend)
    _forward(_newer, _of_backend)


def new_renewable_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup | Any:
    """`torch.distributed.new_group` over "gloo" or "nccl", for a group that can be made anew."""
    name = f"penstock_{backend}"
    if not hasattr(dist.Backend, name.upper()):
        makers = {"gloo": _make_gloo, "nccl": _make_nccl}

        def create(store: Store, rank: int, size: int, timeout: timedelta) -> RenewableGroup:
            return RenewableGroup(store, rank, size, makers[backend](rank, size, timeout))

        dist.Backend.register_backend(name, create, devices=["cpu" if backend == "gloo" else "cuda"])
    return dist.new_group(list(ranks), backend=name, timeout=timeout)


def _make_gloo(rank: int, size: int, timeout: timedelta) -> Callable[[Store, Any], Any]:
    def make(store: Store, replaced: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # Each device has a thread of its own.
        options._devices = (
            [dist.ProcessGroupGloo.create_default_device()] if replaced is None else replaced.options._devices  # pyright: ignore[reportAttributeAccessIssue]
        )
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    return make


def _make_nccl(rank: int, size: int, timeout: timedelta) -> Callable[[Store, Any], Any]:
    def make(store: Store, replaced: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    return make
