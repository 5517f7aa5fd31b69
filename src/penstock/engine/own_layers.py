"""A user's own layers: as units, and what they ask for of a microbatch by name."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.data import PackedBatch
from penstock.engine.build import keep_linears_eager
from penstock.model import (
    BoundLayer,
    Given,
    Limits,
    Randomness,
    UnitSpec,
    kept_python_numbers,
    kept_random_state,
    switch_linears,
    switch_sequentials,
)
from penstock.parallel.gradients import in_place_of
from penstock.runtime import Stage, UnitCall
from penstock.settings import checked
from penstock.settings.declare import type_in_words

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
        if isinstance(layer, partial) and not isinstance(layer.func, nn.Module):
            # What the others know of it: names, shapes and dtypes.
            makers[number] = partial(_made, layer, number)
            layer = makers[number]()
            if real := [name for name, own in layer.named_parameters() if not own.is_meta]:
                raise ValueError(
                    f"layer {number} is made on the rank that holds it, but its {real[0]!r} exists already; make the "
                    "parameter in the layer, or give the layer itself"
                )
        modules.append(_prepared(layer, number))
    # A list or function that still reaches a module of an earlier layer reads its parameters.
    units, tied, (reads, shared_buffers) = [], _tied(modules), _shared(modules)
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
                reads=reads[number],
                shared_buffers=shared_buffers[number],
            )
        )
    return tuple(units)


def _prepared(layer: Any, number: int) -> nn.Module:
    """A layer as a module whose linear layers can defer weight gradients."""
    if isinstance(layer, partial) and isinstance(layer.func, nn.Module):
        layer = BoundLayer(layer)
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer {number} is {type_in_words(layer)}; layers are torch.nn.Modules")
    if lazy := [name for name, own in (*layer.named_parameters(), *layer.named_buffers()) if is_lazy(own)]:
        raise ValueError(
            f"layer {number} has {lazy[0]!r} without a shape, of a lazy module such as nn.LazyLinear; give "
            "the module its sizes, as in nn.Linear(8, 8), or call it once before"
        )
    switch_linears(layer)
    switch_sequentials(layer)
    # A user has compiled it, or a part of it.
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in layer.modules()):
        keep_linears_eager(layer)
    return layer


def _made(maker: partial[Any], number: int, seed: int | None = None) -> nn.Module:
    """A layer that its maker makes: a new one whose random numbers are those of the seed, or one without values."""
    cpu = torch.device("cpu")
    with kept_random_state(cpu), kept_python_numbers(), torch.device("meta") if seed is None else cpu:
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
    found: list[dict[str, str]] = []
    for i, module in enumerate(modules):
        # A copy that an engine made before knows what it is a copy of.
        named = {name: getattr(own, _COPY_OF, own) for name, own in module.named_parameters()}
        shared = {name: owners[own] for name, own in named.items() if own in owners}
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
                place, _, own = name.rpartition(".")
                setattr(module.get_submodule(place), own, copied)
        owners |= {own: f"layers.{i}.{name}" for name, own in named.items() if name not in shared}
        found.append(shared)
    return found


def _have_own(earlier: set[nn.Module], layer: nn.Module) -> None:
    """Give a layer its own module in place of each with parameters that earlier layers hold: it gets copies of them."""
    parts, made = list(layer.modules()), dict[int, Any]()
    for part in parts:
        # Tensors that are no parameters stay shared: see `_shared`.
        made |= {id(own): own for own in (*part.buffers(), *vars(part).values()) if isinstance(own, Tensor)}
    for part in parts:
        if part not in earlier:
            for name, child in part._modules.items():
                if child in earlier and next(child.parameters(), None) is not None:
                    part._modules[name] = copy.deepcopy(child, made)


# ---- What they have in common without a tie: parameters that one reads of another, and buffers


_Users = dict[str, str | None]


def _shared(modules: list[nn.Module]) -> tuple[list[dict[str, str]], list[dict[str, tuple[Tensor, _Users]]]]:
    """By layer `UnitSpec.reads` and `UnitSpec.shared_buffers`."""
    owners: dict[Tensor, str] = {}
    users: dict[Tensor, _Users] = {}
    for i, module in enumerate(modules):
        for name, own in module.named_parameters():
            owners.setdefault(getattr(own, _COPY_OF, own), f"layers.{i}.{name}")
        for name, own in module.named_buffers():
            users.setdefault(own, {})[f"layers.{i}"] = name
    reads: list[dict[str, str]] = []
    others = {own: f"{layer}.{name}" for own, of in users.items() for layer, name in list(of.items())[:1]}
    for i, module in enumerate(modules):
        reached = [(attribute, getattr(own, _COPY_OF, own)) for attribute, own in _reached(module)]
        others |= {own: f"layers.{i}.{attribute}" for attribute, own in reached if own not in others}
        named = {owners[own]: attribute for attribute, own in reached if own in owners}
        reads.append({owner: own for owner, own in named.items() if not owner.startswith(f"layers.{i}.")})
        for _, own in reached:
            if own in users:
                users[own].setdefault(f"layers.{i}", None)
    _check_memory(owners, others)
    shared = [
        {name: (own, users[own]) for name, own in module.named_buffers() if len(users[own]) > 1} for module in modules
    ]
    return reads, shared


def _check_memory(parameters: Mapping[Tensor, str], others: Mapping[Tensor, str]) -> None:
    """Refuse tensors in the memory of a parameter: the engine moves it, and they would keep its first values.

    Raises: ValueError naming both.
    """
    names = {**parameters, **{own: name for own, name in others.items() if own not in parameters}}
    order = {own: number for number, own in enumerate(names)}
    spans = sorted((*span, order[own], own) for own in names if (span := _span(own)) is not None)
    near: list[tuple[str, int, int, int, Tensor]] = []
    found: list[tuple[int, int]] = []
    for where, begin, end, number, own in spans:
        near = [span for span in near if span[0] == where and span[2] > begin]
        for *_, before, earlier in near:
            pair = min(number, before), max(number, before)
            if pair[0] < len(parameters) and _overlap(own, earlier):
                found.append(pair)
        near.append((where, begin, end, number, own))
    named = list(names.values())
    for first, second in sorted(found):
        # What torch's older spectral norm leaves in the place of a weight is computed anew before it is read.
        if named[first] != f"{named[second]}_orig":
            instead = "read the parameter itself"
            if second < len(parameters):
                instead = "assign the parameter itself (self.weight = other.weight), which ties it"
            raise ValueError(
                f"{named[second]} shares its memory with {named[first]}, which the engine gives memory of its own; "
                f"{instead}"
            )


def _span(own: Tensor) -> tuple[str, int, int] | None:
    """The place of a tensor's memory: where, its first byte there and the one after its last; None without memory."""
    if own.layout != torch.strided or is_lazy(own) or not own.numel():
        return None
    storage = own.untyped_storage()
    start = storage.data_ptr()
    begin = start + int(own.storage_offset()) * own.itemsize
    reach = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
    # Without values it has no address: the storage stands for it.
    return (str(own.device) if start else f"without values {storage._cdata}"), begin, begin + reach * own.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True if two tensors whose spans overlap have an element in common; columns of one matrix have none."""
    if one.itemsize != other.itemsize:
        return True
    places = []
    for own in (one, other):
        place = torch.tensor(own.untyped_storage().data_ptr() // own.itemsize + own.storage_offset())
        for size, stride in zip(own.shape, own.stride(), strict=True):
            place = place[..., None] + torch.arange(size) * stride
        if place.numel() == 1 + int(place.max() - place.min()):
            return True
        places.append(place)
    return bool(torch.isin(*places).any())


_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _reached(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a layer reaches by attributes which modules do not register, each with such an attribute."""
    # The layer's own modules are looked at one by one.
    seen = {id(part) for part in layer.modules()}
    for path, part in layer.named_modules():
        names = vars(part).keys() - _REGISTERED
        left = [(f"{path}.{name}" if path else name, vars(part)[name]) for name in sorted(names)]
        while left:
            name, value = left.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                yield name, value
            else:
                left += [(name, inner) for inner in within(value)]


