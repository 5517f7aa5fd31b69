"""A user's own layers: as units, and what they ask for of a microbatch by name."""

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
from penstock.model import (
    Given,
    Limits,
    Randomness,
    UnitSpec,
    kept_random_state,
    switch_linears,
)
from penstock.parallel.gradients import in_place_of
from penstock.runtime import Stage, UnitCall
from penstock.settings import checked
from penstock.settings.declare import type_in_words

_logger = logging.getLogger(__name__)

# ---- The layers as units


_COPY_OF = "_penstock_copy_of"


@checked
def units_of_layers(layers: Sequence[nn.Module | partial[Any]]) -> tuple[UnitSpec, ...]:
    """A user's own layers as units (see `Engine.from_layers`); their linear layers can defer weight gradients.

    Raises: ValueError, as there.
    """
    if not len(layers):
        raise ValueError("a model needs at least one layer")
    modules: list[nn.Module] = []
    makers: dict[int, Callable[..., nn.Module]] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, partial):
            # What the others know of it: names, shapes and dtypes.
            makers[number] = partial(_made, layer, number)
            layer = makers[number]()
            if real := [name for name, parameter in layer.named_parameters() if not parameter.is_meta]:
                raise ValueError(
                    f"layer {number} is made on the rank that holds it, but its {real[0]!r} exists already; make the "
                    "parameter in the layer, or give the layer itself"
                )
        modules.append(_prepared(layer, number))
    units, tied = [], _tied(modules)
    for number, layer in enumerate(modules):
        num_parameters = sum(p.numel() for p in layer.parameters())
        # A lookup costs next to nothing; anything else multiplies by each of its weights once.
        num_looked_up = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Embedding))
        flops_per_token = 2.0 * (num_parameters - num_looked_up) + 1.0
        limits = None
        if isinstance(layer, nn.Embedding):
            limits = Limits(layer.num_embeddings, sys.maxsize, bounds_labels=False, reads_positions=False)
        units.append(
            UnitSpec(
                f"layers.{number}",
                makers.get(number, lambda made=layer: made),
                partial(_become, makers[number]) if number in makers else lambda module, seed: None,
                num_parameters,
                flops_per_token,
                is_own=True,
                limits=limits,
                tied=tied[number],
            )
        )
    return tuple(units)


def _prepared(layer: Any, number: int) -> nn.Module:
    """A layer as a module whose linear layers can defer weight gradients."""
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer {number} is {type_in_words(layer)}; layers are torch.nn.Modules")
    switch_linears(layer)
    # A user has compiled it, or a part of it.
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in layer.modules()):
        keep_linears_eager(layer)
    return layer


def _made(maker: partial[Any], number: int, seed: int | None = None) -> nn.Module:
    """A layer that its maker makes: a new one whose random numbers are those of the seed, or one without values."""
    cpu = torch.device("cpu")
    with kept_random_state(cpu), torch.device("meta") if seed is None else cpu:
        Randomness(seed or 0, 0, 0, 0, cpu).begin(f"new layers.{number}")
        try:
            layer = maker()
        except Exception as error:
            without = " without values" if seed is None else ""
            raise ValueError(f"layer {number} cannot be made{without} by {maker.func}: {error}") from error
    return _prepared(layer, number)


def _become(make: Callable[[int], nn.Module], module: nn.Module, seed: int) -> None:
    """Turn a layer without values into a new one."""
    real = make(seed)
    vars(module).clear()
    vars(module).update(vars(real))


