"""Auxiliary losses that units in the middle of a model add to the loss, and counts of tokens per expert.

An auxiliary loss enters autograd where it is computed: it is attached to a tensor on its way to the main loss, and in
backward it receives the gradient 1 when that tensor's gradient passes. It is already multiplied by the factor of the
microbatch's main loss, so the backward may run at any later time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
"""The label of a token that has no loss."""


class AuxLoss(enum.Enum):
    """The kinds of auxiliary losses."""

    BALANCE = "balance"
    SEQUENCE_BALANCE = "sequence_balance"
    GLOBAL_BALANCE = "global_balance"
    Z = "z"
    PREDICTION = "prediction"


@dataclass(frozen=True, eq=False)
class FutureTokens:
    """For each token of a microbatch, the token and label a fixed distance further on in its sequence.

    Past the end of the sequence the label is -100 and the token is the token itself.
    """

    #: int64
    tokens_T: Tensor
    labels_T: Tensor

    @classmethod
    def of(cls, tokens_T: Tensor, labels_T: Tensor, lengths: Sequence[int], distance: int) -> "FutureTokens":
        """The tokens and labels `distance` places further on, in packed sequences of these lengths."""
        left_T = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).to(tokens_T.device)
        inside_T = left_T >= distance
        tokens = tokens_T.roll(-distance).where(inside_T, tokens_T)
        return cls(tokens, labels_T.roll(-distance).masked_fill(~inside_T, IGNORED))

    def rows(self, rows: Tensor) -> "FutureTokens":
        """The same for only these tokens."""
        return FutureTokens(self.tokens_T.index_select(0, rows), self.labels_T.index_select(0, rows))


@dataclass(eq=False)
class AuxLosses:
    """The factors of one microbatch's loss, and the auxiliary losses and counts of the units on this rank.

    Activation checkpointing computes a unit again in backward; it then replaces its entries by the same values.
    """

    #: factor of the microbatch's main loss, which is a sum over labels; includes the loss scale
    factor: float
    #: factor of a sum over tokens: `factor` times the labels' weight per token of the step, so that a coefficient means
    #: the same whatever share of the tokens has a label
    per_token: float
    #: tokens one, two, ... places further on, for a head that predicts them; known on the last stage
    ahead: Sequence[FutureTokens] = ()
    #: (unit, kind) -> the loss, detached
    values: dict[tuple[nn.Module, AuxLoss], Tensor] = field(default_factory=dict)
    #: router's state -> tokens of each expert
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)

    def add(self, carrier: Tensor, loss: Tensor, owner: nn.Module, kind: AuxLoss, num_sharing: int = 1) -> Tensor:
        """Attach a loss, which includes its factor, to the carrier and return it.

        If `num_sharing` ranks compute the same loss, each records its share, because records are summed over ranks.
        """
        self.values[owner, kind] = loss.detach() / num_sharing
        return _AttachedLoss.apply(carrier, loss)  # pyright: ignore[reportReturnType]


class _AttachedLoss(torch.autograd.Function):
    """Returns the carrier; in backward the attached loss, a scalar, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