def within(value: Any) -> Iterable[Any]:
    """The values inside one: items of a container, variables of a function, attributes of a user's own object."""
    if value is None or isinstance(value, str | bytes | int | float | type | ModuleType):
        return ()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return *cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    if isinstance(value, ReferenceType):
        return (value(),)
    if not isinstance(value, nn.Module) and not is_a_users(value):
        return ()
    return getattr(value, "__dict__", {}).values()


def is_a_users(value: object) -> bool:
    """True if its class is neither torch's nor ours."""
    return type(value).__module__.partition(".")[0] not in ("torch", "penstock")


_MOST_REACHED = 50_000


def left_for(function: Any) -> Tensor | None:
    """A tensor with a graph that a function reaches; None if there is none."""
    found = (own for own in reached_by(function) if isinstance(own, Tensor) and own.grad_fn is not None)
    return next(found, None)


def reached_by(function: Any) -> Iterator[Any]:
    """The function, and all that it reaches by variables, attributes or containers, each once."""
    left, seen = [function], dict[int, Any]()
    while left and len(seen) < _MOST_REACHED:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if isinstance(value, nn.Module) and not is_a_users(value):
            # Torch's own keep weights that they compute as attributes, too.
            left += value._modules.values()
        elif not isinstance(value, Tensor):
            left += within(value)
            left += [getattr(type(value), name, None) for name in ("forward", "__call__") if is_a_users(value)]
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in ("torch", "penstock"):
            left += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]


