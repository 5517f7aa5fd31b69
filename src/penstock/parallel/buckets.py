"""Flat tensors that hold many parameters each, and how parameters are laid out in them.

A place is padded to whole cache lines: a vectorised kernel that runs over a flat tensor then treats an element alike
wherever its parameter lies, and weights do not depend on how the model was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

CAP_BYTES = 25 * 2**20
_LINE_BYTES = 64


@dataclass(frozen=True)
class Reduction:
    """Over which ranks a gradient is summed.

    group: ranks that hold the same parameter and see other tokens. among: ranks that see the same tokens, and of which
    each has computed a part of the gradient alone; where it is given, they are summed first. Ranks of `among` may hold
    different ones of `num_parts` parts of a parameter, this rank part `part`: then only those with the same part are.
    sharded: each rank of `group` gets the sum of the part alone that it owns, and steps it (ZeRO-1). alone: of
    parameters that lie in a bucket of their own, the name that sets them apart. lent: the parameter is a copy whose
    values are another's storage, which is stepped there: here lies its gradient alone.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
    """

    group: dist.ProcessGroup | None = None
    among: dist.ProcessGroup | None = None
    part: int = 0
    num_parts: int = 1
    sharded: bool = False
    alone: str = ""
    lent: bool = False

    @property
    def num_owners(self) -> int:
        """Among how many ranks a bucket's elements are shared out for the optimizer's step."""
        return self.group.size() if self.sharded and self.group is not None else 1


@dataclass(frozen=True, eq=False)
class Fragment:
    """Elements `first` ... `last - 1` of a parameter; in what this rank owns of its bucket they lie from `start` on."""

    name: str
    parameter: nn.Parameter
    first: int
    last: int
    start: int

    def view(self, owned: Tensor) -> Tensor:
        """Give these elements of the owned part of a flat tensor of their bucket, flat."""
        return owned[self.start : self.start + self.last - self.first]

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.parameter.numel()


@dataclass(frozen=True, eq=False)
class Place:
    """Where one parameter lies in its bucket's flat tensors: the elements from `start` on, in its own shape."""

    name: str
    parameter: nn.Parameter
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """Give this parameter's part of a flat tensor of its bucket (parameters, gradients, optimizer state)."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are reduced by one collective and stepped by one kernel.

    parameters: flat, in the parameters' type. gradients: flat and of the same length; fp32 for 16-bit parameters,
    else the parameters' type. decays: whether weight decay applies, one answer for the whole bucket. reduction: over
    which ranks the gradients are summed, alike for all. The padding between places is zero in both. Of lent parameters
    there are gradients alone.
    """

    places: tuple[Place, ...]
    parameters: Tensor
    gradients: Tensor
    decays: bool
    reduction: Reduction

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat tensor of this bucket's length into the parameters' parts, by name."""
        return {place.name: place.view(flat) for place in self.places}

    @property
    def owned(self) -> slice:
        """The elements that this rank steps: all, unless the ranks that hold the same parameters share them out."""
        length = self.gradients.numel() // self.reduction.num_owners
        rank = self.reduction.group.rank() if self.reduction.num_owners > 1 and self.reduction.group else 0
        return slice(rank * length, (rank + 1) * length)

    @property
    def fragments(self) -> list[Fragment]:
        """The parameters' elements that this rank steps, in order; of some parameters none."""
        found = []
        for place in self.places:
            first = max(self.owned.start - place.start, 0)
            last = min(self.owned.stop - place.start, place.parameter.numel())
            if first < last or self.reduction.num_owners == 1:
                start = place.start + first - self.owned.start
                found.append(Fragment(place.name, place.parameter, first, last, start))
        return found


@dataclass(frozen=True)
class StateBytes:
    """What a rank holds throughout training, beside activations; the optimizer's are running means and fp32 masters."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def state_bytes(
    parameters: Sequence[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None = None,
    reductions: Mapping[str, Reduction] | None = None,
    cap_bytes: int = CAP_BYTES,
) -> StateBytes:
    """What `GradientBuckets` of these parameters, which may be without data, and their optimizer would hold."""
    total = StateBytes(0, 0, 0)
    for members in fill(members_of(parameters, group, reductions or {}), cap_bytes):
        parameter, length = members[0].parameter, _bucket_length(members)
        gradient_size, num_owners = _gradient_dtype(parameter).itemsize, members[0].reduction.num_owners
        # Two running means, and of 16-bit parameters the masters.
        num_copies = 3 if is_16_bit(parameter) else 2
        num_values = 0 if members[0].reduction.lent else length
        total += StateBytes(
            num_values * parameter.element_size(),
            length * gradient_size,
            num_values // num_owners * gradient_size * num_copies,
        )
    return total


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that is to be given a place in a bucket."""

    name: str
    parameter: nn.Parameter
    reduction: Reduction

    @property
    def kind(self) -> tuple[torch.dtype, torch.device, bool, Reduction]:
        return self.parameter.dtype, self.parameter.device, _decays(self.parameter), self.reduction


def members_of(
    parameters: Sequence[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None,
    reductions: Mapping[str, Reduction],
) -> list[Member]:
    ordinary = Reduction(group)
    return [Member(name, p, reductions.get(name, ordinary)) for name, p in parameters if p.requires_grad]


def fill(members: Sequence[Member], cap_bytes: int) -> list[list[Member]]:
    """Sort parameters into buckets, in order, one open bucket a kind at a time."""
    filled: list[list[Member]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device, bool, Reduction], tuple[list[Member], int]] = {}
    for member in members:
        need_bytes = _padded_length(member.parameter) * _gradient_dtype(member.parameter).itemsize
        held, held_bytes = open_bucket.get(member.kind, ([], cap_bytes))
        if held_bytes + need_bytes > cap_bytes:
            held, held_bytes = [], 0
            filled.append(held)
        held.append(member)
        open_bucket[member.kind] = (held, held_bytes + need_bytes)
    return filled


def make_bucket(members: Sequence[Member]) -> Bucket:
    """Move parameters into new flat storage, values kept, and lay out their gradients beside it.

    Lent parameters stay where they are.
    """
    first, reduction = members[0].parameter, members[0].reduction
    places, end = [], 0
    for member in members:
        places.append(Place(member.name, member.parameter, end))
        end += _padded_length(member.parameter)
    end = _bucket_length(members)
    flat = torch.zeros(0 if reduction.lent else end, dtype=first.dtype, device=first.device)
    gradients = torch.zeros(end, dtype=_gradient_dtype(first), device=first.device)
    for place in places if not reduction.lent else []:
        view = place.view(flat)
        view.copy_(place.parameter.detach())
        place.parameter.data = view
    return Bucket(tuple(places), flat, gradients, _decays(first), reduction)


def _bucket_length(members: Sequence[Member]) -> int:
    """Elements of a bucket: its parameters' padded lengths, and whole cache lines for every owner."""
    share = _LINE_BYTES // members[0].parameter.element_size() * members[0].reduction.num_owners
    return -(-sum(_padded_length(member.parameter) for member in members) // share) * share


def _padded_length(parameter: nn.Parameter) -> int:
    # In elements of the parameter's own type, which is never wider than its gradient's.
    line = _LINE_BYTES // parameter.element_size()
    return -(-parameter.numel() // line) * line


def _decays(parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2


def is_16_bit(parameter: nn.Parameter) -> bool:
    return parameter.element_size() == 2


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if is_16_bit(parameter) else parameter.dtype
