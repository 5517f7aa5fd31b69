"""The part of a model that a rank has: its units, shared with other ranks, tied, cut into stages, and built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.engine.optimizer.groups import ParameterGroups
from penstock.engine.optimizer.steppers import OwnedState
from penstock.engine.options import EngineOptions
from penstock.model import (
    ModelGroups,
    UnitSpec,
    WeightGradients,
    decoder_units,
    defer,
)
from penstock.model.cpu.host_memory import give_back_freed_memory
from penstock.model.cpu.quantized import measured_seconds, quantizer, seconds_of_all, times_as_slow
from penstock.model.cpu.reproducible import make_reproducible
from penstock.model.devices import use_kernels_of
from penstock.model.hf.families import HuggingFaceForm
from penstock.model.linear import Deferring, Pack, fix_weights
from penstock.parallel import Grid, Reduction
from penstock.parallel.gradients import as_real
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import LocalTensor, Shard, TensorSlice, laid_out, local_run
from penstock.runtime import Boundary, PipelineError, Stage
from penstock.settings import (
    CompileMode,
    ConfigError,
    Division,
    Layout,
    ModelConfig,
    ParameterGroup,
    Precision,
    Quantize,
)
from penstock.settings.declare import check_argument

SECOND_COPY = "@2"
"""Ends the names of the second copy of a bidirectional model."""

T = TypeVar("T")


class EngineArguments(NamedTuple):
    """The arguments with which an `Engine` runs a model that settings or a folder describe."""

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    layout: Layout
    options: EngineOptions
    form: HuggingFaceForm | None

    @classmethod
    def of_decoder(cls, shape: ModelConfig, layout: Layout, options: EngineOptions) -> EngineArguments:
        """Describe a decoder with random weights."""
        form = HuggingFaceForm.of(shape)
        return cls(lambda groups: decoder_units(shape, groups=groups), shape.hidden_size, layout, options, form)


def build_on_all_ranks(build: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Build this rank's part of something; all ranks of `group`, which carries host memory, call it at one point.

    Raises: the error itself on the rank that cannot; on all others a FileNotFoundError, ValueError or PipelineError,
    whichever is nearest, that names rank, kind and message.
    """
    return on_all_ranks(
        build,
        partial(gather_json, group=group),
        *(FileNotFoundError, ValueError),
        otherwise=PipelineError,
        message="rank {rank} could not make its part of the engine: {kind}: {error}",
    )


@dataclass(frozen=True)
class Ties:
    """Parameters that are one logical parameter, by full name: copy -> owner.

    Their gradients are summed in two rounds. In a bidirectional model second copies are added to the first ones;
    then each rank adds up the two ends of a tied weight that it holds, which belong to different copies.
    """

    #: first round: the second copy of every parameter of a bidirectional model
    copies: Mapping[str, str]
    #: second round: a weight that two units share
    tied: Mapping[str, str]
    #: every copy -> the parameter that counts, in norms and in checkpoints
    owners: Mapping[str, str]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], num_routes: int) -> Ties:
        """The ties of a model, given this rank's parameters by full name."""
        tied = {unit.full_name(copied): owner for unit in units for copied, owner in unit.tied.items()}
        if num_routes == 1:
            return cls({}, tied, tied)
        copies = {name: name.removesuffix(SECOND_COPY) for name in parameters if name.endswith(SECOND_COPY)}
        copies |= {f"{name}{SECOND_COPY}": name for name in parameters if not name.endswith(SECOND_COPY)}
        crossed = {name: f"{owner}{SECOND_COPY}" for name, owner in tied.items()}
        crossed |= {f"{name}{SECOND_COPY}": owner for name, owner in tied.items()}
        owners = {copy: tied.get(owner, owner) for copy, owner in copies.items()} | tied
        return cls(copies, crossed, owners)

    def loans(self, parameters: Iterable[str]) -> dict[str, str]:
        """Tied copies that lie beside their owner, among these parameters: copy -> owner. One weight serves both.

        A bidirectional model has none: sums over ranks tie its copies together.
        """
        local = set(parameters)
        return {} if self.copies else {copy: owner for copy, owner in self.tied.items() if {copy, owner} <= local}


