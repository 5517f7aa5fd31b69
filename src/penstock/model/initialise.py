"""Initial values that depend on the seed and a parameter's full name alone.

Not on the order in which units are built, nor on the rank, the stage, the device or the dtype: values are drawn in
fp32 on the CPU from the parameter's own generator and then cast.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.model.units import Shard


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
    """The values of the parameter of that name: fp32, on the CPU, whole."""
    digest = hashlib.sha256(f"{seed}:{full_name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return rule.draw(shape, generator)


@dataclass(frozen=True)
class Initialise:
    """Gives a unit's module the values that belong to a seed; everything is by the parameter's name in the module.

    rules: how values are drawn. full_names: of the parameter that the values belong to. sharding: see `initialise`.
    """

    rules: Mapping[str, Initial]
    full_names: Mapping[str, str]
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
    """Give every parameter of the module its initial values.

    Parameters with storage are written in place, wherever it is; those on the meta device become real on the CPU,
    one at a time. `rules`, `full_names` and `sharding` are by the parameter's name in the module. A parameter that is
    tied to another bears the other's full name, and so takes its values. Of a parameter that is shared with other
    ranks the whole is drawn and the part kept: so each element has the same value in every layout.
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
