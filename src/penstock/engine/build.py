"""The making of a rank's stages: a model's units are cut, and each is built, initialised and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.engine.options import EngineOptions
from penstock.engine.precision import autocast_of, dtype_under, parameter_dtype
from penstock.model import UnitSpec, WeightGradients, defer
from penstock.model.cpu.host_memory import give_back_freed_memory
from penstock.model.cpu.reproducible import make_reproducible
from penstock.model.devices import use_kernels_of
from penstock.model.linear import Deferring, Pack, fix_weights
from penstock.runtime import Boundary, Stage
from penstock.settings import CompileMode, ConfigError


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
    limits.recompile_limit = max(limits.recompile_limit, _MOST_KINDS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MOST_KINDS)
    # Kernels for any number of tokens from the first call on: those of a fixed number may add up in another order.
    part.compile(dynamic=True, mode=None if mode is CompileMode.DEFAULT else mode.value)


def keep_linears_eager(module: nn.Module) -> None:
    """Take the layers whose weight gradients can be deferred out of what torch.compile makes of the module."""
    for part in module.modules():
        if isinstance(part, Deferring) and "forward" not in vars(part):
            part.forward = torch.compiler.disable(part.forward)


def recomputes(unit: str, options: EngineOptions) -> bool:
    """True where the options recompute the activations of the unit of that name; layers are chosen by number."""
    if isinstance(options.recompute, str):
        return options.recompute == "full"
    return _layer_of(unit) in options.recompute


def _layer_of(unit: str) -> int | None:
    """The number of the layer that the unit of that name belongs to; None for a unit outside of all layers."""
    layer = unit.split(".")[1:2]
    return int(layer[0]) if layer and layer[0].isdigit() else None


_MOST_KINDS = 1024
"""Kinds of layers that may share code; beyond torch's own limit of 8 some layers of a long stage would not be compiled,
and the bits would depend on the cut."""
