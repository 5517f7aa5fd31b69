"""Lanes: one microbatch's forward or backward through one stage, as a generator.

A lane computes, launches a collective, yields, and waits for the collective when it is resumed. Draining one lane is
an ordinary forward or backward. Zipping a forward lane with a backward lane of another microbatch is the combined
1F1B: while one waits for its collective the other computes. The order of resumption is fixed by the lanes themselves,
never by timing, so every process issues its collectives in the same order.

The same driver serves any generator that is resumed step by step to its result.

A unit with collectives inside is a row of segments, computed or exchanged in turn, which a lane walks both ways.
"""

import enum
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from penstock.model.linear import autocast_dtype, autocast_to
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Handle

Yielded = TypeVar("Yielded")
Result = TypeVar("Result")


class Turn(enum.Enum):
    """The reason why a lane yields, if it is not merely that a collective was launched."""

    #: Nothing was launched, but weight gradients can wait; see `Compute.apart`.
    WEIGHTS_WAIT = "weights wait"
    #: Once the collective just launched has arrived, the lane frees most of what it keeps;
    #: see `Exchange.before_release`.
    RELEASE_WAITS = "release waits"


Lane = Generator[Turn | None, None, Result]


@dataclass(eq=False, slots=True)
class Driven(Generic[Yielded, Result]):
    """A lane to iterate over, turn by turn."""

    lane: Generator[Yielded, None, Result]
    #: makes the context in which each turn runs; it is left while the lane is suspended, since other lanes run then
    context: Callable[[], AbstractContextManager[object]] | None = None
    #: the lane's result, once the iteration has ended
    result: Result = field(init=False)

    def __iter__(self) -> "Driven[Yielded, Result]":
        return self

    def __next__(self) -> Yielded:
        with nullcontext() if self.context is None else self.context():
            try:
                return next(self.lane)
            except StopIteration as stop:
                self.result = stop.value
        raise StopIteration(self.result)


def drain(lane: Generator[Any, None, Result]) -> Result:
    """Run one lane to its end and return its result."""
    try:
        while True:
            next(lane)
    except StopIteration as stop:
        return stop.value


def zip_lanes(*lanes: Lane[Any]) -> list[Any]:
    """Resume the lanes in turn until all have ended; return their results in the order given.

    A lane that ends early leaves its turns to the others, so lanes of different lengths may be zipped.
    """
    driven = [Driven(lane) for lane in lanes]
    running = deque(driven)
    while running:
        lane = running.popleft()
        if next(lane, _ENDED) is not _ENDED:
            running.append(lane)
    return [lane.result for lane in driven]


_ENDED = object()

State = tuple[Tensor, ...]
Grads = tuple[Tensor | None, ...]


