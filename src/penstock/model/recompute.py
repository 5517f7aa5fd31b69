"""Activation recompute: a unit keeps its input alone, and computes the rest again when its backward needs it."""

from typing import cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.model.sequences import Sequences


def recomputed(unit: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
    """The unit's output, with its activations computed again in backward; bit for bit what the plain call gives.

    The random state is replayed for every unit but those that say `has_randomness = False`, for keeping it costs a
    copy each time. Weight gradients that wait keep the recomputed activations, so nothing is computed a third time.
    """
    preserve = bool(getattr(unit, "has_randomness", True))
    return cast(Tensor, checkpoint(unit, x, sequences, use_reentrant=False, preserve_rng_state=preserve))
