"""The parts that a check compares: a user's own layers, loss and optimizer, and copies of them.

Each rank and each plain loop has copies of its own, as each process has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from penstock.engine.check.plain_loop import PlainLoop
from penstock.engine.check.ranks_in_turn import EngineInTurn, PipelineInTurn, RanksInTurn
from penstock.engine.options import EngineOptions
from penstock.engine.own_layers import units_of_layers
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
        optimizer, memo = self.options.optimizer, dict[int, Any]()
        parts = [list(self.layers), self.loss_fn, self.loss_weight_fn, optimizer.factory, optimizer.scheduler]
        for function in _functions(parts):
            _copy_function(function, memo)
        try:
            layers, loss_fn, weight_fn, factory, scheduler = copy.deepcopy(parts, memo)
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
        pipeline = PipelineInTurn(ranks, rank, self.units(), hidden_size, options)
        return EngineInTurn(pipeline, self.loss_fn, self.loss_weight_fn)


def _functions(parts: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among parts, and among the attributes and hooks of modules."""
    for part in parts:
        if isinstance(part, FunctionType):
            yield part
        elif isinstance(part, nn.Module):
            for module in part.modules():
                yield from _functions(value for key, value in vars(module).items() if key != "_modules")
        elif isinstance(part, partial):
            yield from _functions((part.func, *part.args, *part.keywords.values()))
        elif isinstance(part, list | tuple | dict):
            yield from _functions(part.values() if isinstance(part, dict) else part)


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A copy of a function and of the variables that it closes over; `deepcopy` gives the function itself."""
    if function.__closure__ is None or id(function) in memo:
        return memo.get(id(function), function)
    cells = tuple(CellType() for _ in function.__closure__)
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, memo[id(function)] = function.__kwdefaults__, new
    vars(new).update(vars(function))
    for cell, old_cell in zip(cells, function.__closure__, strict=True):
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
