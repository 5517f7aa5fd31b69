"""The placement of a model's stages on ranks, with each stage's neighbours."""

from dataclasses import dataclass
from enum import Enum


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return the value if it is a whole number of at least `least`.

    Raises: ValueError naming the setting, the value and the least possible one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


class PlacementKind(Enum):
    """The ways to assign stages to ranks.

    `LOOP`: stage s on rank s mod p. `V`: up the ranks and back down. `BIDIRECTIONAL`: two copies of the model, two
    *routes* of stages; the first copy's stages run up the ranks, the second copy's (numbered after them) run down. With
    `MAP` any rank has any stages, and as many as it is given.

    >>> [Placement(PlacementKind.V, num_ranks=2, stages_per_rank=2).rank_of(stage) for stage in range(4)]
    [0, 1, 1, 0]
    """

    LOOP = "loop"
    V = "v"
    BIDIRECTIONAL = "bidirectional"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class Placement:
    """The assignment of stages to ranks, with each stage's neighbours.

    >>> placement = Placement(PlacementKind.LOOP, num_ranks=2, stages_per_rank=2)
    >>> placement.num_stages, placement.stages_of(1), placement.output_rank
    (4, (1, 3), 1)

    `kind` may also be given by its name. A map has `homes`, the rank of each stage; its `stages_per_rank` is the most
    that a rank has:

    >>> Placement(PlacementKind.MAP, num_ranks=3, homes=(0, 1, 1, 2, 0)).stages_per_rank
    2

    Raises: ValueError for another kind, counts below one, an odd number of stages a rank when there are two routes,
        or a map that leaves out a rank.
    """

    kind: PlacementKind
    num_ranks: int
    stages_per_rank: int = 1
    homes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in list(PlacementKind):
            possible = [kind.value for kind in PlacementKind]
            if self.kind not in possible:
                raise ValueError(f"there is no placement {self.kind!r}; possible are {', '.join(possible)}")
            object.__setattr__(self, "kind", PlacementKind(self.kind))
        check_count("ranks", self.num_ranks)
        if (self.kind is PlacementKind.MAP) != bool(self.homes):
            raise ValueError("a map, and nothing else, is given the rank of each stage, as in [0, 1, 1, 0]")
        if self.homes:
            if len(self.homes) < self.num_ranks or set(self.homes) != set(range(self.num_ranks)):
                raise ValueError(
                    f"the map {list(self.homes)} must give a stage to each of the ranks 0 to {self.num_ranks - 1} alone"
                )
            object.__setattr__(self, "stages_per_rank", max(map(self.homes.count, set(self.homes))))
        check_count("stages_per_rank", self.stages_per_rank)
        if self.stages_per_rank % self.num_routes:
            raise ValueError(
                f"a bidirectional placement holds a stage of each direction on every rank: "
                f"stages_per_rank must be even, got {self.stages_per_rank}"
            )

    @property
    def num_stages(self) -> int:
        return len(self.homes) or self.num_ranks * self.stages_per_rank

    @property
    def num_routes(self) -> int:
        """Number of copies of the model; a microbatch passes through the stages of one of them."""
        return 2 if self.kind is PlacementKind.BIDIRECTIONAL else 1

    @property
    def stages_per_route(self) -> int:
        return self.num_stages // self.num_routes

    @property
    def stages_per_microbatch(self) -> int:
        """Number of stages of one rank that a microbatch passes through: those of its route."""
        return self.stages_per_rank // self.num_routes

    @property
    def output_rank(self) -> int:
        """The rank that holds the last stage of the first route, where the model's output is."""
        return self.rank_of(self.stages_per_route - 1)

    def route_of(self, stage: int) -> int:
        return stage // self.stages_per_route

    def original_of(self, stage: int) -> int:
        """The stage of the first route with the same layers."""
        return stage % self.stages_per_route

    def rank_of(self, stage: int) -> int:
        if self.homes:
            return self.homes[stage]
        lap, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self._runs_down(lap) else place

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage of the first route, or its copy on another."""
        return tuple(self.rank_of(stage + route * self.stages_per_route) for route in range(self.num_routes))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        if self.homes:
            return tuple(stage for stage, home in enumerate(self.homes) if home == rank)
        places = (self.num_ranks - 1 - rank if self._runs_down(lap) else rank for lap in range(self.stages_per_rank))
        return tuple(lap * self.num_ranks + place for lap, place in enumerate(places))

    def _runs_down(self, lap: int) -> bool:
        """True if the stages of a lap, as many as there are ranks, run from the last rank to the first."""
        return lap % 2 == 1 if self.kind is PlacementKind.V else self.route_of(lap * self.num_ranks) == 1

    def previous(self, stage: int) -> int | None:
        return None if self.is_first(stage) else stage - 1

    def next(self, stage: int) -> int | None:
        return None if self.is_last(stage) else stage + 1

    def is_first(self, stage: int) -> bool:
        """True if the stage takes the model's input."""
        return self.original_of(stage) == 0

    def is_last(self, stage: int) -> bool:
        """True if the stage gives the model's output."""
        return (stage + 1) % self.stages_per_route == 0