def enter_graph(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` from these edges, without its checks of the gradients, whose shapes are known.

    The checks take longer than autograd needs to start: 0.13 ms per backward, in code that has left the caches.
    """
    graph._engine_run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


Undo = Callable[[Grads], Lane[Grads]]
"""The backward of a segment: from the gradients of its outputs to those of its inputs."""


class Segment(Protocol):
    """A part of a unit; it appends its backward to `undo`, or keeps nothing if that is None.

    The tensors of the state that follow those it works on, and their gradients, pass by it.
    """

    @property
    def name(self) -> str: ...

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]: ...


Tape = Any
"""What a row appends its backward to: an object with a list `segments`, as a stage's tape is."""


@dataclass(frozen=True, eq=False)
class Compute:
    """A segment whose backward is autograd's: `run` of the state, but for its last `num_beside` tensors.

    It keeps only those of the state's data that autograd saves.
    """

    name: str
    run: Callable[..., State]
    #: if the weight gradients are deferred, yield before them in backward, so that the other lane's next collective is
    #: in flight while they are computed
    apart: bool = False
    num_beside: int = 0

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        num_own = len(state) - self.num_beside
        own, others = state[:num_own], state[num_own:]
        if undo is None:
            with torch.no_grad():
                return (*self.run(*own), *others)
        arrived: list[Tensor | None] = [None] * num_own
        outputs = self.run(*_Entrance.apply(arrived, torch.empty(0, requires_grad=True), *own))  # type: ignore[misc]
        edges = tuple(get_gradient_edge(y) if y.requires_grad else None for y in outputs)
        undo.append(partial(_compute_back, arrived, edges, self.apart))
        return (*(y.detach() for y in outputs), *others)
        yield


def beside(segment: Segment, num: int) -> Segment:
    """The segment, past which `num` more tensors of the state and their gradients go."""
    return replace(segment, num_beside=segment.num_beside + num) if isinstance(segment, Compute) else segment


class _Entrance(torch.autograd.Function):
    """The start of a segment's graph: data passes, gradients stay in the list; a leaf would keep the data too."""

    @staticmethod
    def forward(ctx: Any, arrived: list[Tensor | None], anchor: Tensor, *state: Tensor) -> State:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        outputs = tuple(x.detach() for x in state)
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.arrived[:] = grads
        return (None, None, *(None for _ in grads))


def _compute_back(
    arrived: list[Tensor | None], edges: Sequence[GradientEdge | None], apart: bool, grads: Grads
) -> Lane[Grads]:
    """Run autograd from the edges of the outputs; the gradients of the inputs are then in `arrived`."""
    own, others = grads[: len(edges)], grads[len(edges) :]
    given = [(edge, grad) for edge, grad in zip(edges, own, strict=True) if edge and grad is not None]
    enter_graph([edge for edge, _ in given], [grad for _, grad in given])
    if apart:
        yield Turn.WEIGHTS_WAIT
    return (*arrived, *others)


@dataclass(frozen=True, eq=False)
class Exchange:
    """A segment that moves the state's first tensor between ranks."""

    name: str
    #: launches the collective of the forward
    there: Callable[[Tensor], Handle[Tensor]]
    #: launches the collective that takes gradients the other way
    back: Callable[[Tensor], Handle[Tensor]]
    #: the backward of the segment before it frees most of a layer's activations
    before_release: bool = False

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        handle = self.there(state[0])
        yield
        if undo is not None:
            undo.append(self.backward)
        return (handle.wait(), *state[1:])

    def backward(self, grads: Grads) -> Lane[Grads]:
        assert grads[0] is not None, f"no gradient is left to send back through {self.name}"
        handle = self.back(grads[0])
        yield Turn.RELEASE_WAITS if self.before_release else None
        return (handle.wait(), *grads[1:])


class SegmentedUnit(nn.Module):
    """A unit that is a row of segments; `segments` makes a new row for each microbatch."""

    has_randomness = False

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        """The row from the unit's input, a state of one tensor, to its output, the first tensor of the last state."""
        raise NotImplementedError

    def forward_lane(self, tape: Tape | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]:
        """Walk the row as a lane of detached data; append its backward to the tape, if there is one."""
        return walk(self.segments(sequences), tape, x)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The output, keeping nothing: a unit's backward needs a tape.

        Raises: ValueError where autograd would expect a graph.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.parameters())):
            raise ValueError(
                f"{type(self).__name__} called as a plain module gives no graph for a backward: train it in an Engine, "
                "or call it under torch.no_grad()"
            )
        return drain(self.forward_lane(None, x, sequences))


def walk(row: Sequence[Segment], tape: Tape | None, x: Tensor) -> Lane[Tensor]:
    """Take `x` through a row of segments; append the backward to the tape, if there is one."""
    undo: list[Undo] | None = None if tape is None else []
    state: State = (x,)
    for segment in row:
        state = yield from segment.forward(state, undo)
    if tape is not None and undo is not None:
        tape.segments.append(_RowBackward(undo))
    return state[0]


@dataclass(eq=False)
class _RowBackward:
    #: the ways back of its parts, the last one to go first
    undo: list[Undo]

    def backward(self, grads: Grads) -> Lane[Grads]:
        while self.undo:
            grads = yield from self.undo.pop()(grads)
        return grads


def leaf_of(x: Tensor) -> Tensor:
    """A leaf with the data of `x`, at which autograd stops and leaves the gradient."""
    return x.detach().requires_grad_()


def recomputed(unit: Callable[..., Any], *arguments: Any) -> Any:
    """Run a unit with activation checkpointing: keep only its input, and compute everything else again in backward.

    The output is bit for bit that of the plain call. The random state is replayed, except for units with
    `has_randomness = False`, because saving it costs a copy each time. Deferred weight gradients keep the recomputed
    activations, so nothing is computed a third time.
    """
    preserve = bool(getattr(unit, "has_randomness", True))
    return checkpoint(unit, *arguments, use_reentrant=False, preserve_rng_state=preserve)


@dataclass(frozen=True, eq=False)
class RecomputedLane:
    """A unit whose forward is a lane that backward runs again, including its exchanges."""

    unit: SegmentedUnit

    def forward_lane(self, tape: Tape | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]:
        y = yield from self.unit.forward_lane(None, x, sequences)
        if tape is not None:
            autocast = partial(autocast_to, x, autocast_dtype(x))
            tape.segments.append(RecomputedEntry(self.unit, x, sequences, autocast))
        return y


@dataclass(eq=False)
class RecomputedEntry:
    """The entry on a tape of a unit that is computed again in backward."""

    unit: SegmentedUnit
    x: Tensor
    sequences: Sequences
    autocast: Callable[[], AbstractContextManager[object]]

    def forward_again(self, tape: Tape) -> Driven[Turn | None, Tensor]:
        """Run the unit's forward, which appends its backward to the tape."""
        return Driven(self.unit.forward_lane(tape, self.x, self.sequences), self.autocast)
