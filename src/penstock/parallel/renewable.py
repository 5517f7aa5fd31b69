"""Communicators that can be cut, so that nobody waits in them any longer, and made anew in the same place.

A backend cannot take back what is under way. After a step that failed on some rank, each rank cuts its communicators
from another thread, which wakes the one that waits in them, and then all ranks make new ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

# No message of the engine bears this tag.
_UNUSED_TAG = 0x70656E
_AT_ONCE = timedelta(milliseconds=1)


@runtime_checkable
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
    cut_backends([backend for communicator in communicators for backend in communicator.backends()])


def cut_backends(backends: Sequence[Any]) -> None:
    """The same for backends of torch.distributed, gloo's or NCCL's."""
    doomed = []
    for backend in backends:
        if isinstance(backend, dist.ProcessGroupGloo):
            # gloo's own abort does nothing, but a receive that times out ends all that its context has under way.
            doomed += _unanswered_receive(backend)
        else:
            backend.abort()
    for work in doomed:
        with contextlib.suppress(RuntimeError):
            work.wait(_AT_ONCE)


def _unanswered_receive(backend: Any) -> list[dist.Work]:
    """A receive of what nobody sends, from the first peer that has not ended; none where all have."""
    for peer in range(backend.size()):
        if peer != backend.rank():
            with contextlib.suppress(RuntimeError):
                return [backend.recv([torch.empty(1)], peer, _UNUSED_TAG)]
    return []


class RenewableGroup(dist.ProcessGroup):
    """A process group that can be replaced inside, so that all who hold it go on with new communicators.

    `make` makes the backend, given a store and the one that it replaces (None at first).
    """

    #: carries the collectives at present
    backend: Any
    #: the group of torch.distributed around it
    inner: Any
    #: where its members meet, and how a backend is made there
    _store: Store
    _make: Callable[[Store, Any], Any]
    #: the group's name once it is registered
    _own_name: str

    def __init__(self, store: Store, rank: int, size: int, make: Callable[[Store, Any], Any]) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._store, self._make, self._own_name, self.backend = store, make, "", None
        self.renew(0)

    def backends(self) -> Sequence[Any]:
        """The one that is used at present."""
        return (self.backend,)

    def renew(self, generation: int) -> None:
        """Make another backend in its place; all ranks of the group call it."""
        store = PrefixStore(str(generation), self._store)
        self.backend = self._make(store, self.backend)
        on_host = isinstance(self.backend, dist.ProcessGroupGloo)
        kind = dist.ProcessGroup.BackendType.GLOO if on_host else dist.ProcessGroup.BackendType.NCCL
        self.inner = dist.ProcessGroup(store, self.rank(), self.size())
        self.inner._set_default_backend(kind)
        self.inner._register_backend(torch.device("cpu" if on_host else "cuda"), kind, self.backend)
        self.inner._set_group_name(self._own_name)

    def send_receive(self, sent: torch.Tensor, to: int, arrived: torch.Tensor, source: int) -> list[dist.Work]:
        """Send to one rank of the group and receive from another at the same time."""
        if not self.backend.supports_coalescing:
            return [self.inner.send([sent], to, 0), self.inner.recv([arrived], source, 0)]
        self.inner._start_coalescing(sent.device)
        self.inner.send([sent], to, 0)
        self.inner.recv([arrived], source, 0)
        return [self.inner._end_coalescing(sent.device)]

    # ---- what torch.distributed asks for besides

    @property
    def group_name(self) -> str:
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name
        self.inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self.inner._set_group_desc(desc)

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    def shutdown(self) -> None:
        self.backend.shutdown()


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: RenewableGroup, *args: Any, **settings: Any) -> Any:
        return getattr(self.inner, name)(*args, **settings)

    return call


_COLLECTIVES = "allreduce allgather alltoall barrier broadcast gather recv reduce scatter send"
# Three have other names in newer releases.
_RENAMED = (
    "_allgather_base alltoall_base _reduce_scatter_base all_gather_single all_to_all_single reduce_scatter_single"
)
for _name in f"{_COLLECTIVES} {_RENAMED}".split():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RenewableGroup, _name, _forwarded(_name))


def new_renewable_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup | Any:
    """`torch.distributed.new_group` over "gloo" or "nccl", for a group that can be made anew."""
    name = f"penstock_{backend}"
    if not hasattr(dist.Backend, name.upper()):
        makers = {"gloo": _make_gloo, "nccl": _make_nccl}

        def create(store: Store, rank: int, size: int, timeout: timedelta) -> RenewableGroup:
            return RenewableGroup(store, rank, size, makers[backend](rank, size, timeout))

        dist.Backend.register_backend(name, create, devices=["cpu" if backend == "gloo" else "cuda"])
    return dist.new_group(list(ranks), backend=name, timeout=timeout)


def _gloo_devices() -> list[Any]:
    """The interfaces that the environment names, as for groups of torch.distributed's own, or else the host's."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    return (
        [gloo.create_device(interface=name) for name in names.split(",")] if names else [gloo.create_default_device()]
    )


def _make_gloo(rank: int, size: int, timeout: timedelta) -> Callable[[Store, Any], Any]:
    def make(store: Store, replaced: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # Each device has a thread of its own.
        options._devices = _gloo_devices() if replaced is None else replaced.options._devices
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    return make


def _make_nccl(rank: int, size: int, timeout: timedelta) -> Callable[[Store, Any], Any]:
    def make(store: Store, replaced: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    return make


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> RenewableGroup:
    """A group on host memory among processes that meet in a store; no others of the world take part in making it."""
    return RenewableGroup(store, rank, size, _make_gloo(rank, size, timeout))