def check_ties(units: Sequence[UnitSpec], cut: Sequence[range], placement: schedule.Placement) -> None:
    """Refuse ties that no group of ranks can add up: all copies lie on one rank, their owner there or on its mirror.

    Raises: ValueError naming owner and ranks.
    """
    rank_of = {units[i].name: placement.rank_of(stage) for stage, members in enumerate(cut) for i in members}
    sides: dict[str, set[int]] = {}
    for unit in units:
        for owner in unit.tied.values():
            sides.setdefault(owner, set()).add(rank_of[unit.name])
    for owner, copies in sides.items():
        home = next(rank for name, rank in rank_of.items() if owner.startswith(f"{name}."))
        if not any(copies == {rank} for rank in (home, placement.num_ranks - 1 - home)):
            held = ", ".join(map(str, sorted({home, *copies})))
            raise ValueError(
                f"{owner} is shared by layers on the ranks {held}; a weight can be shared by layers of one rank, or of "
                f"one rank and its mirror, such as the first and the last; schedule.cut moves layers"
            )


UnitSource = Sequence[UnitSpec] | Callable[[ModelGroups], Sequence[UnitSpec]]
"""A model's units, or a function that makes them for the groups that share them."""


def units_for(source: UnitSource, groups: ModelGroups, layout: Layout) -> tuple[UnitSpec, ...]:
    """The units, made for these groups.

    Raises:
        ValueError: they are there already, and the layout wants them shared.
    """
    if callable(source):
        units = source(groups)
        check_argument("units", units, Sequence[UnitSpec])
        return tuple(units)
    if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
        raise ValueError(
            f"the layout {layout} shares a model over tp, cp or ep, but its units are given ready-made; "
            "give a function that makes them from ModelGroups, or a layout of pp and dp alone"
        )
    return tuple(source)


# ---- Parameters that ranks share


@dataclass(frozen=True)
class Sharding:
    """The sharing of this rank's parameters with other ranks."""

    #: full name -> the part that this rank has; only parameters that ranks share
    shards: Mapping[str, Shard]
    #: full name -> the ranks over which the gradient is summed
    reductions: Mapping[str, Reduction]
    #: full name -> the name under which this rank counts the parameter in the norm of the whole model's gradients,
    #: or None if another rank counts it
    norm_names: Mapping[str, str | None]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], grid: Grid) -> Sharding:
        """The sharding of this rank's parameters, given by full name."""
        shards = {unit.full_name(key): shard for unit in units for key, shard in unit.sharding.items()}
        partial = {unit.full_name(key) for unit in units for key in unit.partial}
        rank_shards: dict[str, Shard] = {}
        reductions: dict[str, Reduction] = {}
        norm_names: dict[str, str | None] = {}
        for name in parameters:
            # Both copies of a bidirectional model are sharded alike.
            plain = name.removesuffix(SECOND_COPY)
            shard = shards.get(plain)
            over_experts = shard is not None and shard.axis == "ep"
            group = grid.edp_group if over_experts else grid.dp_cp_group
            if plain not in partial:
                reductions[name] = Reduction(group)
            elif shard is None or over_experts:
                reductions[name] = Reduction(group, grid.tp_group)
            else:
                reductions[name] = Reduction(group, grid.tp_group, shard.index, shard.count)
            # Among ranks holding the same part, only the first counts it in the norm.
            counts = (grid.ep_rank == 0 or over_experts) and _is_first_with(shard, grid)
            norm_names[name] = None if not counts else name if shard is None else f"{name}[{shard.index}]"
            if shard is not None:
                rank_shards[name] = shard
        return cls(rank_shards, reductions, norm_names)

    def lending(self, loans: Mapping[str, str]) -> Sharding:
        """Let copies (the keys of `loans`) use another parameter's values and have only a gradient."""
        lent = {name: replace(reduction, lent=name in loans) for name, reduction in self.reductions.items()}
        return replace(self, reductions=lent)

    def with_zero(self, ties: Mapping[str, str], grid: Grid, whole: Mapping[str, int] | None = None) -> Sharding:
        """The sharding of ZeRO-1: ranks that sum gradients with each other divide the optimizer's state and step.

        ties: full names, copy -> owner. Each tied parameter has a bucket of its own, so that the ranks that hold its
        two copies own the same elements of both. whole: the parameters that are stepped only whole, each by one of the
        ranks, with their numbers of elements.
        """
        tied = ties.keys() | set(ties.values())
        owners = _owners(whole or {}, self.reductions, ties)
        return Sharding(
            self.shards,
            {
                name: replace(
                    reduction,
                    sharded=reduction.group is not None,
                    owner=owners.get(name),
                    alone=name if name in tied else "",
                )
                for name, reduction in self.reductions.items()
            },
            # No two of these ranks step the same elements, so each counts its own, under a name of its own.
            {
                name: f"{name}@{grid.rank}" if _is_first_with(self.shards.get(name), grid) else None
                for name in self.reductions
            },
        )


