"""The description of a unit, the smallest part that a stage is cut from, before it is built.

A unit is a module whose forward takes (x, Sequences) and returns a tensor. A model's first unit takes token ids [T]
int64, all others the residual stream [T, D]; the last returns logits [T, V].
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.parallel.tensor_slice import Shard


@dataclass(frozen=True)
class Limits:
    """The inputs of a model's first unit: token ids below `vocab_size`, and sequences of at most `max_length`."""

    vocab_size: int
    max_length: int


@dataclass(frozen=True)
class UnitSpec:
    """The properties of a unit by which a model is cut into stages, and the functions that make it."""

    #: unique in the model; a parameter's full name is this name, a dot, and its name in the module
    name: str
    #: makes the module without initialising its weights; cheap under `torch.device("meta")`
    build: Callable[[], nn.Module]
    #: sets every parameter to the values of (seed, full name); meta ones become real on the CPU
    initialise: Callable[[nn.Module, int], None]
    #: elements of all its parameters on this rank, tied copies included
    num_parameters: int
    #: forward work on one token, in floating point operations of a matrix product
    flops_per_token: float
    #: name in the module of a parameter that is tied to another unit's -> the full name there
    tied: Mapping[str, str] = field(default_factory=dict)
    #: name in the module -> the part of the parameter that this rank holds
    sharding: Mapping[str, Shard] = field(default_factory=dict)
    #: names in the module of parameters that several ranks of the tensor-parallel group hold (all of them, or those
    #: with the same part) and whose gradients each computes in part: they are summed over those ranks
    partial: Set[str] = frozenset()
    #: if the unit adds auxiliary losses or counts tokens, in `Sequences.aux_losses`
    has_aux_losses: bool = False
    #: tokens beyond the next that the unit predicts in training
    num_ahead: int = 0
    #: turns the last unit's output into the logits from which a loss is computed, where it is not the logits
    present: Callable[[Tensor], Any] | None = None
    #: of the first unit; None where they are not known
    limits: Limits | None = None

    def full_name(self, parameter: str) -> str:
        """The name of a parameter in the whole model."""
        return f"{self.name}.{parameter}"
