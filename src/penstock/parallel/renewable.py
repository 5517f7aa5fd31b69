"""Communicators that can be cut, so that nobody waits in them any longer, and made anew in the same place.

A backend cannot take back what is under way. After a step that failed on some rank, each rank cuts its communicators
from another thread, which wakes the one that waits in them, and then all ranks make new ones.

gloo wakes only some of those who wait when a connection ends: whoever waits for a send that is written in part, or that
met a connection which the peer had just closed, or for a receive that is read in part, is forgotten and waits for its
whole time limit. So nobody waits for a collective of gloo without looking up now and then for the cut.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.parallel.staging import StagedTensors, StagedWork

STAGED = "staged"
"""The backend of groups whose device tensors gloo carries as copies in host memory."""

NCCL: type[Any] = getattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {}))
"""torch's NCCL; a class of no objects where torch was built without it."""
# A pending receive spins on so many of the device's multiprocessors (an H100 has 132), which no other kernel shares.
_LINK_CTAS = 4
# No message of the engine bears this tag.
_UNUSED_TAG = 0x70656E
_AT_ONCE = timedelta(milliseconds=1)
# One who waits for a collective looks up this often for a cut.
_LOOKS_UP = timedelta(seconds=0.1)
# How long a cut group's threads may take to end; one that gloo has forgotten is left behind.
_END_S = 0.5


@runtime_checkable
class Communicator(Protocol):
    """A way to other ranks that can be cut and made anew."""

    def backends(self) -> Sequence[Any]:
        """The backends of torch.distributed that it uses at present, or whatever else has an `abort`."""
        ...

    def renew(self, generation: int) -> None:
        """Make new backends in their place; blocks until all ranks that take part have called it."""
        ...


def cut_off(communicators: Sequence[Communicator]) -> None:
    """End all that is under way on this rank, with an error where it is waited for; may be called from any thread."""
    cut_backends([backend for communicator in communicators for backend in communicator.backends()])


def cut_backends(backends: Sequence[Any]) -> None:
    """End all that is under way in backends of torch.distributed, gloo's or NCCL's, or whatever else has an `abort`."""
    of_nccl = [backend for backend in backends if isinstance(backend, NCCL)]
    for backend in backends:
        if _is_gloo(backend):
            _cut_gloo(backend)
        elif not isinstance(backend, NCCL):
            backend.abort()
    # An abort of NCCL's waits for the device, where a receive of another communicator may spin: so all are aborted as
    # one, and last, for nobody on the host should wait for that.
    if of_nccl:
        of_nccl[0]._group_start()
        for backend in of_nccl:
            backend.abort()
        of_nccl[0]._group_end()


def _cut_gloo(backend: Any) -> None:
    # gloo's own abort does nothing, but a receive of what nobody sends closes all connections when it times out. If its
    # peer cuts too, it ends at once and closes none: so every peer is tried until all are closed.
    for peer in range(backend.size()):
        if peer != backend.rank():
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)


def _is_gloo(backend: Any) -> bool:
    return isinstance(backend, dist.ProcessGroupGloo)


