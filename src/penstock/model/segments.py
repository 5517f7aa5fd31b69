"""Units with collectives inside: a row of segments, computed or exchanged in turn, which a lane walks both ways.

What goes from one segment to the next is a state, a tuple of tensors. Autograd is cut between segments, so each is
undone by itself, and while an exchange travels the lane is suspended and another one computes. The same row serves
the plain path (the lane is drained), the combined one (two lanes are zipped), recompute, split backward, and runs
without a tape, where nothing is to be undone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.model.lanes import Driven, Lane, Turn, drain
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Handle

State = tuple[Tensor, ...]
Grads = tuple[Tensor | None, ...]


def enter_graph(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` from these edges, without its checks of the gradients, whose shapes are known.

    They take longer than autograd needs to begin: 0.13 ms of a backward by code that has left the caches meanwhile.
    """
    graph._engine_run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class Undo(Protocol):
    """What a segment leaves behind in forward: from the gradients of its outputs to those of its inputs."""

    def backward(self, grads: Grads) -> Lane[Grads]: ...


class Segment(Protocol):
    """A piece of a unit. With `undo` it appends what undoes it; where that is None it keeps nothing."""

    @property
    def name(self) -> str: ...

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]: ...


class HasSegments(Protocol):
    """What a row needs of a tape: the list to which it appends itself."""

    segments: list[Any]


@dataclass(frozen=True, eq=False)
class Compute:
    """A segment that autograd undoes: `run(*state)` gives the next state.

    Of the state's data it keeps what autograd saved, and no more.

    apart: in backward, a lane beside it goes on before the weight gradients are computed, which wait by their owner's
    leave: so what that one launches travels meanwhile.
    """

    name: str
    run: Callable[..., State]
    apart: bool = False

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        if undo is None:
            with torch.no_grad():
                return self.run(*state)
        arrived: list[Tensor | None] = [None] * len(state)
        outputs = self.run(*_Entrance.apply(arrived, torch.empty(0, requires_grad=True), *state))  # type: ignore[misc]
        edges = tuple(get_gradient_edge(y) if y.requires_grad else None for y in outputs)
        undo.append(_Computed(arrived, edges, self.apart))
        return tuple(y.detach() for y in outputs)
        yield


class _Entrance(torch.autograd.Function):
    """Where autograd stops: data passes, gradients stay in the list. A leaf would keep the data too."""

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


@dataclass(eq=False)
class _Computed:
    """The gradients of a segment's inputs are in `arrived` once autograd has been let in at the outputs' edges."""

    arrived: list[Tensor | None]
    edges: tuple[GradientEdge | None, ...]
    apart: bool

    def backward(self, grads: Grads) -> Lane[Grads]:
        given = [(edge, grad) for edge, grad in zip(self.edges, grads, strict=True) if edge and grad is not None]
        enter_graph([edge for edge, _ in given], [grad for _, grad in given])
        if self.apart:
            yield Turn.WEIGHTS_WAIT
        return tuple(self.arrived)


@dataclass(frozen=True, eq=False)
class Beside:
    """A segment that the state's last `num_beside` tensors, and their gradients, pass by untouched."""

    inner: Segment
    num_beside: int

    @property
    def name(self) -> str:
        return self.inner.name

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        own: list[Undo] | None = None if undo is None else []
        outputs = yield from self.inner.forward(state[: -self.num_beside], own)
        if undo is not None and own is not None:
            undo.extend(_Beside(entry, self.num_beside) for entry in own)
        return (*outputs, *state[-self.num_beside :])


@dataclass(frozen=True, eq=False)
class _Beside:
    inner: Undo
    num_beside: int

    def backward(self, grads: Grads) -> Lane[Grads]:
        inner = yield from self.inner.backward(grads[: -self.num_beside])
        return (*inner, *grads[-self.num_beside :])


@dataclass(frozen=True, eq=False)
class Exchange:
    """A segment that moves the state's first tensor between ranks, and leaves the others where they are.

    `there` launches the collective of the forward, `back` the one that takes gradients the other way.
    `before_release`: the backward of what stands before it lets go of a layer's largest part.
    """

    name: str
    there: Callable[[Tensor], Handle[Tensor]]
    back: Callable[[Tensor], Handle[Tensor]]
    before_release: bool = False

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        handle = self.there(state[0])
        yield
        if undo is not None:
            undo.append(self)
        return (handle.wait(), *state[1:])

    def backward(self, grads: Grads) -> Lane[Grads]:
        assert grads[0] is not None, f"nothing is left to send back through {self.name}"
        handle = self.back(grads[0])
        yield Turn.RELEASE_WAITS if self.before_release else None
        return (handle.wait(), *grads[1:])


class SegmentedUnit(nn.Module):
    """A unit given as a row of segments; `segments` makes a fresh row for each microbatch."""

    has_randomness = False

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        """The row from the unit's input, a state of one tensor, to its output, which stands first in the last state."""
        raise NotImplementedError

    def forward_lane(self, tape: HasSegments | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]:
        """Walk the row; with a tape append what walks it back."""
        return walk(self.segments(sequences), tape, x)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The output, with nothing kept for a backward: a unit's backward needs a tape."""
        return drain(self.forward_lane(None, x, sequences))


class LaneModule(Protocol):
    """A unit whose forward is a lane."""

    def forward_lane(self, tape: Any, x: Tensor, sequences: Sequences) -> Lane[Tensor]: ...


@dataclass(frozen=True, eq=False)
class RecomputedLane:
    """A unit that keeps its input alone, and runs its forward again, exchanges included, when its backward comes."""

    unit: LaneModule

    def forward_lane(self, tape: HasSegments | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]:
        y = yield from self.unit.forward_lane(None, x, sequences)
        if tape is not None:
            device = x.device.type
            autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            tape.segments.append(Recomputed(self.unit, x, sequences, autocast))
        return y


@dataclass(eq=False)
class Recomputed:
    """The place on a tape of a unit that is computed again in backward."""

    unit: LaneModule
    x: Tensor
    sequences: Sequences
    autocast: torch.autocast

    def forward_again(self, tape: HasSegments) -> Driven[Turn | None, Tensor]:
        """Run the unit's forward, which puts what its backward needs at the end of the tape."""
        return Driven(self.unit.forward_lane(tape, self.x, self.sequences), lambda: self.autocast)


def walk(row: Sequence[Segment], tape: HasSegments | None, x: Tensor) -> Lane[Tensor]:
    """Take `x` through a row of segments; with a tape append what takes its gradient back."""
    undo: list[Undo] | None = None if tape is None else []
    state: State = (x,)
    for segment in row:
        state = yield from segment.forward(state, undo)
    if tape is not None and undo is not None:
        tape.segments.append(_Row(undo))
    return state[0]


@dataclass(eq=False)
class _Row:
    undo: list[Undo]

    def backward(self, grad: Tensor | None) -> Lane[Tensor | None]:
        grads: Grads = (grad,)
        while self.undo:
            grads = yield from self.undo.pop().backward(grads)
        return grads[0]


def cut(x: Tensor) -> Tensor:
    """A leaf with the data of `x`, at which autograd stops and leaves the gradient."""
    return x.detach().requires_grad_()
