"""A unit, the smallest part of a stage, before it is built: its description, initial values, and who shares it.

A unit is a module whose forward takes (x, Sequences) and returns a tensor. A model's first unit takes token ids [T]
int64, all others the residual stream [T, D]; the last returns logits [T, V].

Initial values depend on the seed and a parameter's full name alone, not on the order in which units are built, the
rank, the stage, the device or the dtype: values are drawn in fp32 on the CPU from the parameter's own generator and
then cast.
"""

import hashlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.parallel.tensor_slice import Shard
from penstock.settings import ContextForm


@dataclass(frozen=True)
class Limits:
    """The inputs of a model's first unit: token ids below `vocab_size`, and sequences of at most `max_length`."""

    vocab_size: int
    max_length: int
    #: True if labels are token ids too
    bounds_labels: bool = True
    #: True if the model turns its tokens by the batch's `positions`
    reads_positions: bool = True
    #: the longest sequence to which a token can be added without a change to those before it; None for `max_length`
    max_generated_length: int | None = None


@dataclass(frozen=True)
class UnitSpec:
    """The properties of a unit that determine how a model is cut into stages, and the functions that make it."""

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
    #: of it, what is left out for a token whose output nobody reads, as a loss one without a label (see
    #: `Sequences.read_rows`); 0 for a unit that computes all tokens
    flops_if_read: float = field(default=0.0, kw_only=True)
    #: name in the module of a parameter that is tied to another unit's -> the full name there
    tied: Mapping[str, str] = field(default_factory=dict)
    #: name in the module -> the part of the parameter that this rank holds
    sharding: Mapping[str, Shard] = field(default_factory=dict)
    #: names in the module of parameters that several ranks of the tensor-parallel group hold (all of them, or those
    #: with the same part) and whose gradients each computes in part: they are summed over those ranks
    partial: Set[str] = frozenset()
    #: True if the unit adds auxiliary losses or counts tokens, in `Sequences.aux_losses`
    has_aux_losses: bool = False
    #: tokens beyond the next that the unit predicts in training
    num_ahead: int = 0
    #: turns the last unit's output into the logits from which a loss is computed; None if it is the logits
    to_output: Callable[[Tensor], Any] | None = None
    #: the first unit's limits; None if unknown
    limits: Limits | None = None
    #: True for a user's own layer, whose output may be more than the plain stream
    is_own: bool = False

    @property
    def layer(self) -> int | None:
        """The index of its layer, as in layers.3.attention; None for a unit outside of all layers."""
        layer = self.name.split(".")[1:2]
        return int(layer[0]) if layer and layer[0].isdigit() else None

    @property
    def kind(self) -> str:
        """The last part of its name, as in layers.3.attention."""
        return self.name.rpartition(".")[2]

    def work(self, label_share: float) -> float:
        """Forward work on one token where this share of tokens has a label."""
        return self.flops_per_token - (1 - label_share) * self.flops_if_read

    def full_name(self, parameter: str) -> str:
        """The name of a parameter in the whole model."""
        return f"{self.name}.{parameter}"


@dataclass(frozen=True)
class Initial:
    """A rule for a parameter's initial values: independent normal ones around `mean`, or all equal to it."""

    mean: float = 0.0
    std: float = 0.0

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        values = torch.full(shape, self.mean, dtype=torch.float32, device="cpu")
        return values.normal_(self.mean, self.std, generator=generator) if self.std else values


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
    #: parameter -> the full name that determines its values; for a tied one, the other's
    full_names: Mapping[str, str]
    #: parameter -> this rank's part of it
    sharding: Mapping[str, Shard]

    @torch.no_grad()
    def __call__(self, module: nn.Module, seed: int) -> None:
        """Set every parameter of the module to its initial values.

        Parameters with storage are written in place; those on the meta device become real on the CPU, one at a time. A
        sharded parameter is drawn whole and this rank's part kept, so each element has the same value in every layout.
        """
        for name, parameter in list(module.named_parameters()):
            shard = self.sharding.get(name)
            shape = parameter.shape if shard is None else torch.Size(shard.full_shape)
            values = initial_values(self.full_names[name], shape, self.rules[name], seed)
            if shard is not None:
                values = shard.of(values).clone()
            if parameter.is_meta:
                owner = module.get_submodule(name.rpartition(".")[0])
                real = nn.Parameter(values.to(parameter.dtype), parameter.requires_grad)
                owner.register_parameter(name.rpartition(".")[2], real)
            else:
                parameter.copy_(values)


# ---- The process groups over which a model's layers, sequences and experts are split


@dataclass(frozen=True)
class PlannedGroup:
    """A place in a group that does not exist, enough to build a rank's modules and count their elements."""

    num_ranks: int
    place: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True, eq=False)
class ModelGroups:
    """The process groups in which a model's units communicate; a group is None if this rank would be alone in it."""

    #: tensor parallelism: its ranks split every layer
    tp: ProcessGroup | None = None
    #: context parallelism: its ranks split every sequence's tokens
    cp: ProcessGroup | None = None
    #: expert parallelism: its ranks split every layer's experts
    ep: ProcessGroup | None = None
    #: the form of attention between the ranks of cp
    context_form: ContextForm = ContextForm.RING

    @classmethod
    def planned(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        form: ContextForm = ContextForm.RING,
        places: tuple[int, int, int] = (0, 0, 0),
    ) -> "ModelGroups":
        """Take places, the first by default, in groups that do not exist, to find out what a rank would hold."""
        # Building modules sends nothing, so a size and a place are enough.
        sizes = zip((tp, cp, ep), places, strict=True)
        return cls(
            *(None if size == 1 else cast(ProcessGroup, PlannedGroup(size, place)) for size, place in sizes),
            context_form=form,
        )

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size()

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp is None else self.tp.rank()

    @property
    def cp_size(self) -> int:
        return 1 if self.cp is None else self.cp.size()

    @property
    def ep_size(self) -> int:
        return 1 if self.ep is None else self.ep.size()

    @property
    def ep_rank(self) -> int:
        return 0 if self.ep is None else self.ep.rank()
