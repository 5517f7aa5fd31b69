"""Terms that units in the middle of a model add to the loss, and what they count of a microbatch's tokens.

A term enters autograd where it is made: a tensor on its way to the loss carries it, and in backward the term gets
the gradient 1 whenever that microbatch's backward passes. Its factor stands in it already, the one of the
microbatch's main loss, so a backward may come as late as the schedule likes.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.blocks import IGNORED


class Term(enum.Enum):
    """The kinds of terms."""

    BALANCE = "balance"
    SEQUENCE_BALANCE = "sequence_balance"
    GLOBAL_BALANCE = "global_balance"
    Z = "z"
    PREDICTION = "prediction"


@dataclass(frozen=True, eq=False)
class Ahead:
    """For each token of a microbatch the token, and the label, that stand some places further on in its sequence.

    tokens_T, labels_T: int64; where the sequence has ended before, the label is -100 and the token that itself.
    """

    tokens_T: Tensor
    labels_T: Tensor

    @classmethod
    def of(cls, tokens_T: Tensor, labels_T: Tensor, lengths: Sequence[int], distance: int) -> "Ahead":
        """Of packed sequences of these lengths."""
        left_T = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).to(tokens_T.device)
        inside_T = left_T >= distance
        tokens = tokens_T.roll(-distance).where(inside_T, tokens_T)
        return cls(tokens, labels_T.roll(-distance).masked_fill(~inside_T, IGNORED))

    def rows(self, rows: Tensor) -> "Ahead":
        """Of these tokens only."""
        return Ahead(self.tokens_T.index_select(0, rows), self.labels_T.index_select(0, rows))


@dataclass(eq=False)
class LossTerms:
    """What one microbatch's loss is multiplied by, and what the units on this rank added to it and counted.

    What is computed again in backward replaces what was noted in forward by the same.

    Args:
        factor: of the microbatch's main loss, a sum over labels; loss scale included.
        per_token: the same for a sum over tokens: the factor times the labels' weight for each token of the step, so
            that a coefficient means the same whatever part of the tokens has a label.
        ahead: one, two, ... tokens further on than the next one's predecessor, for a head that predicts them; known
            where the last stage is.
    """

    factor: float
    per_token: float
    ahead: Sequence[Ahead] = ()
    values: dict[tuple[nn.Module, Term], Tensor] = field(default_factory=dict)
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)

    def add(self, carrier: Tensor, term: Tensor, owner: nn.Module, kind: Term, num_sharing: int = 1) -> Tensor:
        """The carrier, on which the backward of a term hangs from now on; its factor stands in the term.

        `num_sharing` ranks that come to the same term each note their share of it, for notes are added up.
        """
        self.values[owner, kind] = term.detach() / num_sharing
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
