"""A unit: the smallest piece a stage is cut from, described before it is built.

A unit is a module whose forward takes (x, Sequences) and returns a tensor. The first of a model takes token ids
[T] int64, all others the residual stream [T, D]; the last gives logits [T, V].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class UnitSpec:
    """What must be known of a unit to cut the model into stages, and how to make it.

    Args:
        name: unique in the model; a parameter's full name is this name, a dot, and its name in the module.
        build: makes the module, its weights not initialised; cheap under `torch.device("meta")`.
        initialise: gives every parameter the values that belong to (seed, full name); meta ones become real on the CPU.
        num_parameters: elements of all its parameters, a tied copy included.
        flops_per_token: forward work on one token, in units of a floating point operation of a matrix product.
        tied: parameters which are one logical parameter with another unit's: name in the module -> full name there.
    """

    name: str
    build: Callable[[], nn.Module]
    initialise: Callable[[nn.Module, int], None]
    num_parameters: int
    flops_per_token: float
    tied: Mapping[str, str] = field(default_factory=dict)

    def full_name(self, parameter: str) -> str:
        """The name of a parameter in the whole model."""
        return f"{self.name}.{parameter}"
