"""The words of a schedule: kinds of actions in one table, actions, and the plan's two forms, schedule and program.

A model is cut into *stages*, a batch into *microbatches*. Each rank holds some of the stages and carries out actions on
them, one after another. What a stage keeps of a microbatch, from its forward to its last backward action, is a *tape*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from operator import getitem
from typing import Any, ClassVar, TypeAlias

from penstock.schedule.placement import Placement, check_count
from penstock.settings.declare import check_argument


class ScheduleError(ValueError):
    """A schedule, program or file that cannot be carried out; the message names the rank, the action and the reason.

    >>> from penstock.schedule import Action, Op, Program, build, verify
    >>> verify(Program(build("1f1b", ranks=1, microbatches=1), ranks=((Action(Op.F, 0, 0),),)))
    Traceback (most recent call last):
    penstock.schedule.actions.ScheduleError: rank 0: 0B0 or 0I0 is missing
    """

    #: Where ranks would wait for ever; None for any other fault.
    hang: Hang | None

    def __init__(self, message: str, hang: Hang | None = None) -> None:
        super().__init__(message)
        self.hang = hang


class Direction(IntEnum):
    """The two directions in which tensors pass through the stages: activations forward, gradients backward.

    >>> Op.SEND_B.direction is Direction.BACKWARD
    True
    """

    FORWARD = 0
    BACKWARD = 1


class FactKind(IntEnum):
    """The kinds of facts about a stage and a microbatch.

    `REDUCED` is about a stage and all microbatches; so is `STEPPED`, whose stage is the first one of its rank.
    """

    INPUT_POSTED = 0
    OUTPUT = 1
    OUTPUT_SENT = 2
    OUTPUT_GRADIENT_POSTED = 3
    INPUT_GRADIENT = 4
    INPUT_GRADIENT_SENT = 5
    WEIGHT_GRADIENT = 6
    REDUCED = 7
    STEPPED = 8


class TapeState(IntEnum):
    """The state of what a stage holds of a microbatch, in the order of the device's memory that it takes.

    Of an `AWAY` tape the activations are in host memory; of `WEIGHTS` there is what `W` needs after an `I`, of a `LEAN`
    one the input alone, and of a `WHOLE` one all that the backward needs.
    """

    NONE = 0
    AWAY = 1
    WEIGHTS = 2
    LEAN = 3
    WHOLE = 4

    @property
    def word(self) -> str:
        """The state in messages."""
        return self.name.lower() if self else "gone"


class Resource(Enum):
    """The part of a rank that an action keeps busy: its compute, a line to another rank or to host memory, or nothing.

    Lines carry one thing after another while the rank goes on.
    """

    COMPUTE = "compute"
    CHANNEL = "channel"
    REDUCTION = "reduction"
    HOST_LINK = "host link"
    NOTHING = "nothing"


class Scope(Enum):
    """The part of a rank's work that one action of a kind concerns."""

    MICROBATCH = "a microbatch of a stage"
    STAGE = "all microbatches of a stage"
    RANK = "all stages of a rank"


class _Table(type):
    """Lets the rows of a table be iterated over, and one be asked for by its name."""

    rows: list[Any]

    def __iter__(cls) -> Iterator[Op]:
        return iter(cls.rows)

    def __len__(cls) -> int:
        return len(cls.rows)

    def __getitem__(cls, name: str) -> Op:
        for op in cls.rows:
            if op.name == name:
                return op
        raise KeyError(name)


