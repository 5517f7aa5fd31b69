"""Activation checkpointing: a unit keeps only its input and computes everything else again in backward."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.model.lanes import Driven, Lane, Turn
from penstock.model.segments import HasSegments
from penstock.model.sequences import Sequences


def recomputed(unit: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
    """The unit's output, bit for bit that of the plain call, with activations computed again in backward.

    The random state is replayed except for units with `has_randomness = False`, because saving it costs a copy each
    time. Deferred weight gradients keep the recomputed activations, so nothing is computed a third time.
    """
    preserve = bool(getattr(unit, "has_randomness", True))
    return cast(Tensor, checkpoint(unit, x, sequences, use_reentrant=False, preserve_rng_state=preserve))


class LaneModule(Protocol):
    """A unit whose forward is a lane."""

    def forward_lane(self, tape: Any, x: Tensor, sequences: Sequences) -> Lane[Tensor]: ...


@dataclass(frozen=True, eq=False)
class RecomputedLane:
    """A unit whose forward is a lane, which backward runs again, exchanges included."""

    unit: LaneModule

    def forward_lane(self, tape: HasSegments | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]:
        y = yield from self.unit.forward_lane(None, x, sequences)
        if tape is not None:
            device = x.device.type
            autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            tape.segments.append(RecomputedEntry(self.unit, x, sequences, autocast))
        return y


@dataclass(eq=False)
class RecomputedEntry:
    """The entry on a tape of a unit that is computed again in backward."""

    unit: LaneModule
    x: Tensor
    sequences: Sequences
    autocast: torch.autocast

    def forward_again(self, tape: HasSegments) -> Driven[Turn | None, Tensor]:
        """Run the unit's forward, which appends its backward to the tape."""
        return Driven(self.unit.forward_lane(tape, self.x, self.sequences), lambda: self.autocast)
