"""A user's own layers: their units, and the arguments of their `forward` that come from a microbatch by name."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data import PackedBatch
from penstock.engine.build import keep_linears_eager
from penstock.model import Limits, Randomness, UnitSpec, kept_random_state, switch_linears
from penstock.parallel.gradients import in_place_of
from penstock.runtime import Stage, UnitCall
from penstock.settings import checked
from penstock.settings.declare import type_in_words

_logger = logging.getLogger(__name__)

# ---- The layers as units


_COPY_OF = "_penstock_copy_of"


@checked
def units_of_layers(layers: Sequence[nn.Module | partial[Any]]) -> tuple[UnitSpec, ...]:
    """The units of a user's own layers, whose linear layers can then defer weight gradients.

    Raises: ValueError, as `Engine.from_layers`.
    """
    if not len(layers):
        raise ValueError("a model needs at least one layer")
    modules: list[nn.Module] = []
    makers: dict[int, Callable[..., nn.Module]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, partial):
            # Other ranks need its names, shapes and dtypes.
            makers[index] = partial(_make_layer, layer, index)
            layer = makers[index]()
            if real := [name for name, parameter in layer.named_parameters() if not parameter.is_meta]:
                raise ValueError(
                    f"layer {index} is made on the rank that holds it, but its {real[0]!r} exists already; make the "
                    "parameter in the layer, or give the layer itself"
                )
        modules.append(_prepare(layer, index))
    units, ties = [], _tie(modules)
    for index, layer in enumerate(modules):
        num_parameters = sum(p.numel() for p in layer.parameters())
        # A lookup costs next to nothing; anything else multiplies by each of its weights once.
        num_looked_up = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Embedding))
        flops_per_token = 2.0 * (num_parameters - num_looked_up) + 1.0
        limits = None
        if isinstance(layer, nn.Embedding):
            limits = Limits(layer.num_embeddings, sys.maxsize, bounds_labels=False, reads_positions=False)
        units.append(
            UnitSpec(
                f"layers.{index}",
                makers.get(index, lambda layer=layer: layer),
                partial(_become, makers[index]) if index in makers else lambda module, seed: None,
                num_parameters,
                flops_per_token,
                is_own=True,
                limits=limits,
                tied=ties[index],
            )
        )
    return tuple(units)


def _prepare(layer: Any, index: int) -> nn.Module:
    """Let a layer's linear layers defer weight gradients. Raises: ValueError if it is no module."""
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer {index} is {type_in_words(layer)}; layers are torch.nn.Modules")
    switch_linears(layer)
    # The user has compiled the layer or a part of it.
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in layer.modules()):
        keep_linears_eager(layer)
    return layer


def _make_layer(maker: partial[Any], index: int, seed: int | None = None) -> nn.Module:
    """A new layer with random numbers of the seed; without a seed, one without values, on the meta device."""
    cpu = torch.device("cpu")
    with kept_random_state(cpu), torch.device("meta") if seed is None else cpu:
        Randomness(seed or 0, 0, 0, 0, cpu).begin(f"new layers.{index}")
        try:
            layer = maker()
        except Exception as error:
            without = " without values" if seed is None else ""
            raise ValueError(f"layer {index} cannot be made{without} by {maker.func}: {error}") from error
    return _prepare(layer, index)


def _become(make: Callable[[int], nn.Module], module: nn.Module, seed: int) -> None:
    """Turn a layer without values into a new one."""
    new = make(seed)
    vars(module).clear()
    vars(module).update(vars(new))