@dataclass(eq=False, repr=False)
class Op(int, metaclass=_Table):
    """The kind of an action: a row of the one table that says what each kind of action is.

    Names are those of torch.distributed.pipelining where it has them: `F` forward, `B` full backward, `I` backward for
    the inputs, `W` backward for the weights. A `RECV_*` posts a receive and returns; the compute action that needs the
    message waits for it. A `SEND_*` starts a send and returns. `R` computes again what a lean tape lacks, ahead of the
    backward; `O` moves a tape to host memory, `L` brings it back.

    Rules, lowering, proof, simulation, costs, texts, pictures and the executor read it. A row's number is its place.

    >>> [op.name for op in Op if op in COMPUTE]
    ['F', 'B', 'I', 'W', 'R']
    >>> Op["W"].needs[0].name, Op.W.takes[0].name, Op.W.times
    ('INPUT_GRADIENT', 'WEIGHTS', ('backward_weight',))
    """

    #: all kinds, by their numbers
    rows: ClassVar[list[Op]] = []
    F: ClassVar[Op]
    B: ClassVar[Op]
    I: ClassVar[Op]  # noqa: E741
    W: ClassVar[Op]
    SEND_F: ClassVar[Op]
    RECV_F: ClassVar[Op]
    SEND_B: ClassVar[Op]
    RECV_B: ClassVar[Op]
    REDUCE_GRAD: ClassVar[Op]
    STEP: ClassVar[Op]
    R: ClassVar[Op]
    O: ClassVar[Op]  # noqa: E741
    L: ClassVar[Op]

    #: in texts
    name: str
    #: what it keeps busy
    resource: Resource
    #: the method of the executor that carries it out; empty for what stands behind the program
    handler: str
    #: what its rank does meanwhile, in words
    doing: str = "computes"
    #: the facts about its stage and microbatch that it needs besides its input, and those that it gives; one that gives
    #: none changes the tape alone, and a program may do without it
    needs: tuple[FactKind, ...] = ()
    gives: tuple[FactKind, ...] = ()
    #: the states in which it takes its tape, if it touches one, and that in which it leaves it; None: as it found it
    takes: tuple[TapeState, ...] = ()
    leaves: TapeState | None = None
    #: of what a builder places, the names in `Costs` of the times that it takes, added up
    times: tuple[str, ...] = ()
    direction: Direction = Direction.BACKWARD
    #: what one action of it concerns
    scope: Scope = Scope.MICROBATCH
    #: True if it is a lane, which gives way to another while a collective is under way
    is_lane: bool = False

    def __new__(cls, *row: Any, **fields: Any) -> Op:
        return super().__new__(cls, len(cls.rows))

    def __post_init__(self) -> None:
        self.rows.append(self)

    def __repr__(self) -> str:
        return f"Op.{self.name}"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return getitem, (Op, self.name)


# To `dataclasses.asdict` an action's kind is a value like any other.
del Op.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]

