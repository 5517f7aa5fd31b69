"""The parts that a check compares: a user's own layers, loss and optimizer, and copies of them.

Each rank and each plain loop has copies of its own, as each process has.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from penstock.engine.check.plain_loop import PlainLoop
from penstock.engine.check.ranks_in_turn import EngineInTurn, RankInTurn, RanksInTurn
from penstock.engine.options import EngineOptions
from penstock.engine.own_layers import units_of_layers
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.loss import LossFn, LossWeightFn
from penstock.model import UnitSpec
from penstock.parallel.device import agree_on_device
from penstock.settings.declare import words_of


@dataclass(frozen=True, eq=False)
class OwnParts:
    """A user's own layers, loss and optimizer; or the units of a model in the place of layers."""

    layers: Sequence[nn.Module | partial[Any]] | Sequence[UnitSpec]
    loss_fn: LossFn
    loss_weight_fn: LossWeightFn
    options: EngineOptions

    def copied(self) -> OwnParts:
        """Copies, which share among themselves what the originals share. Raises: ValueError if one cannot be copied."""
        optimizer, memo = self.options.optimizer, {id(cell): cell for cell in _cells_of_methods(self.layers)}
        parts = [list(self.layers), self.loss_fn, self.loss_weight_fn, optimizer.factory, optimizer.scheduler]
        found = list(_parts_within(parts))
        parameters = [part for part in found if isinstance(part, nn.Parameter)]
        try:
            for parameter in parameters:
                _copy_parameter(parameter, memo)
            for function in found:
                if isinstance(function, FunctionType):
                    _copy_function(function, memo)
            layers, loss_fn, weight_fn, factory, scheduler = copy.deepcopy(parts, memo)
            for parameter in parameters:
                _copy_hooks(parameter, memo)
            modules = [layer for layer in layers if isinstance(layer, nn.Module)]
            if not all(parameter.is_leaf for module in modules for parameter in module.parameters()):
                raise TypeError("torch's copy of a ScriptModule cannot be trained; give the module it was made of")
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"a layer, the loss or the optimizer cannot be copied: {words_of(error)}; a check works on copies, by "
                "copy.deepcopy"
            ) from error
        optimizer = replace(optimizer, factory=factory, scheduler=scheduler)
        return OwnParts(layers, loss_fn, weight_fn, replace(self.options, optimizer=optimizer))

    @cached_property
    def device(self) -> torch.device:
        return agree_on_device(self.options.device, lambda view: [view], 0)

    def units(self) -> Sequence[UnitSpec]:
        """The units of the layers. Raises: ValueError, as `Engine.from_layers`."""
        units = [layer for layer in self.layers if isinstance(layer, UnitSpec)]
        return units or units_of_layers(self.layers)  # pyright: ignore[reportArgumentType]  # all are, or none

    def plain_loop(self) -> PlainLoop:
        return PlainLoop(self.units(), self.loss_fn, self.loss_weight_fn, self.options, self.device)

    def engine(self, ranks: RanksInTurn, rank: int, hidden_size: int, changes: Mapping[str, Any]) -> EngineInTurn:
        options = replace(self.options, **changes)
        pipeline = Pipeline(self.units(), hidden_size, ranks.layout, options, RankInTurn(ranks, rank))
        return EngineInTurn(pipeline, self.loss_fn, self.loss_weight_fn)


def _parts_within(parts: Iterable[Any]) -> Iterator[FunctionType | nn.Parameter]:
    """The functions and parameters among parts: of modules, containers, closures, and hooks."""
    seen, found = set[int](), list(parts)
    while found:
        part = found.pop()
        # A part may refer back to what holds it.
        if id(part) in seen:
            continue
        seen.add(id(part))
        match part:
            case FunctionType():
                yield part
                for cell in part.__closure__ or ():
                    with contextlib.suppress(ValueError):  # a variable without a value
                        found.append(cell.cell_contents)
            case MethodType():
                found.append(part.__self__)
            case nn.Parameter():
                yield part
                found += (hook for hooks in _hooks(part) for hook in hooks)
            case nn.Module():
                found += vars(part).values()
            case partial():
                found += (part.func, *part.args, *part.keywords.values())
            case dict():
                found += part.values()
            case list() | tuple():
                found += part


def _cells_of_methods(layers: Iterable[Any]) -> Iterator[Any]:
    """The variables that methods of the layers' classes close over: a copied layer's class has them still."""
    kinds = {type(part) for layer in layers if isinstance(layer, nn.Module) for part in layer.modules()}
    kinds |= {layer.func for layer in layers if isinstance(layer, partial) and isinstance(layer.func, type)}
    for base in {base for kind in kinds for base in kind.__mro__}:
        for method in vars(base).values():
            if isinstance(method, FunctionType):
                yield from method.__closure__ or ()


def _copy_parameter(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Copy a parameter, its memory and its attributes; torch's own copy has memory that it shares with nothing."""
    new = copy.deepcopy(parameter, memo)
    new.data = copy.deepcopy(parameter.data, memo)
    vars(new).update(copy.deepcopy(vars(parameter), memo))


def _hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """A parameter's hooks on gradients, and those after their accumulation; torch lists them in attributes alone."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list((parameter._backward_hooks or {}).values()), list((after or {}).values())


def _copy_hooks(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Register copies of a parameter's hooks with its copy, which `deepcopy` leaves without."""
    if parameter.requires_grad:
        hooks, hooks_after = copy.deepcopy(_hooks(parameter), memo)
        for hook in hooks:
            memo[id(parameter)].register_hook(hook)
        for hook in hooks_after:
            memo[id(parameter)].register_post_accumulate_grad_hook(hook)


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A copy of a function and of the variables that it closes over; `deepcopy` gives the function itself."""
    if function.__closure__ is None or id(function) in memo:
        return memo.get(id(function), function)
    # Functions may share a variable.
    new_cells = [(memo.setdefault(id(cell), CellType()), cell) for cell in function.__closure__ if id(cell) not in memo]
    cells = tuple(memo[id(cell)] for cell in function.__closure__)
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, memo[id(function)] = function.__kwdefaults__, new
    vars(new).update(vars(function))
    for cell, old_cell in new_cells:
        try:
            value = old_cell.cell_contents
            cell.cell_contents = (
                _copy_function(value, memo) if isinstance(value, FunctionType) else copy.deepcopy(value, memo)
            )
        except ValueError:
            continue  # a variable without a value
        except (TypeError, RuntimeError):
            cell.cell_contents = old_cell.cell_contents  # something that cannot be copied, such as a file
    return new
