"""One stage's gradients: accumulated in flat buckets, and summed over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.parallel.collectives import Collectives, Handle, Observer

# ---- Parameters and gradients in flat buckets


_CAP_BYTES = 25 * 2**20
_LINE_BYTES = 64
_TRAINED = (*(torch.float32, torch.float64, torch.bfloat16, torch.float16), *(torch.complex64, torch.complex128))

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

    @cached_property
    def num_owners(self) -> int:
        """The number of ranks that divide a bucket's elements among them for the optimizer's step."""
        return self.group.size() if self.sharded and self.owner is None and self.group is not None else 1

    @cached_property
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

    @cached_property
    def owned(self) -> slice:
        """The elements that this rank steps: all, unless ranks with the same parameters divide them (ZeRO-1)."""
        if not self.reduction.is_mine:
            return slice(0, 0)
        length = self.gradients.numel() // self.reduction.num_owners
        rank = self.reduction.group.rank() if self.reduction.num_owners > 1 and self.reduction.group else 0
        return slice(rank * length, (rank + 1) * length)

    @cached_property
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


def matrices_apart(name: str, parameter: nn.Parameter) -> int:
    """Number two groups of parameters: 0 those of two dimensions or more, 1 norms and biases."""
    return 0 if parameter.ndim >= 2 else 1


def in_place_of(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter of these values, with the attributes that a user has given the other."""
    made = nn.Parameter(values, parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


BucketKind = tuple[int, Reduction, torch.dtype, torch.device]
"""Parameter group, ranks, type and device: parameters of different kinds never share a bucket."""


def fill_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]],
    kind_of: Callable[[str, nn.Parameter], BucketKind],
    cap_bytes: int | None,
) -> tuple[Bucket, ...]:
    """Move those parameters that require a gradient into buckets, in order, with one open bucket of each kind.

    cap_bytes: see `GradientBuckets`.

    Raises: ValueError for a dtype in which no gradient can be summed.
    """
    filled: list[tuple[BucketKind, list[tuple[str, nn.Parameter]]]] = []
    open_bucket: dict[BucketKind, tuple[list[tuple[str, nn.Parameter]], int]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in _TRAINED:
            possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TRAINED)
            raise ValueError(
                f"{name} is of {parameter.dtype}, in which nothing can be trained; possible are {possible}, or to "
                "freeze it (requires_grad_(False))"
            )
        kind = kind_of(name, parameter)
        need_bytes = _padded_length(parameter) * _gradient_dtype(parameter).itemsize
        most_bytes = _cap_bytes(kind) if cap_bytes is None else cap_bytes
        members, used_bytes = open_bucket.get(kind, ([], most_bytes))
        if used_bytes + need_bytes > most_bytes:
            members, used_bytes = [], 0
            filled.append((kind, members))
        members.append((name, parameter))
        open_bucket[kind] = (members, used_bytes + need_bytes)
    return tuple(make_bucket(members, group, reduction) for (group, reduction, _, _), members in filled)


def _cap_bytes(kind: BucketKind) -> int:
    """The bytes of gradients that a bucket has at most.

    On a device the pieces that ranks pass on in a ring must be long enough for its links, and launches few.

    Source: Megatron-LM, the default of `bucket_size` of its distributed data parallelism.
    """
    _, reduction, dtype, device = kind
    if device.type == "cpu":
        return _CAP_BYTES
    num_ranks = 1 if reduction.group is None else reduction.group.size()
    return max(40_000_000, 1_000_000 * num_ranks) * max(dtype.itemsize, 4)