Op.F = Op(
    "F",
    Resource.COMPUTE,
    "forward",
    gives=(FactKind.OUTPUT,),
    takes=(TapeState.NONE,),
    leaves=TapeState.WHOLE,
    times=("forward",),
    direction=Direction.FORWARD,
    is_lane=True,
)
Op.B = Op(
    "B",
    Resource.COMPUTE,
    "backward",
    needs=(FactKind.OUTPUT,),
    gives=(FactKind.INPUT_GRADIENT, FactKind.WEIGHT_GRADIENT),
    takes=(TapeState.WHOLE, TapeState.LEAN),
    leaves=TapeState.NONE,
    times=("backward_input", "backward_weight"),
    is_lane=True,
)
Op.I = Op(
    "I",
    Resource.COMPUTE,
    "backward",
    needs=(FactKind.OUTPUT,),
    gives=(FactKind.INPUT_GRADIENT,),
    takes=(TapeState.WHOLE, TapeState.LEAN),
    leaves=TapeState.WEIGHTS,
    times=("backward_input",),
    is_lane=True,
)
Op.W = Op(
    "W",
    Resource.COMPUTE,
    "weight_backward",
    needs=(FactKind.INPUT_GRADIENT,),
    gives=(FactKind.WEIGHT_GRADIENT,),
    takes=(TapeState.WEIGHTS,),
    leaves=TapeState.NONE,
    times=("backward_weight",),
)
Op.SEND_F = Op(
    "SEND_F",
    Resource.CHANNEL,
    "send",
    "sends activations",
    needs=(FactKind.OUTPUT,),
    gives=(FactKind.OUTPUT_SENT,),
    direction=Direction.FORWARD,
)
Op.RECV_F = Op(
    "RECV_F",
    Resource.NOTHING,
    "post_receive",
    "posts a receive of activations",
    gives=(FactKind.INPUT_POSTED,),
    direction=Direction.FORWARD,
)
Op.SEND_B = Op(
    "SEND_B",
    Resource.CHANNEL,
    "send",
    "sends gradients",
    needs=(FactKind.INPUT_GRADIENT,),
    gives=(FactKind.INPUT_GRADIENT_SENT,),
)
Op.RECV_B = Op(
    "RECV_B", Resource.NOTHING, "post_receive", "posts a receive of gradients", gives=(FactKind.OUTPUT_GRADIENT_POSTED,)
)
Op.REDUCE_GRAD = Op(
    "REDUCE_GRAD",
    Resource.REDUCTION,
    "start_reduction",
    "starts a reduction",
    needs=(FactKind.WEIGHT_GRADIENT,),
    gives=(FactKind.REDUCED,),
    scope=Scope.STAGE,
)
Op.STEP = Op(
    "STEP",
    Resource.COMPUTE,
    "",
    needs=(FactKind.REDUCED,),
    gives=(FactKind.STEPPED,),
    scope=Scope.RANK,
)
Op.R = Op(
    "R",
    Resource.COMPUTE,
    "recompute",
    needs=(FactKind.OUTPUT,),
    takes=(TapeState.LEAN,),
    leaves=TapeState.WHOLE,
    times=("recompute",),
    is_lane=True,
)
Op.O = Op(
    "O",
    Resource.HOST_LINK,
    "offload",
    "moves activations to host memory",
    needs=(FactKind.OUTPUT,),
    takes=(TapeState.WHOLE, TapeState.LEAN),
    leaves=TapeState.AWAY,
    times=("offload",),
)
Op.L = Op(
    "L",
    Resource.HOST_LINK,
    "reload",
    "moves activations back from host memory",
    needs=(FactKind.OUTPUT,),
    takes=(TapeState.AWAY,),
    leaves=TapeState.WHOLE,
    times=("offload",),
)

COMPUTE = frozenset({op for op in Op if op.resource is Resource.COMPUTE and op.takes})
SENDS = frozenset({op for op in Op if op.resource is Resource.CHANNEL})
RECEIVES = frozenset({op for op in Op if op.resource is Resource.NOTHING})
TRANSFERS = SENDS | RECEIVES
MOVES = frozenset({op for op in Op if not op.gives})
"""The kinds of actions that change nothing but what is kept of a microbatch; a program may do without them."""
PLACED = frozenset({op for op in Op if op.takes})
"""The kinds of actions whose order a builder decides; lowering adds the others."""


