"""The process grid: which rank sits where (`Layout`, arithmetic) and the groups it talks in (`Grid`).

Neither is ever a module global: whoever needs a group is given it.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
import torch.distributed as dist

AXES = ("dp", "pp", "cp", "tp")
_NUM_OFFERED = 5

Groups = tuple[tuple[int, ...], ...]


class Coordinates(NamedTuple):
    """A rank's place on every axis."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in zip(self._fields, self, strict=True))


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid's axes and their order, slowest first: by default the ranks of a tp group are neighbours.

    pp: ranks of one pipeline. dp: copies of the model that train on different data. cp: ranks that share each
    sequence's tokens. tp: ranks that share each layer. ep: ranks that share each layer's experts; they are consecutive
    ones of those that differ in dp and cp alone, so ep adds no ranks and divides dp * cp.

    Raises: ValueError for a size below one, an ep that does not divide dp * cp, or an order that does not name each
    axis once.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    order: tuple[str, ...] = field(default=AXES, kw_only=True)

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout: {axis} must be a whole number of at least 1, not {size!r}")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"layout: the order must name each of {', '.join(AXES)} once, not {self.order!r}")
        if (self.dp * self.cp) % self.ep:
            possible = ", ".join(map(str, _divisors(self.dp * self.cp)))
            raise ValueError(
                f"layout: ep={self.ep} does not divide dp={self.dp} x cp={self.cp}, the ranks that share experts; "
                f"possible are {possible}"
            )

    @property
    def world_size(self) -> int:
        return math.prod(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def shares_layers(self) -> bool:
        """Whether ranks work on a layer together, and so talk to each other within it."""
        return self.tp > 1 or self.cp > 1 or self.ep > 1

    def __str__(self) -> str:
        text = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, self._sizes, strict=True))
        return text if self.ep == 1 else f"{text} (ep={self.ep})"

    def coordinates(self, rank: int) -> Coordinates:
        """Give the place of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout {self} of {self.world_size} ranks")
        places = {}
        for axis in reversed(self.order):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**places)

    def rank_of(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Give the global rank at a place."""
        places, rank = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}, 0
        for axis in self.order:
            size = getattr(self, axis)
            if not 0 <= places[axis] < size:
                raise ValueError(f"{axis} rank {places[axis]} is outside the layout {self}")
            rank = rank * size + places[axis]
        return rank

    def groups(self, *axes: str) -> Groups:
        """Give the global ranks of every group along some axes: those that differ in these axes alone.

        Members stand in order, and so do groups by their first members.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"unknown axis {axis!r}; there are {', '.join(AXES)}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)._asdict()
            members.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return tuple(sorted(tuple(ranks) for ranks in members.values()))

    def expert_groups(self) -> Groups:
        """Give the groups of ranks that hold one copy of a layer's experts between them."""
        starts = range(0, self.dp * self.cp, self.ep)
        return tuple(sorted(r[start : start + self.ep] for r in self.groups("dp", "cp") for start in starts))

    def expert_copies(self) -> Groups:
        """Give the groups of ranks that hold the same experts: over them experts' gradients are summed."""
        return tuple(sorted(ranks[place :: self.ep] for ranks in self.groups("dp", "cp") for place in range(self.ep)))

    def model_copies(self) -> Groups:
        """Give the groups of ranks that hold one copy of the whole model between them, experts included."""
        copies: list[list[int]] = [[] for _ in range(self.dp * self.cp // self.ep)]
        for ranks in self.groups("dp", "cp"):
            for place, rank in enumerate(ranks):
                copies[place // self.ep].append(rank)
        return tuple(sorted(tuple(sorted(ranks)) for ranks in copies))

    def check(self, world_size: int) -> None:
        """Refuse a number of processes that the layout does not fill exactly.

        Raises: ValueError naming every size, and the nearest of the layouts that would fit.
        """
        if world_size == self.world_size:
            return
        offered = itertools.islice(self.fitting(world_size), _NUM_OFFERED)
        raise ValueError(
            f"the layout {self} needs {self.world_size} processes, but there are {world_size}; "
            f"{world_size} would fit {', or '.join(str(other) for other in offered)}"
        )

    def fitting(self, world_size: int) -> Iterator[Layout]:
        """Give the layouts of so many processes, those that differ least from this one first."""
        found = []
        for sizes in _factors(world_size, len(AXES)):
            by_axis = dict(zip(AXES, sizes, strict=True))
            ep = max(ep for ep in _divisors(by_axis["dp"] * by_axis["cp"]) if ep <= self.ep)
            found.append(Layout(**by_axis, ep=ep, order=self.order))
        yield from sorted(found, key=self._distance)

    def _distance(self, other: Layout) -> tuple[float, ...]:
        """How far the sizes lie from each other, in doublings; of equal ones those come first that keep tp, cp, pp."""
        *steps, of_ep = [
            abs(math.log2(getattr(other, axis) / getattr(self, axis))) for axis in ("tp", "cp", "pp", "dp", "ep")
        ]
        return (round(sum(steps), 9), *steps, of_ep)

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
        rank, everyone = dist.get_rank(), (tuple(range(world_size)),)
        # All groups of the world in one order on every rank, each used once at once: communicators that are made
        # on first use wait for each other in whatever order the ranks happen to come.
        on_device = _GroupMaker(rank, "nccl" if device.type == "cuda" else "gloo", device, timeout)
        on_host = _GroupMaker(rank, "gloo", torch.device("cpu"), timeout)
        control, pp_control = on_host.make(everyone), on_host.make(self.groups("pp"))
        known = {everyone: control, self.groups("pp"): pp_control}
        for groups in (self.groups("pp", "cp", "tp"), self.model_copies()):
            if groups not in known:
                known[groups] = on_host.make(groups)
        dp_cp_group = on_device.make(self.groups("dp", "cp"))
        return Grid(
            self,
            device,
            rank,
            control=control,
            background=_GroupMaker(rank, "gloo", torch.device("cpu"), None).make(everyone),
            pp_control=pp_control,
            batch_control=known[self.groups("pp", "cp", "tp")],
            model_control=known[self.model_copies()],
            tp_group=on_device.make(self.groups("tp")),
            cp_group=on_device.make(self.groups("cp")),
            ep_group=on_device.make(self.expert_groups()),
            dp_cp_group=dp_cp_group,
            edp_group=dp_cp_group if self.ep == 1 else on_device.make(self.expert_copies()),
            mirror_group=on_device.make(_mirrored(self.groups("pp"))),
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """One rank's place in a connected layout, and its groups; a group is None where the rank would be alone in it.

    On device tensors:
    tp_group, cp_group, ep_group: those that share layers, sequences, or experts with this rank, in order of place.
    dp_cp_group: those that hold the same parameters and see other tokens; gradients are summed over it.
    edp_group: those that hold the same experts; the experts' gradients are summed over it.
    mirror_group: this rank of the pipeline and the one as far from its other end (first and last, second and last but
    one, ...): they hold the copies of tied weights, and of a bidirectional model's stages.

    On host memory:
    control: all ranks. background: the same again for a thread beside the main one, since two threads may not share a
    group. pp_control: this pipeline's ranks. batch_control: the ranks that are given the same batch, those that differ
    in pp, cp and tp. model_control: the ranks that hold a copy of the model between them.
    """

    layout: Layout
    device: torch.device
    rank: int
    control: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None
    pp_control: dist.ProcessGroup | None = None
    batch_control: dist.ProcessGroup | None = None
    model_control: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    dp_cp_group: dist.ProcessGroup | None = None
    edp_group: dist.ProcessGroup | None = None
    mirror_group: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Let go of the groups, which nobody uses any more; all ranks call it. Each costs gloo a thread until then."""
        groups = (getattr(self, part.name) for part in fields(self))
        for group in {id(group): group for group in groups if isinstance(group, dist.ProcessGroup)}.values():
            dist.destroy_process_group(group)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def place(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def pp_rank(self) -> int:
        return self.place.pp

    @property
    def dp_rank(self) -> int:
        return self.place.dp

    @property
    def cp_rank(self) -> int:
        return self.place.cp

    @property
    def tp_rank(self) -> int:
        return self.place.tp

    @property
    def ep_rank(self) -> int:
        return next(ranks for ranks in self.layout.expert_groups() if self.rank in ranks).index(self.rank)

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline, in pipeline order."""
        return next(ranks for ranks in self.layout.groups("pp") if self.rank in ranks)


def _mirrored(pipelines: Groups) -> Groups:
    """The pairs of ranks that lie opposite each other, pipeline by pipeline, from the ends inwards."""
    return tuple(
        pair for ranks in pipelines for pair in list(zip(ranks, reversed(ranks), strict=True))[: len(ranks) // 2]
    )


@dataclass(frozen=True)
class _GroupMaker:
    """Makes groups of one backend; those of a single rank are left out, since each costs gloo a thread."""

    rank: int
    backend: str
    device: torch.device
    timeout: datetime.timedelta | None

    def make(self, groups: Groups) -> dist.ProcessGroup | None:
        """Make every group of one kind and return the one this rank is in, after a first collective through it."""
        mine = None
        for ranks in groups:
            if len(ranks) < 2:
                continue
            group = dist.new_group(list(ranks), backend=self.backend, timeout=self.timeout)
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
        if mine is not None:
            dist.all_reduce(torch.ones(1, device=self.device), group=mine)
        return mine


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of so many factors."""
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for others in _factors(number // first, count - 1):
            yield (first, *others)
