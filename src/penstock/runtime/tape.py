"""The tape: what a stage keeps of a microbatch from its F to its last backward action.

Shapes: T tokens of the microbatch, D hidden size.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.model import Lane, PendingGradient, enter_graph


@dataclass(slots=True)
class GraphSegment:
    """The piece of a lane between two cuts: its detached input and the place where its gradient enters.

    `leaf` is the segment's input, whose `.grad` becomes the gradient to hand on; None where the input takes none
    (token ids). `root` is the *edge* of the output in the autograd graph, not the output: so the output's data is
    free as soon as nothing else needs it.
    """

    leaf: Tensor | None
    root: GradientEdge

    def backward(self, grad: Tensor | None) -> Lane[Tensor | None]:
        """Backward from `grad` (None: the output is the loss); returns the leaf's gradient.

        Nothing is launched, so the lane never yields.
        """
        if grad is None:
            torch.autograd.backward(self.root)  # type: ignore[arg-type]  # the stubs lag behind GradientEdge
        else:
            enter_graph((self.root,), (grad,))
        return None if self.leaf is None else self.leaf.grad
        yield


@dataclass(slots=True)
class SeveralSegment:
    """A piece of a lane between two cuts that takes or gives several tensors; see `GraphSegment`."""

    #: the inputs; None for those that take no gradient
    leaves: tuple[Tensor | None, ...]
    #: the edges of the outputs that can have a gradient; None for one that has no graph
    roots: tuple[GradientEdge | None, ...]
    #: True if the input was one plain tensor
    takes_one: bool

    def backward(self, grad: Any) -> Lane[Any]:
        """Backward from the outputs' gradients (None: the output is the loss); returns those of the inputs.

        An input that the outputs do not depend on has the gradient zero.
        """
        if grad is None:
            torch.autograd.backward(self.roots)  # type: ignore[arg-type]
        else:
            grads = (grad,) if isinstance(grad, Tensor) else grad
            given = [(root, g) for root, g in zip(self.roots, grads, strict=True) if root is not None]
            enter_graph([root for root, _ in given], [g for _, g in given])
        if self.takes_one:
            return None if self.leaves[0] is None else self.leaves[0].grad
        found = (leaf for leaf in self.leaves if leaf is not None)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in found)
        yield


class Entry(Protocol):
    """A piece of a forward, as it lies on the tape for its backward."""

    def backward(self, grad: Tensor | None) -> Lane[Tensor | None]: ...


@dataclass(slots=True, weakref_slot=True)
class Tape:
    """A microbatch's segments in forward order, and the weight gradients that I left for W."""

    segments: list[Entry] = field(default_factory=list)
    weight_gradients: list[PendingGradient] = field(default_factory=list)

    def record(self, leaf: Tensor | None, output: Tensor) -> None:
        """Note the segment that led from `leaf` to `output`; only the output's gradient edge is kept.

        A segment without a leaf whose parameters are all frozen has no backward.
        """
        if leaf is None and not output.requires_grad:
            return
        self.segments.append(GraphSegment(leaf, get_gradient_edge(output)))

    def record_several(self, leaves: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], takes_one: bool) -> None:
        """Note a segment of several inputs or outputs."""
        floating = [output for output in outputs if output.is_floating_point()]
        roots = tuple(get_gradient_edge(output) if output.requires_grad else None for output in floating)
        self.segments.append(SeveralSegment(leaves, roots, takes_one))


@dataclass(eq=False)
class Tapes:
    """A rank's tapes: F makes one, backward actions read it, the last of them takes it away."""

    #: (stage, microbatch) -> tape
    _live: dict[tuple[int, int], Tape] = field(default_factory=dict)
    #: the largest number of tapes that were live at once
    peak: int = 0

    def __len__(self) -> int:
        return len(self._live)

    def make(self, stage: int, microbatch: int) -> Tape:
        """Add a new tape."""
        assert (stage, microbatch) not in self._live, f"stage {stage} already has a tape of microbatch {microbatch}"
        tape = self._live[stage, microbatch] = Tape()
        self.peak = max(self.peak, len(self._live))
        return tape

    def get(self, stage: int, microbatch: int) -> Tape:
        """The tape. Raises: KeyError before F has run, and after the last backward."""
        try:
            return self._live[stage, microbatch]
        except KeyError:
            raise self._missing(stage, microbatch) from None

    def take(self, stage: int, microbatch: int) -> Tape:
        """Remove the tape and return it. Raises: KeyError like `get`."""
        try:
            return self._live.pop((stage, microbatch))
        except KeyError:
            raise self._missing(stage, microbatch) from None

    def clear(self) -> None:
        """Drop all tapes."""
        self._live.clear()

    def _missing(self, stage: int, microbatch: int) -> KeyError:
        live = ", ".join(f"{m} of stage {s}" for s, m in sorted(self._live)) or "none"
        return KeyError(f"no tape of microbatch {microbatch} of stage {stage}; live are those of microbatch {live}")
