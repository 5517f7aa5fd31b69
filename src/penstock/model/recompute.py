"""Activation checkpointing: a unit keeps only its input and computes everything else again in backward."""

from typing import cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.model.sequences import Sequences


def recomputed(unit: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
    """The unit's output, bit for bit that of the plain call, with activations computed again in backward.

    The random state is replayed except for units with `has_randomness = False`, because saving it costs a copy each
    time. Deferred weight gradients keep the recomputed activations, so nothing is computed a third time.
    """
    preserve = bool(getattr(unit, "has_randomness", True))
    return cast(Tensor, checkpoint(unit, x, sequences, use_reentrant=False, preserve_rng_state=preserve))
