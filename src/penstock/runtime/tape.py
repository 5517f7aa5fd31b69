"""The tape: what a stage keeps of a microbatch from its F to its last backward action.

Shapes: T tokens of the microbatch, D hidden size.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.model import Lane, PendingGradient, enter_graph


@dataclass(slots=True)
class GraphSegment:
    """The piece of a lane between two cuts: its detached input and the place where its gradient enters.

    `leaf` is the segment's input, whose `.grad` becomes the gradient to hand on; None where the input takes none
    (token ids). `root` is the *edge* of the output in the autograd graph, not the output: so the output's data is
    free as soon as nobody else wants it.
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


class Entry(Protocol):
    """What a lane leaves on the tape: a piece of forward that can be undone."""

    def backward(self, grad: Tensor | None) -> Lane[Tensor | None]: ...


@dataclass(slots=True, weakref_slot=True)
class Tape:
    """A microbatch's segments in forward order, and the weight gradients that I left for W."""

    segments: list[Entry] = field(default_factory=list)
    weight_gradients: list[PendingGradient] = field(default_factory=list)

    def record(self, leaf: Tensor | None, output: Tensor) -> None:
        """Note the segment that led from `leaf` to `output`; only the output's gradient edge is kept."""
        self.segments.append(GraphSegment(leaf, get_gradient_edge(output)))


class Tapes:
    """A rank's tapes by stage and microbatch: made by F, given out while a backward is due, let go by the last one."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Tape] = {}
        self.peak = 0

    def __len__(self) -> int:
        return len(self._held)

    def make(self, stage: int, microbatch: int) -> Tape:
        """A new tape, held from now on."""
        assert (stage, microbatch) not in self._held, f"stage {stage} already has a tape of microbatch {microbatch}"
        tape = self._held[stage, microbatch] = Tape()
        self.peak = max(self.peak, len(self._held))
        return tape

    def get(self, stage: int, microbatch: int) -> Tape:
        """The tape. Raises KeyError where there is none: F has not run, or the last backward has."""
        self._check(stage, microbatch)
        return self._held[stage, microbatch]

    def take(self, stage: int, microbatch: int) -> Tape:
        """The tape, no longer held here. Raises KeyError like `get`."""
        self._check(stage, microbatch)
        return self._held.pop((stage, microbatch))

    def clear(self) -> None:
        """Let go of all of them."""
        self._held.clear()

    def _check(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) not in self._held:
            held = ", ".join(f"{m} of stage {s}" for s, m in sorted(self._held)) or "none"
            raise KeyError(f"no tape of microbatch {microbatch} of stage {stage}; held are those of microbatch {held}")
