"""Memory of a run, worked out without starting it: state on each rank of a layout, and what stages keep for backward.

Shapes: T tokens of a microbatch, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from penstock import schedule
from penstock.engine.build import SECOND_COPY, Ties, cut_units, parameter_dtype, recomputes
from penstock.engine.optimizer.groups import ParameterGroups, freeze
from penstock.engine.optimizer.torch_steppers import state_kinds
from penstock.engine.options import EngineOptions
from penstock.engine.sharding import Sharding, UnitSource, stepped_whole, units_for
from penstock.model import ModelGroups, Sequences, UnitSpec, WeightGradients, cross_entropy_sum, defer, drain
from penstock.model.groups import GroupShape, PlannedGroup
from penstock.parallel import GradientBuckets, Grid
from penstock.parallel.gradients import StateBytes, state_bytes
from penstock.parallel.grid import mirrored
from penstock.runtime import Boundary, Stage, Tape
from penstock.runtime.tape import GraphSegment
from penstock.settings import Groups, Layout, Precision

_CPU = torch.device("cpu")

# ---- parameters, gradients and the optimizer's state


def rank_state_bytes(source: UnitSource, layout: Layout, options: EngineOptions) -> list[dict[int, StateBytes]]:
    """The memory that each rank, in order, needs throughout training for each of its stages, without activations.

    The cut follows the units' estimated work unless the options give one.

    Raises: ValueError when the model cannot be shared or cut so.
    """
    known: dict[tuple[int, ...], dict[int, StateBytes]] = {}
    models: dict[tuple[int, ...], _CutModel] = {}
    found = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        grid = planned_grid(layout, rank)
        # With ZeRO, ranks of one copy may own different parameters.
        copy = (grid.dp_rank, grid.cp_rank) if options.optimizer.zero else ()
        shared = (grid.tp_rank, grid.cp_rank, grid.ep_rank)
        key = (place.pp, *shared, *copy)
        if key not in known:
            if shared not in models:
                models[shared] = _CutModel.of(source, grid, options)
            known[key] = _of_rank(models[shared], grid, options)
        found.append(known[key])
    return found


@dataclass(frozen=True)
class _CutModel:
    """A model as ranks hold it that share layers alike."""

    units: Sequence[UnitSpec]
    placement: schedule.Placement
    cut: Sequence[range]
    #: the units with tied parameters
    tied: Sequence[UnitSpec]

    @classmethod
    def of(cls, source: UnitSource, grid: Grid, options: EngineOptions) -> _CutModel:
        groups = ModelGroups(grid.tp_group, grid.cp_group, grid.ep_group, options.attention)
        units = units_for(source, groups, grid.layout)
        placement = options.choice.placement(grid.layout.pp)
        return cls(units, placement, cut_units(units, placement, options), [unit for unit in units if unit.tied])


def planned_grid(
    layout: Layout,
    rank: int,
    device: torch.device = _CPU,
    make: Callable[[tuple[int, ...], str], GroupShape] | None = None,
) -> Grid:
    """A rank's place in a layout of which no other rank is there, without the groups on host memory.

    `make` makes a group from its global ranks and the axes along which they lie; those it makes by default know their
    size and the rank's place in them, and cannot communicate.
    """

    def group(groups: Groups, axis: str) -> ProcessGroup | None:
        ranks = next((ranks for ranks in groups if rank in ranks), (rank,))
        if len(ranks) == 1:
            return None
        return cast(ProcessGroup, PlannedGroup(len(ranks), ranks.index(rank)) if make is None else make(ranks, axis))

    dp_cp_group = group(layout.groups("dp", "cp"), "dp,cp")
    return Grid(
        layout,
        device,
        rank,
        tp_group=group(layout.groups("tp"), "tp"),
        cp_group=group(layout.groups("cp"), "cp"),
        ep_group=group(layout.expert_groups(), "ep"),
        dp_cp_group=dp_cp_group,
        edp_group=dp_cp_group if layout.ep == 1 else group(layout.expert_copies(), "dp,cp / ep"),
        mirror_group=group(mirrored(layout.groups("pp")), "pp"),
    )


def running_state_bytes(
    parameters: Iterable[torch.nn.Parameter], gradients: Sequence[GradientBuckets], optimizer_bytes: int
) -> StateBytes:
    """The memory of a running rank's state, counted by storage: most parameters lie in flat buckets."""
    buckets = [bucket for stage in gradients for bucket in stage.buckets]
    storages = {storage.data_ptr(): storage for storage in (p.untyped_storage() for p in parameters)}
    return StateBytes(
        sum(storage.nbytes() for storage in storages.values()),
        sum(bucket.gradients.untyped_storage().nbytes() for bucket in buckets),
        optimizer_bytes,
    )


