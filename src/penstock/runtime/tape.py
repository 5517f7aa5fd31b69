"""The tape: what a stage keeps of a microbatch from its F to its last backward action.

Shapes: T tokens of the microbatch, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.model import Lane, PendingGradient, enter_graph


@dataclass(slots=True)
class GraphSegment:
    """The piece of a lane between two cuts: its detached inputs and the places where their gradients enter.

    An output is kept as its *edge* in the autograd graph, not as a tensor: so its data is free as soon as nothing else
    needs it.
    """

    #: the inputs, whose `.grad` becomes the gradient to hand on; None for those that take none, such as token ids
    leaves: Sequence[Tensor | None]
    #: the edges of the outputs that can have a gradient; None for one that has no graph
    roots: Sequence[GradientEdge | None]
    #: True if the input is the plain stream, whose gradient is one tensor
    is_stream: bool

    def backward(self, grad: Tensor | tuple[Tensor, ...] | None) -> Lane[Any]:
        """Backward from the outputs' gradients (None: the output is the loss); returns those of the inputs.

        An input of several that the outputs do not depend on has the gradient zero. Nothing is launched, so the lane
        never yields.
        """
        if grad is None:
            torch.autograd.backward(self.roots)  # type: ignore[arg-type]  # the stubs lag behind GradientEdge
        else:
            roots, grads = self.roots, (grad,) if isinstance(grad, Tensor) else grad
            if None in roots:
                entered = [(root, own) for root, own in zip(roots, grads, strict=True) if root is not None]
                roots, grads = [root for root, _ in entered], [own for _, own in entered]
            enter_graph(roots, grads)  # pyright: ignore[reportArgumentType]  # each has a graph
        if self.is_stream:
            return None if self.leaves[0] is None else self.leaves[0].grad
        found = (leaf for leaf in self.leaves if leaf is not None)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in found)
        yield


class Entry(Protocol):
    """A piece of a forward, as it lies on the tape for its backward."""

    def backward(self, grad: Any) -> Lane[Any]: ...


@dataclass(slots=True, weakref_slot=True)
class Tape:
    """A microbatch's segments in forward order, and the weight gradients that I left for W."""

    segments: list[Entry] = field(default_factory=list)
    weight_gradients: list[PendingGradient] = field(default_factory=list)

    def record(self, leaves: Sequence[Tensor | None], outputs: Sequence[Tensor], is_stream: bool = True) -> None:
        """Note the segment that led from `leaves` to `outputs`, of which only the gradient edges are kept.

        A segment without a leaf whose parameters are all frozen has no backward.
        """
        roots = []
        for output in outputs:
            if output.is_floating_point():
                roots.append(get_gradient_edge(output) if output.requires_grad else None)
        if not is_stream or leaves[0] is not None or any(roots):
            self.segments.append(GraphSegment(leaves, roots, is_stream))


class Tapes(dict[tuple[int, int], Tape]):
    """A rank's tapes by stage and microbatch: F makes one, backward actions read it, the last of them takes it away."""

    #: the largest number of tapes that were live at once
    peak: int = 0

    def make(self, stage: int, microbatch: int) -> Tape:
        """Add a new tape."""
        assert (stage, microbatch) not in self, f"stage {stage} already has a tape of microbatch {microbatch}"
        tape = self[stage, microbatch] = Tape()
        self.peak = max(self.peak, len(self))
        return tape

    def __missing__(self, key: tuple[int, int]) -> Tape:
        live = ", ".join(f"{m} of stage {s}" for s, m in sorted(self)) or "none"
        raise KeyError(f"no tape of microbatch {key[1]} of stage {key[0]}; live are those of microbatch {live}")