def stepped_whole(
    parameters: Mapping[str, nn.Parameter], groups: ParameterGroups, shards: Mapping[str, Shard]
) -> dict[str, int]:
    """The parameters that their optimizer steps only whole, each with its number of elements.

    Raises:
        ValueError: tensor- or expert-parallel ranks share one of them, so that none of them has it whole.
    """
    sizes = {}
    for name, parameter in parameters.items():
        if groups.division(name, parameter) is not Division.ELEMENTS:
            if name in shards:
                rule = groups.rules[groups.number(name, parameter)]
                raise ValueError(
                    f"the optimizer {rule.made_as} steps whole parameters, but {shards[name].axis} ranks share "
                    f"{name}; set {shards[name].axis} = 1, or give it another optimizer"
                )
            sizes[name] = parameter.numel()
    return sizes


def _owners(whole: Mapping[str, int], reductions: Mapping[str, Reduction], ties: Mapping[str, str]) -> dict[str, int]:
    """The rank of its group that steps each of these parameters, as evenly as possible by elements.

    Ranks of one group get the same answer, and so do ranks of several that hold the two copies of a tied parameter.
    """
    tied, owners = ties.keys() | set(ties.values()), {}
    loads: dict[int, list[int]] = {}
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        group = reductions[name].group
        if group is None:
            continue
        if name in tied:
            owners[name] = crc32(ties.get(name, name).encode()) % group.size()
            continue
        load = loads.setdefault(id(group), [0] * group.size())
        owners[name] = load.index(min(load))
        load[owners[name]] += whole[name]
    return owners


def _is_first_with(shard: Shard | None, grid: Grid) -> bool:
    """True if this rank is the first of the tensor-parallel ranks that have the same part."""
    if grid.tp_rank == 0:
        return True
    return shard is not None and shard.axis == "tp" and shard != shard.on(grid.tp_rank - 1, grid.layout.tp)


# ---- State, as slices of whole tensors


def local_state(owned: Mapping[str, OwnedState], shards: Mapping[str, Shard]) -> dict[str, LocalTensor]:
    """The optimizer state that this rank steps (see `Optimizer.owned_state`), by name, as views."""
    tensors: dict[str, LocalTensor] = {}
    for name, state in owned.items():
        if state.place is None:
            tensors[name] = state.values
            continue
        shard = shards.get(state.place.name)
        part = TensorSlice.whole(state.place.parameter.shape) if shard is None else shard.part
        tensors[name] = local_run(state.values, state.place.first, part)
    return tensors


# ---- Checks of the whole model at construction, in one exchange: replicas begin alike, and each group has parameters


_NUM_NAMED = 4
_ADDED_AT_ONCE = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_whole_model(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], grid: Grid, groups: Sequence[ParameterGroup]
) -> None:
    """Refuse ranks that begin with other values of one tensor, and groups of the optimizer that no parameter is in.

    All ranks call it with the tensors that they have, by full name.

    Raises:
        ValueError: naming the first such tensor; on all ranks alike.
        ConfigError: with the group's pattern and some parameters' names; on all ranks alike.
    """
    # A rank that is alone need not read its weights.
    sums = [0] * len(tensors) if grid.control is None else _sums(list(tensors.values()))
    parts = {}
    for name, shard in shards.items():
        group = grid.tp_group if shard.axis == "tp" else grid.ep_group
        parts[name] = f"{shard.axis} {group.rank() if group is not None else 0}"
    view = {
        name: (parts.get(name, ""), tensor.ndim if isinstance(tensor, nn.Parameter) else None, total)
        for (name, tensor), total in zip(tensors.items(), sums, strict=True)
    }
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    dims: dict[str, int] = {}
    for rank, described in enumerate(gather_json(view, grid.control)):
        for name, (part, num_dims, total) in described.items():
            plain = name.removesuffix(SECOND_COPY)
            first, known = seen.setdefault((plain, part), (rank, total))
            if known != total:
                raise ValueError(
                    f"{name} begins with other values on rank {rank} than on rank {first}, though both hold the same "
                    "part of the model; build the layers from one seed on every rank (torch.manual_seed), or give them "
                    "the same weights"
                )
            if num_dims is not None:
                dims[plain] = num_dims
    for group in groups:
        if not any(group.matches(name, num_dims) for name, num_dims in dims.items()):
            some = ", ".join(islice(dims, _NUM_NAMED))
            raise ConfigError(
                f"optimizer.groups: the pattern {group.pattern!r} matches no "
                f"{'matrix' if group.matrices else 'parameter'} of the model; among its {len(dims)} are {some}"
            )


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's bits, read as whole numbers; 0 without values."""
    totals: list[Any] = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
        if not tensor.is_meta:
            # PyTorch widens all that it adds up at once to 64 bits.
            values = as_real(laid_out(tensor.detach())).view(-1)
            bits = values.view(_BITS[values.element_size()])
            for part in bits.split(_ADDED_AT_ONCE):
                total += part.sum(dtype=torch.int64)
        totals.append(total.cpu())
    return torch.stack(totals).tolist() if totals else []