ALL = -1
"""In place of a microbatch or a stage: the action concerns all of them."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    `SEND_F` of stage s sends s's output to the next stage and `RECV_F` of s receives s's *input*; `SEND_B` of s sends
    the gradient of s's input to the previous stage and `RECV_B` of s receives the gradient of s's *output*.
    `REDUCE_GRAD` concerns `ALL` microbatches of its stage, `STEP` (of the optimizer) also `ALL` stages of its rank.

    >>> print(Action(Op.F, stage=2, microbatch=5), Action(Op.REDUCE_GRAD, stage=2), Action(Op.STEP))
    2F5 2REDUCE_GRAD STEP

    `keeps` marks an `F` whose microbatch keeps all activations where the stage would recompute them. It says how the
    action is done, not which one it is: with and without it, actions are equal.

    >>> print(Action(Op.F, 2, 5, keeps=True))
    2F5K
    """

    op: Op
    stage: int = ALL
    microbatch: int = ALL
    keeps: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        stage, microbatch = ("" if number == ALL else number for number in (self.stage, self.microbatch))
        return f"{stage}{self.op.name}{microbatch}{'K' if self.keeps else ''}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of different microbatches or stages, carried out together as one step of a rank.

    >>> print(Pair(Action(Op.F, 0, 7), Action(Op.B, 7, 3)))
    (0F7;7B3)OVERLAP_F_B

    Raises: ValueError unless `forward` is an `F` and `backward` a `B` or `I`, and neither needs the other.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if getattr(self.forward, "op", None) is not Op.F or getattr(self.backward, "op", None) not in (Op.B, Op.I):
            raise ValueError(f"a pair is an F with a B or an I, not {self.forward} with {self.backward}")
        if (self.forward.stage, self.forward.microbatch) == (self.backward.stage, self.backward.microbatch):
            raise ValueError(f"{self.backward} needs {self.forward}, so they cannot be one pair")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """The actions in a step: the action itself, or a pair's forward and backward.

    >>> [str(action) for action in parts(Pair(Action(Op.F, 0, 7), Action(Op.B, 7, 3)))]
    ['0F7', '7B3']
    """
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def flatten(steps: Iterable[Step]) -> Iterator[Action]:
    """All actions of a rank in order; a pair gives its forward, then its backward.

    >>> [str(action) for action in flatten([Action(Op.F, 0, 0), Pair(Action(Op.F, 0, 1), Action(Op.B, 0, 0))])]
    ['0F0', '0F1', '0B0']
    """
    for step in steps:
        if isinstance(step, Pair):
            yield step.forward
            yield step.backward
        else:
            yield step


def left_by(action: Action, before: Sequence[TapeState]) -> TapeState:
    """The state in which an action leaves its tape, whose states `before` it has had, the last one last.

    An `F` leaves the input alone unless it keeps all; whether that is less is its stage's affair. What comes back from
    the host's memory is what went there.

    >>> left_by(Action(Op.L, 0, 1), [TapeState.LEAN, TapeState.AWAY]).name
    'LEAN'
    """
    op = action.op
    if op is Op.F and not action.keeps:
        return TapeState.LEAN
    if op is Op.L:
        return before[-2]
    return before[-1] if op.leaves is None else op.leaves


def keepers(steps: Iterable[Step]) -> frozenset[tuple[int, int]]:
    """The stage and microbatch of each forward that is marked to keep all activations.

    >>> keepers([Action(Op.F, 0, 0, keeps=True), Action(Op.F, 0, 1)])
    frozenset({(0, 0)})
    """
    return frozenset((action.stage, action.microbatch) for action in flatten(steps) if action.keeps)


def spared(steps: Iterable[Step]) -> frozenset[tuple[int, int]]:
    """The stage and microbatch of each tape of which the backward has nothing to recompute: all is kept, or is again.

    >>> sorted(spared([Action(Op.F, 0, 0, keeps=True), Action(Op.F, 0, 1), Action(Op.R, 0, 1), Action(Op.F, 0, 2)]))
    [(0, 0), (0, 1)]
    """
    return frozenset((a.stage, a.microbatch) for a in flatten(steps) if a.keeps or a.op is Op.R)


def peak_tapes(order: Iterable[Step]) -> int:
    """The most tapes that are live at once on a rank that runs this order."""
    live = peak = 0
    for action in flatten(order):
        if action.op is Op.F:
            live += 1
            peak = max(peak, live)
        elif action.op is not Op.I:
            live -= 1
    return peak


def uses(steps: Iterable[Step]) -> dict[int, tuple[int, int]]:
    """Each microbatch's first and last step in one rank's order, by their places there.

    >>> uses([Action(Op.F, 0, 0), Pair(Action(Op.F, 0, 1), Action(Op.B, 0, 0)), Action(Op.B, 0, 1), Action(Op.STEP)])
    {0: (0, 1), 1: (1, 2)}
    """
    found: dict[int, tuple[int, int]] = {}
    for place, step in enumerate(steps):
        for action in parts(step):
            if action.microbatch != ALL:
                first, _ = found.get(action.microbatch, (place, place))
                found[action.microbatch] = first, place
    return found


