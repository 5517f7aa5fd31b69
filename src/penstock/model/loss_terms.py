"""Terms that units in the middle of a model add to the loss, and what they count of a microbatch's tokens.

A term enters autograd where it is made: a tensor on its way to the loss carries it, and in backward the term gets
the gradient 1 whenever that microbatch's backward passes. Its factor stands in it already, the one of the
microbatch's main loss, so a backward may come as late as the schedule likes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class LossTerms:
    """What one microbatch's loss is multiplied by, and what the units on this rank added to it and counted.

    What is computed again in backward replaces what was noted in forward by the same.

    Args:
        factor: of the microbatch's main loss, a sum over tokens; loss scale included.
        weight: the microbatch's own in the loss's denominator, so that `factor * weight` is its share of the step.
    """

    factor: float
    weight: float
    values: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)

    def add_mean(self, carrier: Tensor, mean: Tensor, owner: nn.Module, name: str) -> Tensor:
        """The carrier, on which the backward of a mean over the microbatch's tokens hangs from now on."""
        return self._add(carrier, mean * (self.factor * self.weight), owner, name)

    def add_sum(self, carrier: Tensor, total: Tensor, owner: nn.Module, name: str) -> Tensor:
        """The same for a sum over tokens."""
        return self._add(carrier, total * self.factor, owner, name)

    def _add(self, carrier: Tensor, term: Tensor, owner: nn.Module, name: str) -> Tensor:
        self.values[owner, name] = term.detach()
        return _Carried.apply(carrier, term)  # pyright: ignore[reportReturnType]


class _Carried(torch.autograd.Function):
    """The first argument as it is; in backward the second, a scalar that is part of the loss, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return grads[0], torch.ones_like(term)
