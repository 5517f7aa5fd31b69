"""The words of a schedule: actions, where the stages live, and the two forms of a plan, schedule and program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias


class ScheduleError(ValueError):
    """A schedule, program or file that cannot be carried out; the message names the rank, the action and the reason."""


class Op(IntEnum):
    """What an action does; the names are those of torch.distributed.pipelining.

    `F` forward, `B` full backward, `I` backward for the inputs, `W` backward for the weights. A `RECV_*` posts a
    receive and returns, the compute action that needs the message waits for it. A `SEND_*` starts a send and returns.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    REDUCE_GRAD = 8
    STEP = 9


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFERS = SENDS | RECEIVES


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    `SEND_F` of stage s sends s's output to the next stage and `RECV_F` of s receives s's *input*; `SEND_B` of s sends
    the gradient of s's input to the previous stage and `RECV_B` of s receives the gradient of s's *output*.
    `REDUCE_GRAD` has no microbatch and `STEP` neither stage nor microbatch: those fields are -1.
    """

    op: Op
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        if self.op is Op.STEP:
            return "STEP"
        if self.op is Op.REDUCE_GRAD:
            return f"{self.stage}REDUCE_GRAD"
        return f"{self.stage}{self.op.name}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that do not need each other, carried out together as one step of a rank.

    Raises: ValueError if the first is no `F` or the second neither `B` nor `I`, or one the backward of the other.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.op is not Op.F or self.backward.op not in (Op.B, Op.I):
            raise ValueError(f"a pair is an F with a B or an I, not {self.forward} with {self.backward}")
        if (self.forward.stage, self.forward.microbatch) == (self.backward.stage, self.backward.microbatch):
            raise ValueError(f"{self.backward} needs {self.forward}, so they cannot be one pair")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """The actions in a step: itself, or a pair's forward and backward."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def flatten(steps: Iterable[Step]) -> Iterator[Action]:
    """All actions of a rank in order, pairs opened."""
    for step in steps:
        if isinstance(step, Pair):
            yield step.forward
            yield step.backward
        else:
            yield step


def check_count(name: str, value: object, least: int = 1) -> int:
    """The value, if it is a whole number of at least `least`.

    Raises: ValueError naming the setting, the value and what is possible.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


class PlacementKind(Enum):
    """How stages are dealt to ranks.

    `LOOP`: stage s on rank s mod p. `V`: there and back again. `BIDIRECTIONAL`: two copies of the model, two *routes*
    of stages; the first copy's stages run up the ranks, the second copy's (numbered after them) run down.
    """

    LOOP = "loop"
    V = "v"
    BIDIRECTIONAL = "bidirectional"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage, and which stages are neighbours.

    Raises: ValueError for counts below one, or an odd number of stages a rank when there are two routes.
    """

    kind: PlacementKind
    num_ranks: int
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        check_count("ranks", self.num_ranks)
        check_count("stages_per_rank", self.stages_per_rank)
        if self.stages_per_rank % self.num_routes:
            raise ValueError(
                f"a bidirectional placement holds a stage of each direction on every rank: "
                f"stages_per_rank must be even, got {self.stages_per_rank}"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def num_routes(self) -> int:
        """Number of copies of the model; a microbatch goes through the stages of one of them."""
        return 2 if self.kind is PlacementKind.BIDIRECTIONAL else 1

    @property
    def stages_per_route(self) -> int:
        return self.num_stages // self.num_routes

    @property
    def stages_per_microbatch(self) -> int:
        """Number of stages of one rank that a microbatch goes through: those of its route."""
        return self.stages_per_rank // self.num_routes

    def route_of(self, stage: int) -> int:
        return stage // self.stages_per_route

    def rank_of(self, stage: int) -> int:
        lap, place = divmod(stage % self.stages_per_route, self.num_ranks)
        downwards = lap % 2 == 1 if self.kind is PlacementKind.V else self.route_of(stage) == 1
        return self.num_ranks - 1 - place if downwards else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def previous(self, stage: int) -> int | None:
        return None if self.is_first(stage) else stage - 1

    def next(self, stage: int) -> int | None:
        return None if self.is_last(stage) else stage + 1

    def is_first(self, stage: int) -> bool:
        """Whether the stage takes the model's input."""
        return stage % self.stages_per_route == 0

    def is_last(self, stage: int) -> bool:
        """Whether the stage gives the model's output."""
        return (stage + 1) % self.stages_per_route == 0


@dataclass(frozen=True)
class Schedule:
    """Each rank's order of compute actions; plain data that says nothing yet of transfers.

    `orders` holds one order a rank. `live_bound` is, per rank, how many tapes (one a local stage and microbatch) may
    be live at once, or None where the builder promises nothing. Without `training` there are only forwards.
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Step, ...], ...]
    live_bound: tuple[int, ...] | None = None
    training: bool = True

    def __post_init__(self) -> None:
        check_count("microbatches", self.num_microbatches)
        if len(self.orders) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many orders, got {len(self.orders)}")
        if self.live_bound is not None and len(self.live_bound) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many bounds, got {len(self.live_bound)}")

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through a stage: all of them, or its route's share of them."""
        num_routes, route = self.placement.num_routes, self.placement.route_of(stage)
        share = -(-self.num_microbatches // num_routes)
        return range(min(route * share, self.num_microbatches), min((route + 1) * share, self.num_microbatches))


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers, reductions and optimizer step: what is proved, simulated, drawn and run.

    `ranks` holds one list of steps a rank.
    """

    schedule: Schedule
    ranks: tuple[tuple[Step, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many lists of steps, got {len(self.ranks)}")

    @property
    def placement(self) -> Placement:
        return self.schedule.placement
