"""The description of a unit, the smallest part that a stage is cut from, before it is built.

A unit is a module whose forward takes (x, Sequences) and returns a tensor. A model's first unit takes token ids [T]
int64, all others the residual stream [T, D]; the last returns logits [T, V].
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Which part of a parameter this rank holds: one of `count` consecutive parts along one dimension.

    Where `count` does not divide the dimension, the first parts are longer by one; none is padded.

    axis: the ranks among whom it is shared. dim: the dimension that is cut. index: this part's number. count: how many
    parts there are; on fewer parts than ranks, neighbours hold the same one. full_shape: of the whole parameter.
    """

    axis: Literal["tp", "ep"]
    dim: int
    index: int
    count: int
    full_shape: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where the part begins along `dim`."""
        whole, longer = divmod(self.full_shape[self.dim], self.count)
        return self.index * whole + min(self.index, longer)

    @property
    def length(self) -> int:
        """How much of `dim` the part covers."""
        whole, longer = divmod(self.full_shape[self.dim], self.count)
        return whole + (self.index < longer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.length if dim == self.dim else size for dim, size in enumerate(self.full_shape))

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole parameter, or of its gradient or optimizer state, as a view."""
        return whole.narrow(self.dim, self.start, self.length)


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
