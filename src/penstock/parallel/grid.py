"""The process groups of a layout; they are passed to the code that needs them, never looked up."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from penstock.parallel.device import agree_on_device
from penstock.parallel.host import ProcessEnded, gather_json, refuse_other_software
from penstock.parallel.renewable import STAGED, RenewableGroup, cut_backends, new_renewable_group
from penstock.parallel.staging import is_staged
from penstock.settings import Coordinates, Device, Groups, Layout, TransportKind

# In the store, how often each rank has met the others.
_MEETINGS = "penstock/meetings"
# How many layouts each has connected.
_ENGINES = "penstock/engines"

OUTSIDE = -1
"""The rank of a process on which a layout has none."""


def world_ranks(layout: Layout) -> Sequence[int]:
    """The processes of the world on which a layout lies, by its ranks."""
    return range(layout.world_size) if layout.ranks is None else layout.ranks


def own_world_rank() -> int:
    """This process among all of the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def connect(
    layout: Layout, wanted: Device, timeout: datetime.timedelta | None = None, transport: TransportKind = "auto"
) -> Grid:
    """Make this process's groups; every process of the world calls this at the same point, with equal layouts.

    A process that is not among the layout's ranks takes part as well, but gets no group and no device but the CPU.
    torch.distributed has been initialised by the caller, except in a world of one process, which needs none.
    `timeout` bounds every later collective of these groups (None: torch's default), except in the background,
    where one rank may wait for another's disk.

    Raises: ValueError when the layout does not fit the world, or another rank has another one, or another version of
        Penstock or torch, or as `agree_on_device` does for the device that is `wanted`.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size > world_size == 1 and os.environ.get("WORLD_SIZE", "1") == str(layout.world_size):
        raise ValueError(
            f"the layout {layout} needs {layout.world_size} processes, which have not met; call "
            "torch.distributed.init_process_group() first"
        )
    layout.check(world_size)
    if world_size == 1:
        return Grid(layout, agree_on_device(wanted, None, 0, transport), rank=0)
    ranks, everyone = world_ranks(layout), (tuple(range(layout.world_size)),)
    rank = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else OUTSIDE
    wait_for_all(timeout)
    number = dist.distributed_c10d._get_default_store().add(f"{_ENGINES}/{dist.get_rank()}", 1)
    # Every rank makes all groups of the world in one order and uses each immediately: communicators that are made on
    # first use would wait for each other in whatever order the ranks arrive.
    host = torch.device("cpu")
    on_host = functools.partial(_connected, rank, ranks, "gloo", host, timeout)
    control = on_host(everyone)
    refuse_other_software(control)
    _refuse_other_layouts(layout, control)
    device = host if rank == OUTSIDE else agree_on_device(wanted, control, rank, transport)
    on_device = functools.partial(_connected, rank, ranks, _backend(device, transport), device, timeout)
    pp_control = on_host(layout.groups("pp"))
    known = {everyone: control, layout.groups("pp"): pp_control}
    for groups in (layout.groups("pp", "cp", "tp"), layout.model_copies()):
        if groups not in known:
            known[groups] = on_host(groups)
    groups_on_device = device_groups(layout, lambda groups, axes: on_device(groups))
    return Grid(
        layout,
        device,
        rank,
        number,
        is_staged=is_staged(device, transport),
        control=control,
        background=_connected(rank, ranks, "gloo", host, None, everyone),
        pp_control=pp_control,
        batch_control=known[layout.groups("pp", "cp", "tp")],
        model_control=known[layout.model_copies()],
        **groups_on_device,
    )


def device_groups(layout: Layout, group: Callable[[Groups, str], dist.ProcessGroup | None]) -> dict[str, Any]:
    """The groups of a `Grid` for tensors of its device, by their fields, all made in one order.

    group: makes this rank's of some groups, given the axes along which they lie in words.
    """
    dp_cp_group = group(layout.groups("dp", "cp"), "dp,cp")
    return {
        "dp_cp_group": dp_cp_group,
        "tp_group": group(layout.groups("tp"), "tp"),
        "cp_group": group(layout.groups("cp"), "cp"),
        "ep_group": group(layout.expert_groups(), "ep"),
        "edp_group": dp_cp_group if layout.ep == 1 else group(layout.expert_copies(), "dp,cp / ep"),
        "mirror_group": group(mirrored(layout.groups("pp")), "pp"),
    }


def _backend(device: torch.device, transport: TransportKind) -> str:
    """The backend of groups for the tensors of this device."""
    if is_staged(device, transport):
        return STAGED
    return "nccl" if device.type == "cuda" else "gloo"


def _refuse_other_layouts(layout: Layout, control: dist.ProcessGroup | None) -> None:
    views = gather_json(str(layout), control)
    if other := next((other for other, view in enumerate(views) if view != views[0]), None):
        raise ValueError(f"rank 0 was given {views[0]}, but rank {other} {views[other]}; give all ranks the same")


def wait_for_all(timeout: datetime.timedelta | None = None) -> None:
    """Wait until all processes have come here, where gloo carries their first group's host memory: it sees one's end.

    Making another group would wait for that one until the time is up. All come here equally often.

    Raises: ProcessEnded naming a rank that has ended, or has not come in time.
    """
    if "cpu:gloo" not in dist.get_backend_config():
        return
    group = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()
    meeting = store.add(f"{_MEETINGS}/{dist.get_rank()}", 1)
    try:
        # Torch's function of that name refuses a group that has NCCL beside gloo.
        group.monitored_barrier(timeout or dist.default_pg_timeout, False)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        # The first rank alone sees at once that another has ended; the rest wait for its word, as long as it lives.
        cut_backends([group._get_backend(torch.device("cpu"))])
        late = "another rank"
        # The store ends with the process that holds it.
        with contextlib.suppress(RuntimeError):
            counts = {rank: store.add(f"{_MEETINGS}/{rank}", 0) for rank in range(dist.get_world_size())}
            late = next((f"rank {rank}" for rank, count in counts.items() if count < meeting), late)
        raise ProcessEnded(
            f"{late} has ended, or has not reached the construction of the engine in time; its own output says why"
        ) from error


@dataclass(frozen=True, eq=False)
class Grid:
    """One rank's place in a connected layout, and its groups; a group is None if the rank would be alone in it."""

    #: the sizes of the grid's axes
    layout: Layout
    #: the device on which this rank computes, and whose tensors the groups below are for
    device: torch.device
    #: this process among those of the layout; OUTSIDE if it is none of them
    rank: int
    #: of the layouts that the world has connected, which; the same on all its processes
    number: int = 0
    #: True if the device's tensors travel through host memory
    is_staged: bool = False

    # -- on host memory
    #: all ranks
    control: dist.ProcessGroup | None = None
    #: all ranks again, for a background thread, since two threads must not share a group
    background: dist.ProcessGroup | None = None
    #: the ranks of this pipeline
    pp_control: dist.ProcessGroup | None = None
    #: the ranks that get the same batch; they differ in pp, cp and tp
    batch_control: dist.ProcessGroup | None = None
    #: the ranks that together hold one copy of the model
    model_control: dist.ProcessGroup | None = None

    # -- on device tensors
    #: the ranks that share layers, in order of place
    tp_group: dist.ProcessGroup | None = None
    #: the ranks that share sequences, in order of place
    cp_group: dist.ProcessGroup | None = None
    #: the ranks that share experts, in order of place
    ep_group: dist.ProcessGroup | None = None
    #: the ranks that hold the same parameters and see different tokens; gradients are summed over them
    dp_cp_group: dist.ProcessGroup | None = None
    #: the ranks that hold the same experts; the experts' gradients are summed over them
    edp_group: dist.ProcessGroup | None = None
    #: this rank of the pipeline and the one as far from its other end (first and last, second and last but one, ...):
    #: they hold the copies of tied weights, and of a bidirectional model's stages
    mirror_group: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Destroy the groups once they are unused; all ranks call it. Each costs gloo a thread until then."""
        groups = (getattr(self, part.name) for part in fields(self))
        for group in {id(group): group for group in groups if isinstance(group, dist.ProcessGroup)}.values():
            dist.destroy_process_group(group)

    def renewable(self) -> list[RenewableGroup]:
        """The groups, all but the background's, in one order on all ranks; each group once."""
        groups = [getattr(self, part.name) for part in fields(self) if part.name != "background"]
        return list({id(group): group for group in groups if isinstance(group, RenewableGroup)}.values())

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_first_of_stages(self) -> bool:
        """True on the first of all ranks that have these stages, or shards of their layers."""
        return self.dp_rank == self.cp_rank == self.tp_rank == 0

    @functools.cached_property
    def place(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @functools.cached_property
    def pp_rank(self) -> int:
        return self.place.pp

    @functools.cached_property
    def dp_rank(self) -> int:
        return self.place.dp

    @functools.cached_property
    def cp_rank(self) -> int:
        return self.place.cp

    @functools.cached_property
    def tp_rank(self) -> int:
        return self.place.tp

    @functools.cached_property
    def ep_rank(self) -> int:
        return self.layout.group_of(self.rank, "dp", "cp").index(self.rank) % self.layout.ep

    @functools.cached_property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline, in pipeline order."""
        return self.layout.group_of(self.rank, "pp")


def mirrored(pipelines: Groups) -> Groups:
    """The pairs of ranks that lie opposite each other, pipeline by pipeline, from the ends inwards."""
    return tuple(
        pair for ranks in pipelines for pair in list(zip(ranks, reversed(ranks), strict=True))[: len(ranks) // 2]
    )


def _connected(
    rank: int,
    world_ranks: Sequence[int],
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta | None,
    groups: Groups,
) -> dist.ProcessGroup | None:
    """Make every group of one kind; return the one that this rank is in, after a first collective through it.

    `rank` is this one's in the layout, `world_ranks` are the world's numbers of the layout's ranks. A group of a single
    rank is not made, since each costs gloo a thread.
    """
    mine = None
    for ranks in groups:
        if len(ranks) < 2:
            continue
        group = new_renewable_group([world_ranks[r] for r in ranks], backend, timeout)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    if mine is not None:
        dist.all_reduce(torch.ones(1, device=device), group=mine)
    return mine
