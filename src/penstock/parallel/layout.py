"""The process grid: which rank sits where (`Layout`, arithmetic) and the groups it talks in (`Grid`).

Neither is ever a module global: whoever needs a group is given it.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

AXES = ("dp", "pp")


class Coordinates(NamedTuple):
    """A rank's place on every axis."""

    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid's axes and their order, slowest first: by default rank = dp_rank * pp + pp_rank.

    pp: ranks of one pipeline. dp: pipelines that train the same model on different data.

    Raises: ValueError for a size below one, or an order that does not name each axis once.
    """

    pp: int = 1
    dp: int = 1
    order: tuple[str, ...] = field(default=AXES, kw_only=True)

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout: {axis} must be a whole number of at least 1, not {size!r}")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"layout: the order must name each of {', '.join(AXES)} once, not {self.order!r}")

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """Give the place of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout {self} of {self.world_size} ranks")
        places = {}
        for axis in reversed(self.order):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**places)

    def rank_of(self, *, dp: int = 0, pp: int = 0) -> int:
        """Give the global rank at a place."""
        places, rank = {"dp": dp, "pp": pp}, 0
        for axis in self.order:
            size = getattr(self, axis)
            if not 0 <= places[axis] < size:
                raise ValueError(f"{axis} rank {places[axis]} is outside the layout {self}")
            rank = rank * size + places[axis]
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Give the global ranks of every group along an axis: those that differ in this axis alone.

        Members stand in the order of that axis, groups in the order of their first members.
        """
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; there are {', '.join(AXES)}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)._asdict()
            place.pop(axis)
            members.setdefault(tuple(place.values()), []).append(rank)
        return tuple(sorted(tuple(ranks) for ranks in members.values()))

    def check(self, world_size: int) -> None:
        """Refuse a number of processes that the layout does not fill exactly.

        Raises: ValueError naming every size, and the layouts that would fit, nearest first.
        """
        if world_size == self.world_size:
            return
        fitting = [Layout(pp, world_size // pp) for pp in range(1, world_size + 1) if world_size % pp == 0]
        fitting.sort(key=lambda other: abs(math.log(other.pp / self.pp)) + abs(math.log(other.dp / self.dp)))
        raise ValueError(
            f"the layout {self} needs {self.world_size} processes, but there are {world_size}; "
            f"{world_size} would fit {', or '.join(str(other) for other in fitting)}"
        )

    def connect(self, device: torch.device, timeout: datetime.timedelta | None = None) -> Grid:
        """Make this process's groups; every process of the world calls this at the same point, with equal layouts.

        torch.distributed has been initialised by the caller, except in a world of one process, which needs none.
        `timeout` bounds every later collective of these groups (None: torch's default), except in the background,
        where one rank may wait for another's disk.

        Raises: ValueError when the layout does not fit the world.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.check(world_size)
        if world_size == 1:
            return Grid(self, device, rank=0)
        rank, everyone = dist.get_rank(), tuple(range(world_size))
        on_device = "nccl" if device.type == "cuda" else "gloo"
        # All groups of the world in one order on every rank, each used once at once: communicators that are made
        # on first use wait for each other in whatever order the ranks happen to come.
        makers = _GroupMaker(rank, timeout)
        return Grid(
            self,
            device,
            rank,
            control=makers.make([everyone], "gloo", torch.device("cpu")),
            background=_GroupMaker(rank, None).make([everyone], "gloo", torch.device("cpu")),
            pp_control=makers.make(self.groups("pp"), "gloo", torch.device("cpu")),
            dp_group=makers.make(self.groups("dp"), on_device, device),
            mirror_group=makers.make(_mirrored(self.groups("pp")), on_device, device),
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """One rank's place in a connected layout, and its groups; a group is None where the rank would be alone in it.

    dp_group: the same place in every pipeline, carries device tensors (gradient reduction).
    mirror_group: this rank of the pipeline and the one as far from its other end (first and last, second and last but
    one, ...), carries device tensors: they hold the copies of tied weights, and of a bidirectional model's stages.
    control: all ranks, host memory. background: the same again for a thread beside the main one, since two threads
    may not share a group. pp_control: this pipeline's ranks, host memory.
    """

    layout: Layout
    device: torch.device
    rank: int
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None
    pp_control: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    mirror_group: dist.ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def pp_rank(self) -> int:
        return self.layout.coordinates(self.rank).pp

    @property
    def dp_rank(self) -> int:
        return self.layout.coordinates(self.rank).dp

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline, in pipeline order."""
        return tuple(self.layout.rank_of(dp=self.dp_rank, pp=pp) for pp in range(self.layout.pp))


def _mirrored(pipelines: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The pairs of ranks that lie opposite each other, pipeline by pipeline, from the ends inwards."""
    return [pair for ranks in pipelines for pair in list(zip(ranks, reversed(ranks), strict=True))[: len(ranks) // 2]]


@dataclass(frozen=True)
class _GroupMaker:
    rank: int
    timeout: datetime.timedelta | None

    def make(
        self, groups: list[tuple[int, ...]] | tuple[tuple[int, ...], ...], backend: str, device: torch.device
    ) -> dist.ProcessGroup | None:
        """Make every group of one kind and return the one this rank is in, after a first collective through it."""
        mine = None
        for ranks in groups:
            if len(set(ranks)) < 2:
                continue
            group = dist.new_group(list(ranks), backend=backend, timeout=self.timeout)
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
        if mine is not None:
            dist.all_reduce(torch.ones(1, device=device), group=mine)
        return mine
