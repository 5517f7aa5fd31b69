"""Parameters and gradients in flat buckets.

Every parameter is a view of a bucket's flat tensor and so is its gradient, at the same offset. Each parameter's place
is padded to whole cache lines, so a vectorised kernel that runs over a flat tensor treats an element alike wherever its
parameter lies, and weights do not depend on how the model was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

CAP_BYTES = 25 * 2**20
_LINE_BYTES = 64

GroupOf = Callable[[str, nn.Parameter], int]
"""A function from a parameter, with its full name, to the number of its parameter group."""


@dataclass(frozen=True)
class Reduction:
    """The ranks over which a gradient is summed.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
    """

    #: ranks that hold the same parameter and see different tokens
    group: dist.ProcessGroup | None = None
    #: ranks that see the same tokens and each compute a part of the gradient, which is summed over them first
    among: dist.ProcessGroup | None = None
    #: this rank's part if ranks of `among` hold different parts of the parameter; only equal parts are summed
    part: int = 0
    #: the number of these parts
    num_parts: int = 1
    #: True if each rank of `group` gets the sum of only the elements that it owns, and steps them (ZeRO-1)
    sharded: bool = False
    #: if sharded by whole parameters: the rank of `group` that owns this one
    owner: int | None = None
    #: parameters with different names here never share a bucket
    alone: str = ""
    #: True if the parameter is a copy in another's storage, which is stepped there; only its gradient lies here
    lent: bool = False

    @property
    def num_owners(self) -> int:
        """The number of ranks that divide a bucket's elements among them for the optimizer's step."""
        return self.group.size() if self.sharded and self.owner is None and self.group is not None else 1

    @property
    def is_mine(self) -> bool:
        """False if another rank of `group` owns the whole parameter."""
        return self.owner is None or self.group is None or self.group.rank() == self.owner


@dataclass(frozen=True, eq=False)
class Place:
    """Elements of a parameter in a flat tensor."""

    #: the parameter's full name
    name: str
    parameter: nn.Parameter
    #: the position of the first of these elements in the flat tensor
    start: int
    #: the elements `first` ... `last - 1` of the flattened parameter
    first: int
    last: int

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter, start: int) -> Place:
        return cls(name, parameter, start, 0, parameter.numel())

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """These elements of a flat tensor, flat."""
        return flat[self.start : self.start + self.last - self.first]

    def cut(self, owned: slice) -> Place:
        """The part of this place within `owned`, counted from there; it may be empty."""
        first = max(owned.start - self.start, self.first)
        last = min(owned.stop - self.start, self.last)
        return Place(self.name, self.parameter, self.start + first - owned.start, first, last)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are reduced by one collective and stepped by one kernel."""

    #: the whole parameters, in the order of their offsets
    places: tuple[Place, ...]
    #: flat, in the parameters' type, zero between places; empty for lent parameters
    parameters: Tensor
    #: flat and of the same length, fp32 for 16-bit parameters, else in the parameters' type; zero between places
    gradients: Tensor
    #: the number of the parameter group to which all of them belong
    group: int
    #: the ranks over which the gradients are summed
    reduction: Reduction

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of a flat tensor of this bucket's length (parameters, gradients), in their shapes."""
        return {place.name: place.view(flat).view(place.parameter.shape) for place in self.places}

    @property
    def owned(self) -> slice:
        """The elements that this rank steps: all, unless ranks with the same parameters divide them (ZeRO-1)."""
        if not self.reduction.is_mine:
            return slice(0, 0)
        length = self.gradients.numel() // self.reduction.num_owners
        rank = self.reduction.group.rank() if self.reduction.num_owners > 1 and self.reduction.group else 0
        return slice(rank * length, (rank + 1) * length)

    @property
    def owned_places(self) -> list[Place]:
        """The parameters' elements that this rank steps, placed within `owned`; some parameters may have none."""
        if self.reduction.num_owners == 1:
            return list(self.places) if self.reduction.is_mine else []
        cut = [place.cut(self.owned) for place in self.places]
        return [place for place in cut if place.first < place.last]