def make_bucket(members: Sequence[tuple[str, nn.Parameter]], group: int, reduction: Reduction) -> Bucket:
    """Move parameters, with their values, into new flat storage, and lay out their gradients beside it.

    Lent parameters keep their storage.
    """
    places, end, first = [], 0, members[0][1]
    for name, parameter in members:
        places.append(Place.whole(name, parameter, end))
        end += _padded_length(parameter)
    # Whole cache lines for every owner.
    share = _LINE_BYTES // first.element_size() * reduction.num_owners
    end = -(-end // share) * share
    flat = torch.zeros(0 if reduction.lent else end, dtype=first.dtype, device=first.device)
    gradients = torch.zeros(end, dtype=_gradient_dtype(first), device=first.device)
    for place in places if not reduction.lent else []:
        view = place.view(flat).view(place.parameter.shape)
        view.copy_(place.parameter.detach())
        place.parameter.data = view
    return Bucket(tuple(places), flat, gradients, group, reduction)


def _padded_length(parameter: nn.Parameter) -> int:
    # In elements of the parameter's own type, which is never wider than its gradient's.
    line = _LINE_BYTES // parameter.element_size()
    return -(-parameter.numel() // line) * line


def is_16_bit(parameter: nn.Parameter) -> bool:
    return parameter.element_size() == 2


def as_real(values: Tensor) -> Tensor:
    """The values; complex ones [...] as a view of pairs of real ones [..., 2], as which they are added up."""
    return torch.view_as_real(values) if values.is_complex() else values


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if is_16_bit(parameter) else parameter.dtype


# ---- One stage's gradients: accumulated in flat buckets, and summed over ranks


class GradientBuckets:
    """Owner of one stage's flat parameters and gradients; gradients accumulate in at least fp32, summed over ranks.

    `parameters` are (full name, parameter) pairs; those that require no gradient are left alone. From now on a
    parameter's data is a view of flat storage with its values, and `parameter.grad` the view in which autograd
    accumulates its gradient; that of a 16-bit parameter is fp32. One that no backward reaches has the gradient zero.

    Parameters fill buckets in the order given, up to `cap_bytes` of gradients each (left out: 25 MiB on a CPU, on a
    device more, by the number of ranks); a larger one has a bucket of its own. A bucket never mixes types, devices,
    reductions or parameter groups, which `group_of` numbers (left out, norms and biases, of one dimension, are set
    apart). `reductions` are by full name; the other gradients are summed over `group`.

    A step is ``zero_(); backward passes; launch(); ...; wait()``. `zero_` also cleans up after a step that failed
    anywhere in between. If ranks share the step (ZeRO-1), `gather` follows it, and `settle` before parameters are read.

    `observer` sees each reduction that is launched.
    """

    #: flat parameters and gradients, in the order in which their reductions are launched
    buckets: tuple[Bucket, ...]
    #: sees every collective
    _observer: Observer | None
    #: the reductions that `launch` has started
    _pending: list[Handle[Tensor]]
    #: the parameters that `gather` has started to collect
    _gathering: list[Handle[Tensor]]
    #: full name -> the parameter's gradient, a view of its bucket: fp32, or fp64 for an fp64 parameter
    gradients: dict[str, Tensor]

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        cap_bytes: int | None = None,
        reductions: Mapping[str, Reduction] | None = None,
        observer: Observer | None = None,
        group_of: GroupOf | None = None,
    ) -> None:
        ordinary, number = Reduction(group), group_of or matrices_apart

        def kind_of(name: str, parameter: nn.Parameter) -> BucketKind:
            return number(name, parameter), (reductions or {}).get(name, ordinary), parameter.dtype, parameter.device

        self._observer = observer
        self._pending, self._gathering = [], []
        self.buckets = fill_buckets(parameters, kind_of, cap_bytes)
        self.gradients = {
            name: view for bucket in self.buckets for name, view in bucket.views(bucket.gradients).items()
        }
        for place in self.places:
            place.parameter.grad = None
            # Any: autograd then adds a 16-bit gradient into an fp32 one without a copy of it in fp32.
            place.parameter.grad_dtype = None
        self.zero_()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All parameters by full name."""
        return {place.name: place.parameter for place in self.places}

    def zero_(self) -> None:
        """Set all gradients to zero, reattach them where they were removed, and forget an unfinished step."""
        # A reduction that was launched before a failure may still write into the buckets.
        self.wait()
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for place in self.places:
            place.parameter.grad = self.gradients[place.name]

    def launch(self) -> None:
        """Start summing every bucket over its group, in one fixed order; no backward may follow before `wait`.

        Gradients that several ranks have each computed in part are summed before this returns; they are small.
        """
        assert not self._pending, "launched twice without a wait"
        for bucket in self.buckets:
            if (reduction := bucket.reduction).among is None:
                continue
            collectives, rows = Collectives(reduction.among, self._observer), bucket.gradients
            if reduction.num_parts > 1:
                # One row for each part, zero on ranks with other parts: one sum over all needs no groups of a few.
                rows = bucket.gradients.new_zeros(reduction.num_parts, bucket.gradients.numel())
                rows[reduction.part] = bucket.gradients
            collectives.sum_gradients(as_real(rows)).wait()
            if reduction.num_parts > 1:
                bucket.gradients.copy_(rows[reduction.part])
        for bucket in self.buckets:
            if bucket.reduction.group is not None:
                collectives = Collectives(bucket.reduction.group, self._observer)
                flat = as_real(bucket.gradients).view(-1)
                if bucket.reduction.owner is not None:
                    self._pending.append(collectives.sum_gradients_at(flat, bucket.reduction.owner))
                    continue
                launch = collectives.sum_owned_gradients if bucket.reduction.sharded else collectives.sum_gradients
                self._pending.append(launch(flat))

    def wait(self) -> None:
        """Wait for the reductions that `launch` started (on a GPU: order the current stream after them)."""
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()

    def forget(self) -> None:
        """Drop reductions that were cut; `zero_` does the rest."""
        pending, self._pending, self._gathering = self._pending, [], []
        for handle in pending:
            with contextlib.suppress(RuntimeError):
                handle.wait()

    def gather(self) -> None:
        """Start to give every rank the parameters that others have stepped; they may be read after `settle`."""
        for bucket in self.buckets:
            reduction = bucket.reduction
            if not reduction.sharded or reduction.group is None or reduction.lent:
                continue
            collectives = Collectives(reduction.group, self._observer)
            if reduction.owner is None:
                self._gathering.append(collectives.gather_owned(bucket.parameters))
            else:
                self._gathering.append(collectives.spread_from(bucket.parameters, reduction.owner))

    def settle(self) -> None:
        """Wait for what `gather` started; costs nothing if nothing is in flight."""
        gathering, self._gathering = self._gathering, []
        for handle in gathering:
            handle.wait()

    @cached_property
    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients' elements that this rank steps, by full name, as flat views; absent where it steps none."""
        return {
            place.name: place.view(bucket.gradients[bucket.owned])
            for bucket in self.buckets
            for place in bucket.owned_places
        }

    def close(self) -> None:
        """Remove the gradients from the parameters, which keep their values and their storage."""
        self.wait()
        self.settle()
        for place in self.places:
            place.parameter.grad = None
            place.parameter.grad_dtype = place.parameter.dtype

    @cached_property
    def places(self) -> list[Place]:
        """All parameters, in the order of the buckets."""
        return [place for bucket in self.buckets for place in bucket.places]


def sum_tied(ties: Mapping[str, str], gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all copies of every tied parameter the sum of their gradients, once.

    ties: full name of the copy -> full name of the owner; an owner's copies are on one rank. gradients: this rank's, by
    full name, reduced over dp. group: the two ranks that hold the owner and its copies, used for a tie of which this
    rank holds only one side. All ranks that hold a side call it. Copies are added up first, so that there are two
    summands, and the result is bitwise the same wherever the two sides are.
    """
    for owner in sorted(set(ties.values())):
        copies = [gradients[name] for name, of in sorted(ties.items()) if of == owner and name in gradients]
        for other in copies[1:]:
            copies[0].add_(other)
        if copies and owner in gradients:
            copies[0].add_(gradients[owner])
            gradients[owner].copy_(copies[0])
        elif copies or owner in gradients:
            assert group is not None, f"{owner} is tied, and no group joins the ranks that hold it and its copies"
            dist.all_reduce(as_real(copies[0] if copies else gradients[owner]), group=group)
        for other in copies[1:]:
            other.copy_(copies[0])