# ---- Compilation of units with torch.compile: once per kind of layer, for any number of tokens


_MANY_KINDS = 1024
"""Kinds of layers that may share code; beyond torch's own limit of 8 some layers of a long stage would not be compiled,
and the bits would depend on the cut."""


def compile_unit(module: nn.Module, mode: CompileMode) -> None:
    """Compile a unit's forward; units with collectives, and those that say so by `compiles = None`, stay as they are.

    `compiles` names the part of a unit to compile; left out, it is the whole.
    """
    name = getattr(module, "compiles", "")
    if name is None or hasattr(module, "forward_lane"):
        return
    part = module.get_submodule(name)
    keep_linears_eager(part)
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MANY_KINDS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MANY_KINDS)
    # Kernels for any number of tokens from the first call on: those of a fixed number may add up in another order.
    part.compile(dynamic=True, mode=None if mode is CompileMode.DEFAULT else mode.value)


def keep_linears_eager(module: nn.Module) -> None:
    """Take the layers whose weight gradients can be deferred out of what torch.compile makes of the module."""
    for part in module.modules():
        if isinstance(part, Deferring) and "forward" not in vars(part):
            part.forward = torch.compiler.disable(part.forward)


# ---- This rank's stages, built from the list of a model's units


def cut_units(
    units: Sequence[UnitSpec],
    placement: schedule.Placement,
    options: EngineOptions,
    times: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """The units of every stage: by hand if the options give a cut, else the cut whose slowest rank is fastest.

    times: of the units, measured; left out, their estimated work decides.

    Raises:
        ValueError: more stages than units, or a cut by hand that leaves units out.
    """
    # Units of one layer are named after it, such as layers.3.attention.
    of_layers = Counter(".".join(unit.name.split(".")[:2]) for unit in units)
    by_hand = options.choice.cut(len(units), placement.stages_per_route, max(of_layers.values()))
    if by_hand is not None:
        return by_hand
    return schedule.balanced_cut(times or [unit.work(options.label_share) for unit in units], placement)


def build_stages(
    units: Sequence[UnitSpec],
    members: Mapping[int, range],
    boundary: Boundary,
    options: EngineOptions,
    device: torch.device,
    pack: Pack | None = None,
) -> dict[int, Stage]:
    """The stages of these numbers and units, with initial weights that depend on the seed alone.

    pack: the kind of numbers in which weights of products are kept, if they are quantized.

    Raises:
        ConfigError: the options recompute a layer that the model does not have.
        ValueError: tokens are to be reproducible, and a layer cannot.
    """
    if not isinstance(options.recompute, str):
        layers = {layer for unit in units if (layer := _layer_of(unit.name)) is not None}
        if wrong := [layer for layer in options.recompute if layer not in layers]:
            possible = (
                f"the model's {len(layers)} layers are 0 to {max(layers)}" if layers else "the model has no layers"
            )
            raise ConfigError(f"train.recompute names layer {wrong[0]}, but {possible}")
    stages = {}
    for number, indices in members.items():
        # The largest first: what reading one takes beside its weights is then not on top of all others.
        largest_first = sorted(indices, key=lambda i: -units[i].num_parameters)
        made = {i: build_unit(units[i], options, device, pack) for i in largest_first}
        modules = [(units[i].name, made[i]) for i in indices]
        if options.reproducible:
            make_reproducible(modules, device)
        owner = WeightGradients()
        for _, module in modules:
            defer(module, owner)
            if options.compile:
                compile_unit(module, CompileMode.DEFAULT if options.compile is True else options.compile)
        stages[number] = Stage(
            number,
            modules,
            boundary,
            owner,
            autocast=autocast_of(options.precision, device),
            recompute=frozenset(name for name, _ in modules if recomputes(name, options)),
        )
    return stages


def settled(options: EngineOptions, device: torch.device, grid: Grid) -> tuple[EngineOptions, Pack | None]:
    """The options without `auto` for quantized weights, and what packs these; the same on all ranks, which agree.

    Raises: ConfigError for quantized weights elsewhere than on a CPU.
    """
    kind = options.quantize
    if device.type != "cpu":
        if kind not in (Quantize.NONE, Quantize.AUTO):
            raise ConfigError(f"quantize = {kind}: products of whole numbers are for CPUs; give device = cpu")
        return replace(options, quantize=Quantize.NONE), None
    if kind not in (Quantize.INT8, Quantize.AUTO):
        return options, None if kind is Quantize.NONE else quantizer(kind)
    dtype = parameter_dtype(options.precision)
    seconds = build_on_all_ranks(lambda: measured_seconds(dtype, kind), grid.control)
    seconds = seconds_of_all(gather_json(seconds, grid.control))
    if kind is Quantize.AUTO and times_as_slow(kind, dtype, seconds) >= 1:
        return replace(options, quantize=Quantize.NONE), None
    return replace(options, quantize=Quantize.INT8), quantizer(Quantize.INT8, seconds)


def build_unit(unit: UnitSpec, options: EngineOptions, device: torch.device, pack: Pack | None = None) -> nn.Module:
    """The unit's module on the device, with its kernels, initial values, in the precision of the options.

    Where the options pack weights for good they are packed at once, before the next unit is read; pack: see
    `build_stages`.
    """
    with torch.device("meta"):
        module = unit.build()
    if not unit.is_own:
        module.to(dtype=parameter_dtype(options.precision))
    unit.initialise(module, options.seed)
    if unit.is_own:
        # Of other dtypes than torch's default are those that the user chose.
        module._apply(lambda tensor: tensor.to(dtype_under(options.precision, tensor.dtype)).resolve_conj())
    use_kernels_of(device, module.to(device))
    if options.packs_for_good:
        if not fix_weights(module, pack) and pack and any(isinstance(part, nn.Linear) for part in module.modules()):
            raise ConfigError(
                f"quantize = {options.quantize}: the weights of {unit.name} stay as they are; only dense models of "
                "Penstock's own layers can be quantized, so leave quantize out"
            )
        give_back_freed_memory()
    return module


def recomputes(unit: str, options: EngineOptions) -> bool:
    """True where the options recompute the activations of the unit of that name; layers are chosen by number."""
    if isinstance(options.recompute, str):
        return options.recompute == "full"
    return _layer_of(unit) in options.recompute


def _layer_of(unit: str) -> int | None:
    """The number of the layer that the unit of that name belongs to; None for a unit outside of all layers."""
    layer = unit.split(".")[1:2]
    return int(layer[0]) if layer and layer[0].isdigit() else None


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The dtype that parameters have on device."""
    dtypes = {Precision.FP64: torch.float64, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    return dtypes.get(precision, torch.float32)


def dtype_under(precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter or buffer of a user's own layer is kept: its own, or of fp32 the precision's."""
    return parameter_dtype(precision) if dtype is torch.float32 else dtype


def stream_dtype(units: Sequence[UnitSpec], precision: Precision) -> torch.dtype:
    """The dtype of what layers pass on: the precision's, or that of the parameters of a user's own first layer."""
    dtypes = [torch.float32]
    if units[0].is_own:
        with torch.device("meta"):
            dtypes = [p.dtype for p in units[0].build().parameters() if p.is_floating_point()] + dtypes
    return dtype_under(precision, dtypes[0])


def bytes_of_weight(precision: Precision, quantize: Quantize) -> float:
    """Bytes of a weight on device; of a quantised one with its share of scales and of what stays as it is."""
    quantized = {Quantize.INT8: 1.05, Quantize.INT8_WEIGHTS: 1.05, Quantize.INT4: 0.65}
    return quantized.get(quantize, parameter_dtype(precision).itemsize)


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which units compute."""
    is_autocast = precision is Precision.BF16_AUTOCAST
    return partial(torch.autocast, device.type, torch.bfloat16) if is_autocast else nullcontext