@dataclass(eq=False)
class _Collective:
    """A collective of gloo, whose wait ends once its group has been cut, even if gloo forgets it."""

    #: the backend's handle
    work: dist.Work
    #: set when the group is cut
    is_cut: threading.Event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises: RuntimeError as the backend does, or where the group is cut and the collective does not end."""
        if timeout is not None:
            return self.work.wait(timeout)
        while True:
            was_cut = self.is_cut.is_set()
            try:
                return self.work.wait(_LOOKS_UP)
            except RuntimeError:
                if self.work.is_completed():
                    return self.work.wait()
                if was_cut:
                    raise RuntimeError("gloo has not ended a collective of a group that was cut") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class RenewableGroup(dist.ProcessGroup):
    """A process group that can be replaced inside, so that all who hold it go on with new communicators.

    `make` makes the backend, given a store and the one that it replaces (None at first). With `is_staged` that is gloo,
    which is given copies in host memory.
    """

    #: True if its collectives go over copies in host memory
    is_staged: bool = False
    #: carries the collectives at present
    backend: Any
    #: the group of torch.distributed around it
    inner: Any
    #: set when the present backend is cut
    _is_cut: threading.Event
    #: where its members meet, and how a backend is made there
    _store: Store
    _make: Callable[[Store, Any], Any]
    #: the group's name once it is registered
    _own_name: str

    def __init__(
        self, store: Store, rank: int, size: int, make: Callable[[Store, Any], Any], is_staged: bool = False
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.is_staged = is_staged
        self._store, self._make, self._own_name, self.backend = store, make, "", None
        self.renew(0)

    def backends(self) -> Sequence[Any]:
        """The backend that is used at present; of gloo's this group, whose `abort` cuts it."""
        return (self,) if _is_gloo(self.backend) else (self.backend,)

    def abort(self) -> None:
        """End all that is under way on this rank in gloo's backend."""
        self._is_cut.set()
        cut_backends((self.backend,))

    def renew(self, generation: int) -> None:
        """Make another backend in its place; all ranks of the group call it."""
        store = PrefixStore(str(generation), self._store)
        replaced = [] if self.backend is None else [self.backend, self.inner]
        self.backend, self._is_cut = self._make(store, self.backend), threading.Event()
        on_host = _is_gloo(self.backend)
        kind = dist.ProcessGroup.BackendType.GLOO if on_host else dist.ProcessGroup.BackendType.NCCL
        self.inner = dist.ProcessGroup(store, self.rank(), self.size())
        self.inner._set_default_backend(kind)
        self.inner._register_backend(torch.device("cpu" if on_host else "cuda"), kind, self.backend)
        self.inner._set_group_name(self._own_name)
        if replaced and on_host:
            # A backend that was cut is dropped once its collectives have ended: they may still add to what they were
            # given. One that gloo has forgotten does so no more, and would hold up this rank for its whole time limit.
            thread = threading.Thread(target=replaced.clear, name="penstock lets go", daemon=True)
            thread.start()
            thread.join(_END_S)

    def send_receive(self, sent: torch.Tensor, to: int, arrived: torch.Tensor, source: int) -> list[dist.Work]:
        """Send to one rank of the group and receive from another at the same time."""
        if _is_gloo(self.backend):
            # As a collective, since a wait for gloo's messages cannot look up for a cut.
            sizes = ((source, arrived.shape[0]), (to, sent.shape[0]))
            lengths = [[size if rank == peer else 0 for rank in range(self.size())] for peer, size in sizes]
            work = dist.all_to_all_single(arrived, sent, *lengths, group=self, async_op=True)
            assert work is not None
            return [work]
        return self.exchange([(sent, to)], [(arrived, source)])

    def exchange(
        self, sent: Sequence[tuple[torch.Tensor, int]], arrived: Sequence[tuple[torch.Tensor, int]]
    ) -> list[dist.Work]:
        """Send tensors to ranks of the group, and receive others, all at the same time.

        Between two ranks tensors are sent and received in one order.
        """
        on_host = _is_gloo(self.backend)
        if not on_host:
            device = (*sent, *arrived)[0][0].device
            self.inner._start_coalescing(device)
        works = [self.inner.send([tensor], rank, 0) for tensor, rank in sent]
        works += [self.inner.recv([tensor], rank, 0) for tensor, rank in arrived]
        return works if on_host else [self.inner._end_coalescing(device)]

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
        launch = getattr(self.inner, name)
        # gloo's messages end their connection when a wait for them is cut short.
        if name in ("send", "recv") or not _is_gloo(self.backend):
            return launch(*args, **settings)
        if not self.is_staged:
            return _Collective(launch(*args, **settings), self._is_cut)
        copies = StagedTensors(args)
        return StagedWork(_Collective(launch(*copies.arguments, **settings), self._is_cut), copies)

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
    """`torch.distributed.new_group` over "gloo", "nccl" or `STAGED`, for a group that can be made anew."""
    name = f"penstock_{backend}"
    if not hasattr(dist.Backend, name.upper()):

        def create(store: Store, rank: int, size: int, timeout: timedelta) -> RenewableGroup:
            return RenewableGroup(store, rank, size, _maker(backend, rank, size, timeout), backend == STAGED)

        dist.Backend.register_backend(name, create, devices=["cpu" if backend == "gloo" else "cuda"])
    return dist.new_group(list(ranks), backend=name, timeout=timeout)


def _maker(backend: str, rank: int, size: int, timeout: timedelta) -> Callable[[Store, Any], Any]:
    """Make backends, given a store and the one that is replaced (None at first)."""

    def make(store: Store, replaced: Any) -> Any:
        if backend == "nccl":
            return NCCL(store, rank, size, nccl_options(timeout))
        kind: Any = dist.ProcessGroupGloo
        gloo = kind._Options()
        if replaced is not None:
            # Each device has a thread of its own.
            gloo._devices = replaced.options._devices
        elif names := os.environ.get("GLOO_SOCKET_IFNAME"):
            # The interfaces that the environment names, as for groups of torch.distributed's own.
            gloo._devices = [kind.create_device(interface=name) for name in names.split(",")]
        else:
            gloo._devices = [kind.create_default_device()]
        gloo._timeout = timeout
        return kind(store, rank, size, gloo)

    return make


def nccl_options(timeout: timedelta, is_link: bool = False) -> Any:
    """Options of a communicator of NCCL's.

    is_link: it carries messages of a pipeline. Its receives are posted ahead of their messages, so they may take but a
    few of the device's multiprocessors; and its kernels go before others, since some rank waits for what they carry.
    """
    # At its time limit torch would abort communicators one by one, and end a process before it can say where it is.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = NCCL.Options()
    options._timeout = timeout
    if is_link:
        options.is_high_priority_stream = True
        options.config.min_ctas, options.config.max_ctas = 1, _LINK_CTAS
    return options


def group_at(store: Store, rank: int, size: int, timeout: timedelta, backend: str = "gloo") -> RenewableGroup:
    """A group among processes that meet in a store; no others of the world take part in making it."""
    return RenewableGroup(store, rank, size, _maker(backend, rank, size, timeout))