_EMPTY = CellType()
"""The place of a variable in a function, before it has a value."""


# ---- What they ask for by name


CheckLabels = Callable[[PackedBatch, int], None]
"""Refuses labels of a batch that are no classes, given their number."""


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
    #: checks the present batch's labels; None where they are not read as classes
    _check_labels: CheckLabels | None = None
    #: the number of classes of the last logits that the last layer gave; None before
    _num_classes: int | None = None

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

    def given(self, own: PackedBatch, randomness: Randomness | None, numbers: Mapping[str, int]) -> Given:
        """All that this rank's units ask for of their microbatch by name, of which `own` is this rank's part."""
        wanted = sorted(self._wanted.intersection(own.keys))
        return Given({key: own[key].to(self._device) for key in wanted}, randomness, numbers)

    def prepare_for(self, batch: PackedBatch, check_labels: CheckLabels | None = None) -> None:
        """Refuse a batch that they cannot take, as far as that is known before they run; `check_labels` is kept for it.

        Raises:
            ValueError: a layer of this rank needs more; names the layer.
        """
        self._check_labels = check_labels
        if check_labels is not None and self._num_classes is not None:
            check_labels(batch, self._num_classes)
        if (given := (frozenset(batch.keys), batch.data is None)) == self._checked:
            return
        for call in self.calls:
            call.lacks = call.lacking(batch.keys)
            # What a user's own layer gives may be what the next one needs, which is known once it has run.
            if call.lacks and (call.name == self._first or not self._are_open):
                raise ValueError(call.lacks)
            if (beyond := call.parameters.unreachable(batch.keys)) is not None:
                raise ValueError(
                    f"{call.name} hands on arguments by position alone, so {beyond[0]!r} needs {beyond[1]!r} before "
                    "it, which is no key of the batch; let its forward take **kwargs, too"
                )
            if batch.data is None and (keys := sorted(call.parameters.keys.intersection(batch.keys))):
                raise ValueError(f"{call.name} takes the key {keys[0]!r}, but this rank was given metadata alone")
        self._checked = given

    def note_output(self, output: Any, own: PackedBatch) -> None:
        """Look at what the last layer gives. Raises: BatchError for labels that are none of its classes."""
        if isinstance(output, Tensor) and output.dim() == 2 and output.shape[0] == sum(own.sequence_lengths("tokens")):
            self._num_classes = output.shape[1]
            if self._check_labels is not None:
                self._check_labels(own, self._num_classes)