@dataclass(frozen=True)
class StateBytes:
    """The bytes of a rank's training state, without activations."""

    parameters: int
    gradients: int
    #: running means and fp32 masters
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
    group_of: GroupOf | None = None,
    num_states: Callable[[int], int] = lambda number: 2,
) -> StateBytes:
    """Compute the bytes that `GradientBuckets` of these parameters, which may be on `meta`, and their optimizer take.

    num_states: from the number of a parameter group, the number of its state tensors as long as the parameters.
    """
    total = StateBytes(sum(p.nbytes for _, p in parameters if not p.requires_grad), 0, 0)
    for entries in fill_buckets(unplaced(parameters, group, reductions or {}, group_of), CAP_BYTES):
        parameter, length = entries[0].parameter, _bucket_length(entries)
        gradient_size, num_owners = _gradient_dtype(parameter).itemsize, entries[0].reduction.num_owners
        num_copies = num_states(entries[0].group) + is_16_bit(parameter)  # the latter have masters
        num_values = 0 if entries[0].reduction.lent else length
        num_stepped = num_values // num_owners if entries[0].reduction.is_mine else 0
        total += StateBytes(
            num_values * parameter.element_size(), length * gradient_size, num_stepped * gradient_size * num_copies
        )
    return total


BucketKind = tuple[torch.dtype, torch.device, int, Reduction]
"""Parameters of different kinds never share a bucket."""


@dataclass(frozen=True, eq=False)
class Unplaced:
    """A parameter that has no place in a bucket yet."""

    name: str
    parameter: nn.Parameter
    reduction: Reduction
    group: int

    @property
    def kind(self) -> BucketKind:
        return self.parameter.dtype, self.parameter.device, self.group, self.reduction


def unplaced(
    parameters: Sequence[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None,
    reductions: Mapping[str, Reduction],
    group_of: GroupOf | None = None,
) -> list[Unplaced]:
    """The parameters that require a gradient."""
    ordinary, number = Reduction(group), group_of or matrices_apart
    return [
        Unplaced(name, p, reductions.get(name, ordinary), number(name, p)) for name, p in parameters if p.requires_grad
    ]


def matrices_apart(name: str, parameter: nn.Parameter) -> int:
    """Number two groups of parameters: 0 those of two dimensions or more, 1 norms and biases."""
    return 0 if parameter.ndim >= 2 else 1


def fill_buckets(entries: Sequence[Unplaced], cap_bytes: int) -> list[list[Unplaced]]:
    """Sort parameters into buckets, in order, with one open bucket of each kind."""
    filled: list[list[Unplaced]] = []
    open_bucket: dict[BucketKind, tuple[list[Unplaced], int]] = {}
    for entry in entries:
        need_bytes = _padded_length(entry.parameter) * _gradient_dtype(entry.parameter).itemsize
        bucket, bucket_bytes = open_bucket.get(entry.kind, ([], cap_bytes))
        if bucket_bytes + need_bytes > cap_bytes:
            bucket, bucket_bytes = [], 0
            filled.append(bucket)
        bucket.append(entry)
        open_bucket[entry.kind] = (bucket, bucket_bytes + need_bytes)
    return filled


def make_bucket(entries: Sequence[Unplaced]) -> Bucket:
    """Move parameters, with their values, into new flat storage, and lay out their gradients beside it.

    Lent parameters keep their storage.
    """
    first, reduction = entries[0].parameter, entries[0].reduction
    places, end = [], 0
    for entry in entries:
        places.append(Place.whole(entry.name, entry.parameter, end))
        end += _padded_length(entry.parameter)
    end = _bucket_length(entries)
    flat = torch.zeros(0 if reduction.lent else end, dtype=first.dtype, device=first.device)
    gradients = torch.zeros(end, dtype=_gradient_dtype(first), device=first.device)
    for place in places if not reduction.lent else []:
        view = place.view(flat).view(place.parameter.shape)
        view.copy_(place.parameter.detach())
        place.parameter.data = view
    return Bucket(tuple(places), flat, gradients, entries[0].group, reduction)


def _bucket_length(entries: Sequence[Unplaced]) -> int:
    """The elements of a bucket: its parameters' padded lengths, rounded to whole cache lines for every owner."""
    share = _LINE_BYTES // entries[0].parameter.element_size() * entries[0].reduction.num_owners
    return -(-sum(_padded_length(entry.parameter) for entry in entries) // share) * share


def _padded_length(parameter: nn.Parameter) -> int:
    # In elements of the parameter's own type, which is never wider than its gradient's.
    line = _LINE_BYTES // parameter.element_size()
    return -(-parameter.numel() // line) * line


def is_16_bit(parameter: nn.Parameter) -> bool:
    return parameter.element_size() == 2


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if is_16_bit(parameter) else parameter.dtype