def _tied(modules: list[nn.Module]) -> list[dict[str, str]]:
    """For each layer, the parameters that earlier layers hold too -> their full names there; it gets copies of them.

    On another rank such a copy begins with the owner's values, and the gradients of both are summed; beside its owner
    it uses the owner's storage.
    """
    owners: dict[nn.Parameter, str] = {}
    ties: list[dict[str, str]] = []
    for i, module in enumerate(modules):
        # A copy that an engine made before knows what it is a copy of.
        named = {name: getattr(parameter, _COPY_OF, parameter) for name, parameter in module.named_parameters()}
        shared = {name: owners[parameter] for name, parameter in named.items() if parameter in owners}
        if shared and any(module is earlier for earlier in modules[:i]):
            if next(module.buffers(), None) is not None:
                raise ValueError(f"layer {i} is layer {modules.index(module)} again, with buffers; give two modules")
            modules[i] = module = copy.deepcopy(module)
        elif shared:
            _have_own({part for earlier in modules[:i] for part in earlier.modules()}, module)
        for name in shared:
            if not hasattr(module.get_parameter(name), _COPY_OF):
                copied = in_place_of(named[name], named[name].detach().clone())
                setattr(copied, _COPY_OF, named[name])
                place, _, key = name.rpartition(".")
                setattr(module.get_submodule(place), key, copied)
        owners |= {parameter: f"layers.{i}.{name}" for name, parameter in named.items() if name not in shared}
        ties.append(shared)
    return ties


def _have_own(earlier: set[nn.Module], layer: nn.Module) -> None:
    """Replace submodules with parameters that earlier layers hold by copies, which are then tied."""
    parts, made = list(layer.modules()), dict[int, Any]()
    for part in parts:
        # Tensors that are no parameters stay shared.
        made |= {id(tensor): tensor for tensor in (*part.buffers(), *vars(part).values()) if isinstance(tensor, Tensor)}
    for part in parts:
        if part not in earlier:
            for name, child in part._modules.items():
                if child in earlier and next(child.parameters(), None) is not None:
                    part._modules[name] = copy.deepcopy(child, made)


# ---- What they ask for by name


@dataclass(eq=False)
class OwnLayers:
    """This rank's layers that are called by the names of their parameters: what they ask for of a microbatch."""

    #: the name of the model's first unit, which is given the tokens alone
    _first: str
    #: the stages of this rank by number
    _stages: Mapping[int, Stage]
    #: the device of the batch's keys
    _device: torch.device
    #: the keys for which no layer lacked anything, and true if this rank had metadata alone
    _checked: tuple[frozenset[str], bool] | None = None

    @cached_property
    def calls(self) -> list[UnitCall]:
        """The layers as their stages call them."""
        return [call for stage in self._stages.values() for call in stage.calls]

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset[str]().union(*(call.parameters.keys for call in self.calls))

    @cached_property
    def _are_open(self) -> bool:
        return any(stage.boundary.is_open for stage in self._stages.values())

    @property
    def are_plain(self) -> bool:
        """True if all take and give the plain stream with its sequences, and ask for no more."""
        return not (self._wanted or self._are_open or any(call.parameters.required for call in self.calls))

    def given(self, part: PackedBatch, randomness: Randomness | None, numbers: Mapping[str, int]) -> Given:
        """All that this rank's units ask for of their microbatch by name, of which `part` is this rank's."""
        wanted = sorted(self._wanted.intersection(part.keys))
        return Given({key: part[key].to(self._device) for key in wanted}, randomness, numbers)

    def prepare_for(self, batch: PackedBatch) -> None:
        """Refuse a batch that they cannot take, as far as that is known before they run.

        Raises:
            ValueError: a layer of this rank needs more; names the layer.
        """
        if (form := (frozenset(batch.keys), batch.data is None)) == self._checked:
            return
        for call in self.calls:
            call.lacks = call.lacking(batch.keys)
            # What a user's own layer gives may be what the next one needs, which is known once it has run.
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
        self._checked = form


def _attends_to_all_rows(call: UnitCall, keys: Iterable[str]) -> bool:
    """True for a layer with torch's attention that is given rows alone, no lengths and no masks."""
    asked = call.parameters
    if asked.sequences or asked.required or not asked.keys.isdisjoint(keys):
        return False
    return any(isinstance(part, nn.MultiheadAttention) for part in call.module.modules())