def _of_rank(model: _CutModel, grid: Grid, options: EngineOptions) -> dict[int, StateBytes]:
    """The state of each of a rank's stages."""
    cut = model.cut
    stages = {number: cut[number % len(cut)] for number in model.placement.stages_of(grid.pp_rank)}
    own = {number: [model.units[i] for i in members] for number, members in stages.items()}
    parameters = {
        number: _parameters(units, SECOND_COPY if number >= len(cut) else "", options) for number, units in own.items()
    }
    names = {name: parameter for of_stage in parameters.values() for name, parameter in of_stage}
    ties = Ties.of(model.tied, names, model.placement.num_routes)
    sharding = Sharding.of([unit for units in own.values() for unit in units], names, grid).lending(ties.loans(names))
    groups_of = ParameterGroups(options.optimizer, ties.owners, SECOND_COPY)
    freeze(names, groups_of)
    whole = stepped_whole(names, groups_of, sharding.shards)
    if options.optimizer.zero:
        sharding = sharding.with_zero(ties.owners, grid, whole)
    kinds = state_kinds(groups_of.rules)
    return {
        number: state_bytes(
            of_stage, grid.dp_cp_group, sharding.reductions, groups_of.number, lambda number: len(kinds[number])
        )
        for number, of_stage in parameters.items()
    }


def _parameters(units: Sequence[UnitSpec], suffix: str, options: EngineOptions) -> list[tuple[str, torch.nn.Parameter]]:
    with torch.device("meta"):
        built = [(unit.name, unit.build().to(dtype=parameter_dtype(options.precision))) for unit in units]
    return [(f"{name}.{own}{suffix}", p) for name, module in built for own, p in module.named_parameters()]


# ---- activations


@dataclass(frozen=True)
class KeptBytes:
    """Bytes a stage keeps of one microbatch: `whole` from its F to its I or B, `for_weights` from I to W.

    With recompute (activation checkpointing) `for_weights` may be larger: by then W's inputs are computed again.
    """

    whole: int
    for_weights: int


def costs_of_memory(kept: Sequence[KeptBytes], lengths: Sequence[float] = ()) -> schedule.Costs:
    """Costs with which a simulation counts the bytes of live tapes; all times are 1.

    lengths: for each microbatch a factor on the bytes, where they differ.
    """
    return schedule.Costs(
        microbatch_bytes=[stage.whole for stage in kept],
        weight_memory_share=[stage.for_weights / stage.whole if stage.whole else 0.0 for stage in kept],
        lengths=lengths,
    )


def kept_bytes(
    units: Sequence[UnitSpec], hidden_size: int, cut: Sequence[range], options: EngineOptions, lengths: Sequence[int]
) -> list[KeptBytes]:
    """Bytes that each stage of a cut keeps of a microbatch with sequences of these lengths; nothing is computed.

    The last stage's output goes into a cross entropy. Parameters are not counted; storage that units share counts once.
    """
    boundary = Boundary(hidden_size, parameter_dtype(options.precision))
    found: list[KeptBytes] = []
    known: dict[Any, KeptBytes] = {}
    with FakeTensorMode(), _default_dtype(boundary.dtype):
        sequences = Sequences.from_lengths(lengths, torch.device("cpu"))
        for number, members in enumerate(cut):
            own, is_last = [units[i] for i in members], number == len(cut) - 1
            key = (number == 0, is_last, *((_kind(unit.build), recomputes(unit.name, options)) for unit in own))
            if key not in known:
                x = torch.zeros(boundary.shape(sequences.num_tokens), dtype=boundary.dtype)
                if number == 0:
                    x = torch.zeros(sequences.num_tokens, dtype=torch.int64)
                known[key] = _kept_of_stage(_stage(number, own, boundary, options), x, sequences, is_last=is_last)
            found.append(known[key])
    return found


def _kind(build: Any) -> Any:
    """The same for any two functions that build the same: partials of one function with equal arguments."""
    if isinstance(build, partial):
        return (_kind(build.func), *map(_kind, build.args), *sorted(build.keywords.items()))
    return build if isinstance(build, Hashable) else id(build)


def _stage(number: int, units: Sequence[UnitSpec], boundary: Boundary, options: EngineOptions) -> Stage:
    owner = WeightGradients()
    modules = [(unit.name, unit.build()) for unit in units]
    for _, module in modules:
        defer(module, owner)
    under_autocast = options.precision is Precision.BF16_AUTOCAST
    return Stage(
        number,
        modules,
        boundary,
        owner,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=under_autocast),
        recompute=frozenset(unit.name for unit in units if recomputes(unit.name, options)),
    )


def _kept_of_stage(stage: Stage, x: Tensor, sequences: Sequences, *, is_last: bool) -> KeptBytes:
    def finish(output: Tensor) -> Tensor:
        labels = torch.zeros(sequences.num_tokens, dtype=torch.int64)
        return cross_entropy_sum(output, labels) if is_last else output

    tape, parameters = Tape(), [parameter for _, parameter in stage.named_parameters()]
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = drain(stage.forward(tape, x, sequences, finish if is_last else None))
    leaves = [entry.leaf for entry in tape.segments if isinstance(entry, GraphSegment) and entry.leaf is not None]
    whole = bytes_of(saved + leaves, parameters)
    saved.clear()
    drain(stage.backward(tape, None if is_last else torch.zeros_like(output), split=True))
    factors = [factor for pending in tape.weight_gradients for factor in (pending.x_TI, pending.grad_TO)]
    return KeptBytes(whole, bytes_of(factors, parameters))


def bytes_of(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once; storages of parameters are left out."""
    not_counted = {parameter.untyped_storage()._cdata for parameter in parameters}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in not_counted)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in the run's dtype: those without data cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
