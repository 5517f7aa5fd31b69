"""A unit: the smallest piece a stage is cut from, described before it is built.

A unit is a module whose forward takes (x, Sequences) and returns a tensor. The first of a model takes token ids
[T] int64, all others the residual stream [T, D]; the last gives logits [T, V].
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
    """What a model's first unit takes: token ids below `vocab_size`, and sequences of at most `max_length`."""

    vocab_size: int
    max_length: int


@dataclass(frozen=True)
class UnitSpec:
    """What must be known of a unit to cut the model into stages, and how to make it.

    Args:
        name: unique in the model; a parameter's full name is this name, a dot, and its name in the module.
        build: makes the module, its weights not initialised; cheap under `torch.device("meta")`.
        initialise: gives every parameter the values that belong to (seed, full name); meta ones become real on the CPU.
        num_parameters: elements of all its parameters on this rank, a tied copy included.
        flops_per_token: forward work on one token, in units of a floating point operation of a matrix product.
        tied: parameters which are one logical parameter with another unit's: name in the module -> full name there.
        sharding: parameters of which this rank holds a part: name in the module -> which.
        partial: names in the module of parameters that several ranks of the tp group hold alike (all of them, or those
            with the same part) and whose gradients each computes in part: they are summed over those ranks.
        notes_terms: whether the unit adds to the loss or counts tokens, in `Sequences.terms`.
        present: what the last unit's output is to those who make a loss of it, where it is not the logits themselves.
        limits: of the first unit, what it takes; None where that is not known.
    """

    name: str
    build: Callable[[], nn.Module]
    initialise: Callable[[nn.Module, int], None]
    num_parameters: int
    flops_per_token: float
    tied: Mapping[str, str] = field(default_factory=dict)
    sharding: Mapping[str, Shard] = field(default_factory=dict)
    partial: Set[str] = frozenset()
    notes_terms: bool = False
    num_ahead: int = 0
    present: Callable[[Tensor], Any] | None = None
    limits: Limits | None = None

    def full_name(self, parameter: str) -> str:
        """The name of a parameter in the whole model."""
        return f"{self.name}.{parameter}"
