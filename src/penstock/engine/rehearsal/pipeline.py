"""Pipelines whose steps are measured: a real one, and one of a rank that is rehearsed alone and without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.build import autocast_of, build_stages
from penstock.engine.memory import planned_grid
from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline
from penstock.engine.rehearsal.counted import CountedGroup, CountedTransport, MeteredTransport, TrafficCount
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.sharding import UnitSource
from penstock.parallel import Grid
from penstock.runtime import Recorder, Stage, Transport
from penstock.runtime.transport import Line
from penstock.schedule import Placement
from penstock.schedule.recording import Record
from penstock.settings import Layout


@dataclass(frozen=True, eq=False)
class RehearsedPlace:
    """A rank of a layout, the device that it is rehearsed on, and the meter that measures it."""

    rank: int
    device: torch.device
    meter: Meter


class MeteredPipeline(Pipeline):
    """A pipeline that reports the end of each action, and its messages' memory, to a meter."""

    #: measures this rank's step
    meter: Meter

    def __init__(
        self, meter: Meter, units: UnitSource, hidden_size: int, layout: Layout, options: EngineOptions
    ) -> None:
        self.meter = meter
        super().__init__(units, hidden_size, layout, options)

    def _make_recorder(self, place: str | None) -> Recorder:
        return _MeteredRecorder(self.meter, self.grid.pp_rank, place)

    def open_transport(self, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        return MeteredTransport(super().open_transport(lines, device), self.meter)


class RehearsedPipeline(MeteredPipeline):
    """The pipeline of one rank of a layout whose other ranks are not there; its groups and its transport count."""

    #: counts what the rank sends
    traffic: TrafficCount
    #: the rank among all, and its device
    _rank: int
    _device: torch.device

    def __init__(
        self, place: RehearsedPlace, units: UnitSource, hidden_size: int, layout: Layout, options: EngineOptions
    ) -> None:
        self.traffic, self._rank, self._device = TrafficCount(), place.rank, place.device
        super().__init__(place.meter, units, hidden_size, layout, options)

    def _join(self) -> tuple[torch.device, Grid]:
        def group(ranks: tuple[int, ...], axis: str) -> CountedGroup:
            return CountedGroup(self._rank, ranks, axis, self.traffic)

        return self._device, planned_grid(self.layout, self._rank, self._device, group)

    def open_transport(self, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        return CountedTransport(self.grid.pp_rank, device, self.meter, self.traffic)

    def _check_whole_model(self) -> None:
        """Compare nothing: there are no values, and no other rank."""

    def _make_stages(self, numbers: Sequence[int]) -> dict[int, Stage]:
        units = [replace(unit, initialise=_leave) for unit in self.units]
        with _disable_current_modes():
            stages = build_stages(units, self.cut, numbers, self.boundary, self.options, torch.device("meta"))
        for stage in stages.values():
            stage.autocast = autocast_of(self.options.precision, self.device)
            for _, module in stage.units:
                _allocate(module, self.device)
        return stages


def _leave(module: nn.Module, seed: int) -> None:
    """Set no values: nothing has any."""


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module's tensors, which are on no device, memory on one."""
    known: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in known:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    is_trained = isinstance(tensor, nn.Parameter)
                    known[tensor] = nn.Parameter(new, tensor.requires_grad) if is_trained else new
                own[name] = known[tensor]  # type: ignore[assignment]


class _MeteredRecorder(Recorder):
    #: hears of each action's end
    _meter: Meter

    def __init__(self, meter: Meter, rank: int, place: str | None) -> None:
        super().__init__(rank, place=place)
        self._meter = meter

    def end(self, record: Record) -> None:
        super().end(record)
        self._meter.finished(record.action)

    def _ranks_of(self, group: object) -> tuple[int, ...]:
        return group.ranks if isinstance(group, CountedGroup) else super()._ranks_of(group)  # type: ignore[arg-type]
