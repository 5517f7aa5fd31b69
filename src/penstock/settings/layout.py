"""The process grid as arithmetic: the sizes of its axes, the place of each rank, and the groups of ranks."""

import itertools
import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from penstock.settings.declare import (
    Bounds,
    ConfigError,
    NamedValue,
    Settings,
    argument,
    refuse_divisor,
    setting,
)

AXES = ("dp", "pp", "cp", "tp")
# More than any machine has, and few enough to list their groups.
_PROCESSES = Bounds(least=1, limit=2**20)
# Processes cannot even greet each other in much less than a second. A clock counts nanoseconds in 64 bits: 68 years.
_TIMEOUT = Bounds(least=1, limit=2**31 - 1)

Groups = tuple[tuple[int, ...], ...]
Device = Literal["auto", "cpu", "cuda"]
TransportKind = Literal["auto", "host"]


class ContextForm(NamedValue):
    """The exchange between ranks that share sequences.

    RING: keys and values go round; works for any number of heads. ALL_TO_ALL: every rank gets all tokens of some heads
    and sends its own tokens of the others; fewer and larger messages, if the ranks divide the heads.

    >>> EngineOptions(attention="all-to-all").attention is ContextForm.ALL_TO_ALL
    True
    """

    RING = "ring"
    ALL_TO_ALL = "all-to-all"


