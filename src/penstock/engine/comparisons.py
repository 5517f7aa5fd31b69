"""The loss of a reward model, which learns from pairs of texts which of the two is better."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.data import NO_LABEL, PackedBatch
from penstock.engine.loss_metrics import Metric


def comparison_loss(output: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    """The sum over pairs of minus the logarithm of the probability that the better text wins, in nats.

    Args:
        output: the head's outputs [T, 1].
        microbatch: pairs, with a label at the one token of each text that is rated (`PairPacking`).

    Source: the Bradley-Terry model as in arXiv 2203.02155, equation 1.
    """
    rated = microbatch["labels"].to(output.device) != NO_LABEL
    rewards = output[rated, 0].to(torch.promote_types(output.dtype, torch.float32))
    margins = rewards[0::2] - rewards[1::2]
    reported = {"accuracy": (margins > 0).float().mean(), "margin": margins.mean(), "mean_reward": rewards.mean()}
    # Each microbatch has at least one pair.
    return -logsigmoid(margins).sum(), {
        name: Metric(value, "mean", weight=microbatch.num_items) for name, value in reported.items()
    }


def num_pairs(microbatch: PackedBatch) -> float:
    """The loss weight that belongs to `comparison_loss`."""
    return float(microbatch.num_items)