@dataclass(frozen=True)
class Schedule:
    """Each rank's order of compute actions, as plain data; `lower` adds the transfers.

    >>> from penstock.schedule import PlacementKind
    >>> orders = ((Action(Op.F, 0, 0), Action(Op.B, 0, 0)),)
    >>> Schedule("mine", Placement(PlacementKind.LOOP, num_ranks=1), num_microbatches=1, orders=orders).training
    True
    """

    name: str
    placement: Placement
    num_microbatches: int
    #: One order a rank.
    orders: tuple[tuple[Step, ...], ...]
    #: The most tapes that each rank may keep at once; None if the builder promises no bound.
    live_bound: tuple[int, ...] | None = None
    #: False if there are only forwards.
    training: bool = True

    def __post_init__(self) -> None:
        check_argument("placement", self.placement, Placement)
        check_argument("orders", self.orders, tuple | list)
        check_count("microbatches", self.num_microbatches)
        if len(self.orders) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many orders, got {len(self.orders)}")
        if self.live_bound is not None and len(self.live_bound) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many bounds, got {len(self.live_bound)}")
        for rank, order in enumerate(self.orders):
            for step in order:
                if type(step) is not Pair and not (type(step) is Action and type(step.op) is Op):
                    raise ValueError(f"rank {rank} has the step {step!r}; steps are Actions, with an Op, and Pairs")

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through a stage: all, or those of its route."""
        num_routes, route = self.placement.num_routes, self.placement.route_of(stage)
        share = -(-self.num_microbatches // num_routes)
        return range(min(route * share, self.num_microbatches), min((route + 1) * share, self.num_microbatches))


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers, reductions and optimizer step: what is proved, simulated, drawn and run.

    The order of the steps alone says when a message leaves: a send right behind the step that makes its tensor leaves
    while that step goes on, if it is a fused pair or a `B`; any other at its place.

    >>> from penstock.schedule import build, lower
    >>> print(*lower(build("1f1b", ranks=2, microbatches=1)).ranks[1])
    1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD STEP
    """

    schedule: Schedule
    #: One list of steps a rank.
    ranks: tuple[tuple[Step, ...], ...]

    def __post_init__(self) -> None:
        check_argument("schedule", self.schedule, Schedule)
        if len(self.ranks) != self.placement.num_ranks:
            raise ValueError(f"{self.placement.num_ranks} ranks need as many lists of steps, got {len(self.ranks)}")

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


@dataclass(frozen=True)
class Hang:
    """The place where a program stands still if every send waits for its receive; `simulate` gives what is before it.

    >>> from penstock.schedule import build, lower, verify
    >>> program = lower(build("1f1b", ranks=2, microbatches=1))
    >>> silent = tuple(step for step in program.ranks[1] if str(step) != "1SEND_B0")
    >>> try:
    ...     verify(Program(program.schedule, (program.ranks[0], silent)))
    ... except ScheduleError as error:
    ...     print(error.hang.sentence)
    rank 0 at 0B0 waits for ever: rank 1 never starts 1SEND_B0
    """

    #: What is carried out: each rank's steps before the one in which it waits, or all of them.
    done: Program
    #: Waiting rank -> the action in which it waits, and the transfer of another rank that it waits for.
    waits: Mapping[int, tuple[Action, Action]]
    #: A waiting rank and the awaited one, each of a cycle; without a cycle, of one wait for what its rank never does.
    arrows: tuple[tuple[int, int], ...]
    #: The cycle or the wait in words.
    sentence: str

    def awaited(self, rank: int) -> int:
        """The rank that a waiting rank waits for."""
        return self.done.placement.rank_of(self.waits[rank][1].stage)

    def describe_wait(self, rank: int) -> str:
        """A waiting rank's wait in a few words, such as "0SEND_F1 waits for 1RECV_F1 of rank 1"."""
        return "{} waits for {} of rank {}".format(*self.waits[rank], self.awaited(rank))
