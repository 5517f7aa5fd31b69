"""Initial values that depend on the seed and a parameter's full name alone.

They do not depend on the order in which units are built, the rank, the stage, the device or the dtype: values are drawn
in fp32 on the CPU from the parameter's own generator and then cast.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.parallel.tensor_slice import Shard


class Initial(Protocol):
    """A rule for a parameter's initial values."""

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Normal:
    """Independent normal values around zero."""

    std: float

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.full(shape, self.value, dtype=torch.float32, device="cpu")


def initial_values(full_name: str, shape: torch.Size, rule: Initial, seed: int) -> Tensor:
    """The values of the whole parameter of that name, in fp32 on the CPU."""
    digest = hashlib.sha256(f"{seed}:{full_name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return rule.draw(shape, generator)


@dataclass(frozen=True)
class Initialise:
    """Sets the parameters of a unit's module to the values of a seed; keys are names in the module."""

    #: parameter -> the distribution of its values

    rules: Mapping[str, Initial]
    #: parameter -> the full name that determines its values; of a tied one, the other's
    full_names: Mapping[str, str]
    #: parameter -> this rank's part of it
    sharding: Mapping[str, Shard] = field(default_factory=dict)

    def __call__(self, module: nn.Module, seed: int) -> None:
        initialise(module, self.rules, self.full_names, seed, self.sharding)


@torch.no_grad()
def initialise(
    module: nn.Module,
    rules: Mapping[str, Initial],
    full_names: Mapping[str, str],
    seed: int,
    sharding: Mapping[str, Shard] | None = None,
) -> None:
    """Set every parameter of the module to its initial values; for the arguments see `Initialise`.

    Parameters with storage are written in place; those on the meta device become real on the CPU, one at a time. Of a
    sharded parameter the whole is drawn and this rank's part kept, so each element has the same value in every layout.
    """
    for name, parameter in list(module.named_parameters()):
        shard = (sharding or {}).get(name)
        shape = parameter.shape if shard is None else torch.Size(shard.full_shape)
        values = initial_values(full_names[name], shape, rules[name], seed)
        if shard is not None:
            values = shard.of(values).clone()
        if parameter.is_meta:
            owner = module.get_submodule(name.rpartition(".")[0])
            real = nn.Parameter(values.to(parameter.dtype), parameter.requires_grad)
            owner.register_parameter(name.rpartition(".")[2], real)
        else:
            parameter.copy_(values)