def _tie(modules: list[nn.Module]) -> list[dict[str, str]]:
    """Give each layer copies of the parameters that earlier layers hold too; returns copy -> original for each layer.

    On another rank a copy begins with the original's values, and the gradients of both are summed. Beside its original
    it uses the original's storage.
    """
    originals: dict[nn.Parameter, str] = {}
    ties: list[dict[str, str]] = []
    for i, module in enumerate(modules):
        # A copy made by an earlier engine knows its original.
        named = {name: getattr(parameter, _COPY_OF, parameter) for name, parameter in module.named_parameters()}
        shared = {name: originals[parameter] for name, parameter in named.items() if parameter in originals}
        if shared and any(module is earlier for earlier in modules[:i]):
            if next(module.buffers(), None) is not None:
                raise ValueError(f"layer {i} is layer {modules.index(module)} again, with buffers; give two modules")
            modules[i] = module = copy.deepcopy(module)
        elif shared:
            _copy_shared_modules({part for earlier in modules[:i] for part in earlier.modules()}, module)
        for name in shared:
            if not hasattr(module.get_parameter(name), _COPY_OF):
                parameter_copy = in_place_of(named[name], named[name].detach().clone())
                setattr(parameter_copy, _COPY_OF, named[name])
                path, _, key = name.rpartition(".")
                setattr(module.get_submodule(path), key, parameter_copy)
        originals |= {parameter: f"layers.{i}.{name}" for name, parameter in named.items() if name not in shared}
        ties.append(shared)
    return ties


def _copy_shared_modules(earlier: set[nn.Module], layer: nn.Module) -> None:
    """Replace submodules that earlier layers hold by copies, whose parameters are then tied."""
    parts, shared_tensors = list(layer.modules()), dict[int, Any]()
    for part in parts:
        # Tensors that are no parameters stay shared.
        values = (*part.buffers(), *vars(part).values())
        shared_tensors |= {id(value): value for value in values if isinstance(value, Tensor)}
    for part in parts:
        if part not in earlier:
            for name, child in part._modules.items():
                if child in earlier and next(child.parameters(), None) is not None:
                    part._modules[name] = copy.deepcopy(child, shared_tensors)


# ---- Their arguments


@dataclass(eq=False)
class OwnLayers:
    """This rank's layers that are called by the names of their parameters, and the keys of the batch that they take."""

    #: the name of the model's first unit, which is given the tokens alone
    _first: str
    #: the stages of this rank by number
    _stages: Mapping[int, Stage]
    #: the keys of the last batch that was checked, and True if this rank had its metadata alone
    _checked: tuple[frozenset[str], bool] | None = None

    @cached_property
    def calls(self) -> list[UnitCall]:
        """The layers as their stages call them."""
        return [call for stage in self._stages.values() for call in stage.calls]

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset[str]().union(*(call.parameters.keys for call in self.calls))

    @cached_property
    def _are_open(self) -> bool:
        return any(stage.boundary.is_open for stage in self._stages.values())

    @property
    def are_plain(self) -> bool:
        """True if all take and give the plain stream with its sequences, and ask for no more."""
        return not (self._keys or self._are_open or any(call.parameters.required for call in self.calls))

    def inputs(self, part: PackedBatch) -> dict[str, Tensor]:
        """The keys of its part of a microbatch that this rank's units take by name, where the batch has them."""
        return {key: part[key] for key in sorted(self._keys.intersection(part.keys))}

    def prepare_for(self, batch: PackedBatch) -> None:
        """Refuse a batch without a key that a layer needs, unless an earlier layer may give it.

        Raises: ValueError naming the layer and the key.
        """
        if (keys_and_data := (frozenset(batch.keys), batch.data is None)) == self._checked:
            return
        for call in self.calls:
            call.lacks = call.lacking(batch.keys)
            # An earlier layer may give what this one lacks, which is known once that has run.
            if call.lacks and (call.name == self._first or not self._are_open):
                raise ValueError(call.lacks)
            if batch.data is None and (keys := sorted(call.parameters.keys.intersection(batch.keys))):
                raise ValueError(f"{call.name} takes the key {keys[0]!r}, but this rank was given metadata alone")
            if batch.num_items > 1 and _attends_to_all_rows(call, batch.keys):
                _logger.warning(
                    "%s attends by nn.MultiheadAttention and asks for nothing that tells documents apart: unless it "
                    "divides the rows itself, each document sees the others of its microbatch",
                    call.name,
                )
        self._checked = keys_and_data


def _attends_to_all_rows(call: UnitCall, keys: Iterable[str]) -> bool:
    """True for a layer with torch's attention that is given rows alone, no lengths and no masks."""
    parameters = call.parameters
    if parameters.sequences or parameters.required or not parameters.keys.isdisjoint(keys):
        return False
    return any(isinstance(part, nn.MultiheadAttention) for part in call.module.modules())
