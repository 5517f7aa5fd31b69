"""This rank's stages, built from the list of a model's units."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from penstock import schedule
from penstock.engine.options import EngineOptions
from penstock.model import BoundLayer, Limits, UnitSpec, WeightGradients, defer, switch_linears, switch_sequentials
from penstock.model.linear import Deferring, fix_weights
from penstock.model.quantized import quantizer
from penstock.model.reproducible import make_reproducible
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.runtime import Boundary, PipelineError, Stage
from penstock.runtime.host_memory import give_back_freed_memory
from penstock.settings import CompileMode, ConfigError, Precision, Quantize, checked
from penstock.settings.declare import type_in_words

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


def is_compiled(module: nn.Module) -> bool:
    """True if a user has compiled the module, or a part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


# ---- This rank's stages, built from the list of a model's units


SECOND_COPY = "@2"
_COPY_OF = "_penstock_copy_of"

T = TypeVar("T")


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


def check_same_units(units: Sequence[UnitSpec], group: dist.ProcessGroup | None) -> None:
    """Refuse ranks that were given other lists of layers. Raises: ValueError on all ranks alike."""
    # Of a user's own layers; those of the package may be sharded.
    views = gather_json([unit.num_parameters if unit.is_own else 0 for unit in units], group)
    for rank, theirs in enumerate(views):
        if len(theirs) != len(views[0]):
            raise ValueError(
                f"ranks were given different numbers of layers: rank 0 has {len(views[0])}, but rank {rank} has "
                f"{len(theirs)}"
            )
        for unit, first, other in zip(units, views[0], theirs):
            if first != other:
                raise ValueError(
                    f"ranks were given different layers: {unit.name} has {first} parameters on rank 0, but {other} on "
                    f"rank {rank}"
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
        tied = {unit.full_name(own): owner for unit in units for own, owner in unit.tied.items()}
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
    by_hand = options.choice.cut(len(units), placement.stages_per_route)
    if by_hand is not None:
        return by_hand
    return schedule.balanced_cut(times or [unit.flops_per_token for unit in units], placement)


def build_stages(
    units: Sequence[UnitSpec],
    cut: Sequence[range],
    numbers: Sequence[int],
    boundary: Boundary,
    options: EngineOptions,
    device: torch.device,
) -> dict[int, Stage]:
    """The stages of these numbers, with initial weights that depend on the seed alone.

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
    stages, build = {}, _builder(options, device)
    for number in numbers:
        members = cut[number % len(cut)]
        # The largest first: what reading one takes beside its weights is then not on top of all others.
        made = {i: build(units[i]) for i in sorted(members, key=lambda i: -units[i].num_parameters)}
        modules = [(units[i].name, made[i]) for i in members]
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
        if number >= len(cut):
            stages[number].suffix = SECOND_COPY
    return stages


def _builder(options: EngineOptions, device: torch.device) -> Callable[[UnitSpec], nn.Module]:
    """The function that makes a unit's module; one whose weights are packed for good, before the next is read.

    Raises: ConfigError for quantized weights elsewhere than on a CPU.
    """
    if not options.packs_for_good:
        return partial(_build_unit, options=options, device=device)
    if device.type != "cpu" and options.quantize is not Quantize.NONE:
        raise ConfigError(f"quantize = {options.quantize}: products of whole numbers are for CPUs; give device = cpu")
    pack = None if options.quantize is Quantize.NONE else quantizer(options.quantize)

    def build(unit: UnitSpec) -> nn.Module:
        module = _build_unit(unit, options, device)
        if not fix_weights(module, pack) and pack and any(isinstance(part, nn.Linear) for part in module.modules()):
            raise ConfigError(
                f"quantize = {options.quantize}: the weights of {unit.name} stay as they are; only dense models of "
                "Penstock's own layers can be quantized, so leave quantize out"
            )
        # The parameters of one unit, at most, are held beside what is packed.
        give_back_freed_memory()
        return module

    return build


def _build_unit(unit: UnitSpec, options: EngineOptions, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        module = unit.build().to(dtype=parameter_dtype(options.precision))
    unit.initialise(module, options.seed)
    return module.to(device)


def recomputes(unit: str, options: EngineOptions) -> bool:
    """True where the options recompute the activations of the unit of that name; layers are chosen by number."""
    if isinstance(options.recompute, str):
        return options.recompute == "full"
    return _layer_of(unit) in options.recompute


def _layer_of(unit: str) -> int | None:
    """The number of the layer that the unit of that name belongs to; None for a unit outside of all layers."""
    layer = unit.split(".")[1:2]
    return int(layer[0]) if layer and layer[0].isdigit() else None


@checked
def units_of_layers(layers: Sequence[nn.Module | partial[Any]]) -> tuple[UnitSpec, ...]:
    """A user's own layers as units, with the weights that they have; their linear layers can defer weight gradients.

    The first takes the batch's `tokens`: ids [T], or anything else with T rows and more dimensions, such as images. The
    last gives what the loss takes, and [T, hidden_size] goes from one to the next.
    Each is given what else its `forward` asks for by name: the microbatch's `sequences`, or any key of the batch. A
    parameter that several layers hold, such as the embedding's weight in the head, stays one: it is tied.

    Raises:
        ValueError: there is no layer, or one is neither a module nor a `functools.partial` of one, or is given twice
            with buffers.
    """
    if not len(layers):
        raise ValueError("a model needs at least one layer")
    modules: list[nn.Module] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, partial) and isinstance(layer.func, nn.Module):
            layer = BoundLayer(layer)
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layer {number} is {type_in_words(layer)}; layers are torch.nn.Modules")
        switch_linears(layer)
        switch_sequentials(layer)
        if is_compiled(layer):
            keep_linears_eager(layer)
        modules.append(layer)
    tied = _tied(modules)
    return tuple(replace(_unit_of_layer(f"layers.{i}", module), tied=tied[i]) for i, module in enumerate(modules))


def _tied(modules: list[nn.Module]) -> list[dict[str, str]]:
    """For each layer, the parameters that earlier layers hold too -> their full names there; it gets copies of them.

    On another rank such a copy begins with the owner's values, and the gradients of both are summed; beside its owner
    it uses the owner's storage.
    """
    owners: dict[nn.Parameter, str] = {}
    found: list[dict[str, str]] = []
    for i, module in enumerate(modules):
        # A copy that an engine made before knows what it is a copy of.
        named = {name: getattr(own, _COPY_OF, own) for name, own in module.named_parameters()}
        shared = {name: owners[own] for name, own in named.items() if own in owners}
        if shared and any(module is earlier for earlier in modules[:i]):
            if next(module.buffers(), None) is not None:
                raise ValueError(f"layer {i} is layer {modules.index(module)} again, with buffers; give two modules")
            modules[i] = module = copy.deepcopy(module)
        for name in shared:
            if not hasattr(module.get_parameter(name), _COPY_OF):
                copied = nn.Parameter(named[name].detach().clone(), named[name].requires_grad)
                setattr(copied, _COPY_OF, named[name])
                place, _, own = name.rpartition(".")
                setattr(module.get_submodule(place), own, copied)
        owners |= {own: f"layers.{i}.{name}" for name, own in named.items() if name not in shared}
        found.append(shared)
    return found


def _unit_of_layer(name: str, layer: nn.Module) -> UnitSpec:
    num_parameters = sum(p.numel() for p in layer.parameters())
    # A lookup costs next to nothing; anything else multiplies by each of its weights once.
    num_looked_up = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Embedding))
    flops_per_token = 2.0 * (num_parameters - num_looked_up) + 1.0
    limits = None
    if isinstance(layer, nn.Embedding):
        limits = Limits(layer.num_embeddings, sys.maxsize, bounds_labels=False, reads_positions=False)
    own_weights: Callable[[nn.Module, int], None] = lambda module, seed: None  # noqa: E731
    return UnitSpec(name, lambda: layer, own_weights, num_parameters, flops_per_token, is_own=True, limits=limits)


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The dtype that parameters have on device."""
    dtypes = {Precision.FP64: torch.float64, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    return dtypes.get(precision, torch.float32)


def bytes_of_weight(precision: Precision, quantize: Quantize) -> float:
    """Bytes of a weight on device; of a quantised one with its share of scales and of what stays as it is."""
    quantized = {Quantize.INT8: 1.05, Quantize.INT8_WEIGHTS: 1.05, Quantize.INT4: 0.65}
    return quantized.get(quantize, parameter_dtype(precision).itemsize)


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if precision is Precision.BF16_AUTOCAST:
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext
