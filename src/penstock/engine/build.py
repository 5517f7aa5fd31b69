"""The making of a rank's stages: a model's units are cut, and each is built, initialised and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
    units_by_stage: Mapping[int, range],
    boundary: Boundary,
    options: EngineOptions,
    device: torch.device,
    pack: Pack | None = None,
) -> dict[int, Stage]:
    """This rank's stages by index, with initial weights that depend on the seed alone.

    units_by_stage: stage index -> its units, as positions in `units`. pack: packs the weights of products, if they are
    quantized.

    Raises:
        ConfigError: the options recompute a layer that the model does not have.
        ValueError: tokens are to be reproducible, and a layer cannot.
    """
    if not isinstance(options.recompute, str):
        layers = {layer for unit in units if (layer := unit.layer) is not None}
        if wrong := [layer for layer in options.recompute if layer not in layers]:
            possible = (
                f"the model's {len(layers)} layers are 0 to {max(layers)}" if layers else "the model has no layers"
            )
            raise ConfigError(f"train.recompute names layer {wrong[0]}, but {possible}")
    stages = {}
    for index, positions in units_by_stage.items():
        # The largest first: the memory that reading one takes beside its weights is then not on top of all others.
        largest_first = sorted(positions, key=lambda i: -units[i].num_parameters)
        module_of = {i: build_unit(units[i], options, device, pack) for i in largest_first}
        modules = [(units[i].name, module_of[i]) for i in positions]
        if options.reproducible:
            make_reproducible(modules, device)
        weight_gradients = WeightGradients()
        for _, module in modules:
            defer(module, weight_gradients)
            if options.compile:
                compile_unit(module, CompileMode.DEFAULT if options.compile is True else options.compile)
        stages[index] = Stage(
            index,
            modules,
            boundary,
            weight_gradients,
            autocast=autocast_of(options.precision, device),
            recompute=frozenset(units[i].name for i in positions if recomputes(units[i], options)),
        )
    return stages


def build_unit(unit: UnitSpec, options: EngineOptions, device: torch.device, pack: Pack | None = None) -> nn.Module:
    """The unit's module on the device: initialised, in the precision of the options, with the device's kernels.

    If the options pack weights for good, they are packed here, before the next unit is read. pack: as in
    `build_stages`.
    """
    with torch.device("meta"):
        module = unit.build()
    if not unit.is_own:
        module.to(dtype=parameter_dtype(options.precision))
    unit.initialise(module, options.seed)
    if unit.is_own:
        # A dtype other than torch's default was chosen by the user.
        module._apply(lambda tensor: _with_own_memory(tensor.to(dtype_under(options.precision, tensor.dtype))))
    use_kernels_of(device, module.to(device))
    if options.packs_for_good:
        if not fix_weights(module, pack) and pack and any(isinstance(part, nn.Linear) for part in module.modules()):
            raise ConfigError(
                f"quantize = {options.quantize}: the weights of {unit.name} stay as they are; only dense models of "
                "Penstock's own layers can be quantized, so leave quantize out"
            )
        give_back_freed_memory()
    return module


def _with_own_memory(tensor: Tensor) -> Tensor:
    """The tensor, whose elements lie apart: a checkpoint cannot be read into what `expand` gives."""
    tensor = tensor.resolve_conj()
    return tensor.clone(memory_format=torch.contiguous_format) if 0 in tensor.stride() else tensor


def compile_unit(module: nn.Module, mode: CompileMode) -> None:
    """Compile a unit's forward, or the part that its attribute `compiles` names.

    Units with collectives, and those with `compiles = None`, are not compiled.
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
    """Exclude linear layers with deferrable weight gradients from torch.compile."""
    for part in module.modules():
        if isinstance(part, Deferring) and "forward" not in vars(part):
            part.forward = torch.compiler.disable(part.forward)


def recomputes(unit: UnitSpec, options: EngineOptions) -> bool:
    """True if the options recompute the activations of the unit; layers are chosen by index."""
    if isinstance(options.recompute, str):
        return options.recompute == "full"
    return unit.layer in options.recompute


_MOST_KINDS = 1024
"""Recompilations of one function that torch may make. Beyond its own limit of 8 some layers of a long stage would stay
eager, and the bits would depend on the cut."""
