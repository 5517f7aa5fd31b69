"""The router: each token's experts and their weights, and the losses and biases that balance the experts' load.

Everything is computed in at least fp32, whatever the model's dtype, and without autocast.

Shapes: T tokens, D hidden size, E experts, G groups, K active experts, B sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from penstock.model.linear import Linear, Matmul, autocast_to, dtype_of_sums
from penstock.model.sequences import AuxLoss, Sequences
from penstock.model.units import ModelGroups
from penstock.parallel.collectives import Collectives
from penstock.settings import ExpertConfig, GroupScore, Scores


@dataclass(frozen=True, eq=False)
class Choice:
    """Each token's experts [T, K] int64 in no particular order, their weights [T, K], and each expert's tokens [E]."""

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor


class Balance(nn.Module):
    """A router's state from step to step, updated by counts instead of gradients; fp32 in every model.

    bias [E]: added to the scores only for the choice of experts. load [E]: each expert's share of the last step's
    tokens, relative to the mean.

    Source: Wang et al. 2024 (arXiv 2408.15664), algorithm 1, for the bias.
    """

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.num_experts, self.bias_step = config.num_experts, config.bias_step
        self.bias = self._state(config) if config.bias_step else None
        self.load = self._state(config) if config.global_loss else None

    @staticmethod
    def _state(config: ExpertConfig) -> nn.Parameter:
        return nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)

    def no_counts(self, device: torch.device) -> Tensor:
        """Counts of no tokens."""
        return torch.zeros(self.num_experts, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, counts_E: Tensor) -> None:
        """Update from the number of tokens of each expert in one step, over all ranks and microbatches."""
        if self.bias is not None:
            below_mean_E = torch.sign(counts_E.sum() - counts_E * counts_E.numel())
            self.bias.add_(below_mean_E.to(self.bias.dtype), alpha=self.bias_step)
        if self.load is not None:
            self.load.copy_(_loads(counts_E[None])[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device but stay in fp32: 16 bits would lose small steps."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class Router(nn.Module):
    """Hidden states [T, D] -> each token's experts and weights."""

    def __init__(
        self, hidden_size: int, config: ExpertConfig, matmul: Matmul, groups: ModelGroups | None = None
    ) -> None:
        super().__init__()
        groups = groups or ModelGroups()
        # The ranks that hold the other tokens of the same sequences.
        self.token_peers, self.context = Collectives(groups.tp), Collectives(groups.cp)
        self.config = config
        self.logits = Linear(hidden_size, config.num_experts, matmul=matmul)
        # They are computed in fp32.
        self.logits.widens = True
        self.balance = Balance(config)

    def forward(self, h_TD: Tensor, sequences: Sequences | None = None, tokens: range = range(0)) -> Choice:
        """The choice; in training the auxiliary losses are attached to its weights.

        `tokens`: which of the sequences' tokens these are.
        """
        config, aux_losses = self.config, None if sequences is None else sequences.aux_losses
        with autocast_to(h_TD, None):
            logits_TE = self.logits(h_TD.to(dtype_of_sums(h_TD)))
            scores_TE = logits_TE.softmax(-1) if config.scores is Scores.SOFTMAX else logits_TE.sigmoid()
            experts_TK = self._best(scores_TE.detach())
            weights_TK = scores_TE.gather(1, experts_TK)
            if config.normalise:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _TINY)
            weights_TK = weights_TK * config.scaling_factor
            counts_E = torch.zeros(config.num_experts, dtype=torch.int64, device=h_TD.device)
            counts_E.index_add_(0, experts_TK.flatten(), torch.ones_like(experts_TK).flatten())
            if sequences is not None and aux_losses is not None:
                aux_losses.counts[self.balance] = counts_E
                choice = Choice(experts_TK, weights_TK, counts_E)
                for kind, loss in self._losses(choice, logits_TE, scores_TE, sequences, tokens):
                    weights_TK = aux_losses.add(weights_TK, loss * aux_losses.per_token, self, kind)
        return Choice(experts_TK, weights_TK, counts_E)

    def _best(self, scores_TE: Tensor) -> Tensor:
        """The highest-scoring experts of the best groups [T, K], with the bias added to the scores."""
        config = self.config
        if self.balance.bias is not None:
            scores_TE = scores_TE + self.balance.bias
        if config.num_active_groups < config.num_groups:
            scores_TGE = scores_TE.unflatten(1, (config.num_groups, -1))
            of_each = 1 if config.group_score is GroupScore.BEST else min(2, scores_TGE.shape[-1])
            of_groups_TG = scores_TGE.topk(of_each, dim=-1, sorted=False).values.sum(-1)
            kept = of_groups_TG.topk(config.num_active_groups, dim=-1, sorted=False).indices
            left_out_TG = torch.ones_like(of_groups_TG, dtype=torch.bool).scatter_(1, kept, False)
            scores_TE = scores_TGE.masked_fill(left_out_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(config.num_active, dim=-1, sorted=False).indices

    def _losses(
        self, choice: Choice, logits_TE: Tensor, shares_TE: Tensor, sequences: Sequences, tokens: range
    ) -> Iterator[tuple[AuxLoss, Tensor]]:
        """The auxiliary losses of a choice that was made from these logits and scores, in sums over tokens."""
        config = self.config
        if config.has_losses and config.scores is Scores.SIGMOID:
            shares_TE = shares_TE / (shares_TE.sum(-1, keepdim=True) + _TINY)
        if config.microbatch_loss:
            loads_1E = _loads(self._of_all_ranks(choice.counts_E[None]))
            yield AuxLoss.BALANCE, config.microbatch_loss * _imbalance(shares_TE, loads_1E)
        if config.sequence_loss:
            of_token_T, counts_BE = _sequence_counts(choice.experts_TK, sequences, tokens, config.num_experts)
            loads_TE = _loads(self._of_all_ranks(counts_BE))[of_token_T]
            yield AuxLoss.SEQUENCE_BALANCE, config.sequence_loss * _imbalance(shares_TE, loads_TE)
        if self.balance.load is not None:
            yield AuxLoss.GLOBAL_BALANCE, config.global_loss * _imbalance(shares_TE, self.balance.load[None])
        if config.z_loss:
            yield AuxLoss.Z, config.z_loss * logits_TE.logsumexp(-1).square().sum()

    def _of_all_ranks(self, counts: Tensor) -> Tensor:
        """The counts summed over all ranks that hold tokens of the same sequences."""
        return self.context.all_reduce(self.token_peers.all_reduce(counts).wait()).wait()


_TINY = 1e-20
"""Keeps a quotient finite where all sigmoids of a token underflow."""


def _loads(counts_BE: Tensor) -> Tensor:
    """Each expert's share of its row's tokens, relative to the mean."""
    counts_BE = counts_BE.to(torch.float64)
    return counts_BE * (counts_BE.shape[1] / counts_BE.sum(-1, keepdim=True))


def _imbalance(shares_TE: Tensor, loads: Tensor) -> Tensor:
    """Sum over tokens of sum_e share_e load_e: 1 a token if the load is even, E if one expert gets everything.

    Loads are constants to autograd. Source: DeepSeek-AI 2024 (arXiv 2412.19437), equations 17 to 20, for a sequence.
    """
    return (shares_TE * loads.to(shares_TE.dtype)).sum()


def _sequence_counts(
    experts_TK: Tensor, sequences: Sequences, tokens: range, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Each token's sequence [T], and the number of tokens of each sequence that go to each expert [B, E]."""
    device = experts_TK.device
    of_all_tokens = sequences.shared(
        "sequence of token",
        lambda: torch.repeat_interleave(sequences.cu_seqlens.diff().to(torch.int64), output_size=sequences.num_tokens),
    )
    of_token_T = of_all_tokens[tokens.start : tokens.stop]
    counts = torch.zeros(len(sequences.lengths) * num_experts, dtype=torch.int64, device=device)
    places_TK = of_token_T[:, None] * num_experts + experts_TK
    counts.index_add_(0, places_TK.flatten(), torch.ones_like(experts_TK).flatten())
    return of_token_T, counts.view(-1, num_experts)