class Coordinates(NamedTuple):
    """A rank's place on every axis."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in zip(self._fields, self, strict=True))


@dataclass(frozen=True)
class Layout(Settings, section="parallel"):
    """Sizes of the grid's axes and their order; by default the ranks of a tp group are neighbours.

    An ep group consists of consecutive ranks among those that differ only in dp and cp, so ep adds no ranks.
    `ranks`, such as `range(2, 4)`, are the processes of the world on which the grid lies, None for all: so engines can
    live on different processes of one script. Everywhere else a rank is counted among those of the grid.

    Raises: ConfigError for sizes, an order or ranks that cannot be.

    >>> layout = Layout(pp=2, dp=2)
    >>> layout.world_size, str(layout.coordinates(3)), layout.groups("pp")
    (4, 'dp 1, pp 1, cp 0, tp 0', ((0, 1), (2, 3)))
    """

    pp: int = setting(1, "Pipeline ranks.", _PROCESSES)
    dp: int = setting(1, "Data-parallel ranks, each with a copy of the model and its own data.", _PROCESSES)
    cp: int = setting(1, "Context-parallel ranks, which share every sequence's tokens.", _PROCESSES)
    tp: int = setting(1, "Tensor-parallel ranks, which share every layer.", _PROCESSES)
    ep: int = setting(
        1,
        "Ranks that share every layer's experts; they are among those of dp and cp, so it divides dp * cp.",
        _PROCESSES,
    )
    order: str = setting(
        "-".join(AXES),
        "Numbering of the ranks along these axes, the last one fastest: ranks of one machine have adjacent numbers.",
    )
    ranks: tuple[int, ...] | range | None = argument(None, Bounds(least=0, limit=2**20))

    def _check(self) -> None:
        if sorted(self.axes) != sorted(AXES):
            raise ConfigError(
                f"parallel.order = {self.order!r} must name each of dp, pp, cp and tp once, such as dp-pp-cp-tp"
            )
        if self.world_size > (limit := _PROCESSES.limit or 0):
            raise ConfigError(f"{self.product} is {self.world_size} processes; at most {limit} are possible")
        refuse_divisor("parallel.ep", self.ep, "parallel.dp x parallel.cp", self.dp * self.cp)
        if self.ranks is not None and (len(self.ranks), list(self.ranks)) != (self.world_size, sorted(set(self.ranks))):
            raise ConfigError(f"{self} must name {self.world_size} ranks, ascending, such as range(2, 4)")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in their order, slowest first."""
        return tuple(self.order.split("-"))

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name; their product is the number of processes."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Processes of the grid."""
        return math.prod(self.sizes.values())

    @property
    def num_device_groups(self) -> int:
        """The groups of ranks, beside those of its pipeline, with which a rank exchanges tensors of its device."""
        return sum(size > 1 for size in (self.dp * self.cp, self.cp, self.tp, self.ep))

    @property
    def product(self) -> str:
        """The axes' sizes as settings: ``parallel.dp = 2 x parallel.pp = 4 x ...``."""
        return " x ".join(f"parallel.{axis} = {size}" for axis, size in self.sizes.items())

    @property
    def shares_layers(self) -> bool:
        """True if ranks work on a layer together, and so communicate within it."""
        return self.tp > 1 or self.cp > 1 or self.ep > 1

    def __str__(self) -> str:
        text = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        text = text if self.ep == 1 else f"{text} (ep={self.ep})"
        return text if self.ranks is None else f"{text} on ranks {', '.join(map(str, self.ranks))}"

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout {self} of {self.world_size} ranks")
        places = {}
        for axis in reversed(self.axes):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**places)

    def rank_of(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global rank at a place."""
        places, rank = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}, 0
        for axis in self.axes:
            size = getattr(self, axis)
            if not 0 <= places[axis] < size:
                raise ValueError(f"{axis} rank {places[axis]} is outside the layout {self}")
            rank = rank * size + places[axis]
        return rank

    def groups(self, *axes: str) -> Groups:
        """The global ranks of every group along some axes, whose ranks differ only in these axes.

        Members are sorted, and groups by their first members.
        """
        others = [axis for axis in AXES if axis not in axes]
        members = self.offsets(*axes)
        return tuple(tuple(first + member for member in members) for first in self.offsets(*others))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks of one group along some axes, that of `rank`, sorted."""
        place = self.coordinates(rank)._asdict()
        first = self.rank_of(**{axis: 0 if axis in axes else place[axis] for axis in AXES})
        return tuple(first + member for member in self.offsets(*axes))

    def stride(self, axis: str) -> int:
        """The distance of ranks that are neighbours on an axis."""
        return math.prod(getattr(self, later) for later in self.axes[self.axes.index(axis) + 1 :])

    def offsets(self, *axes: str) -> list[int]:
        """The numbers of the ranks whose place on all other axes is 0, sorted."""
        places = ([self.stride(axis) * place for place in range(getattr(self, axis))] for axis in axes)
        return sorted(map(sum, itertools.product(*places)))

    def expert_groups(self) -> Groups:
        """The groups of ranks that together hold one copy of a layer's experts."""
        starts = range(0, self.dp * self.cp, self.ep)
        return tuple(sorted(r[start : start + self.ep] for r in self.groups("dp", "cp") for start in starts))

    def expert_copies(self) -> Groups:
        """The groups of ranks that hold the same experts, over which experts' gradients are summed."""
        return tuple(sorted(ranks[place :: self.ep] for ranks in self.groups("dp", "cp") for place in range(self.ep)))

    def model_copies(self) -> Groups:
        """The groups of ranks that together hold one copy of the whole model, experts included."""
        by_copy = (
            chain(*(ranks[start : start + self.ep] for ranks in self.groups("dp", "cp")))
            for start in range(0, self.dp * self.cp, self.ep)
        )
        return tuple(sorted(tuple(sorted(ranks)) for ranks in by_copy))

    def check(self, world_size: int) -> None:
        """Refuse a number of processes that the layout does not fill exactly.

        Raises: ConfigError naming every size.
        """
        if self.ranks is not None:
            if self.ranks[-1] >= world_size:
                raise ConfigError(
                    f"the layout {self} names rank {self.ranks[-1]}, but there are {world_size} processes"
                )
        elif world_size != self.world_size:
            raise ConfigError(
                f"the layout {self} needs {self.world_size} processes, but there are {world_size}; start as many, or "
                f"let {' x '.join(AXES)} be {world_size}"
            )


@dataclass(frozen=True)
class ParallelConfig(Layout, section="parallel"):
    """The grid of processes.

    >>> ParallelConfig(pp=2, dp=2, device="cpu").world_size
    4
    """

    attention: ContextForm = setting(
        ContextForm.RING,
        'Exchange between cp ranks: keys and values go round a "ring", or heads are exchanged "all-to-all".',
    )
    device: Device = setting("auto", '"auto" takes GPUs where each rank finds one of its own, else the CPU for all.')
    transport: TransportKind = setting(
        "auto", '"host" sends the tensors of GPUs through host memory: slower, but ranks may share one.'
    )
    num_threads: int = setting(1, "CPU threads of a rank.", Bounds(least=1, limit=2**12))
    timeout_s: float = setting(
        600.0,
        "Seconds that a rank waits for a peer before it reports the failure and ends.",
        _TIMEOUT,
    )
    shutdown_timeout_s: float = setting(
        600.0,
        "Seconds that a run which is asked to end (SIGTERM, Ctrl-C) has to finish its step and save; then it ends "
        "without, and the newest checkpoint is the one before.",
        _TIMEOUT,
    )
    elastic: bool = setting(False, "Run on as many pipelines as the group of processes has room for, regardless of dp.")
