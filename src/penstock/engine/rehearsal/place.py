"""The surroundings of a rank that is rehearsed alone: groups and a transport that count, and layers without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.build import build_stages
from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline, Surroundings
from penstock.engine.precision import autocast_of
from penstock.engine.rehearsal.counted import CountedGroup, CountedTransport, TrafficCount
from penstock.engine.rehearsal.meter import Meter
from penstock.model import UnitSpec
from penstock.model.devices import use_kernels_of
from penstock.model.layers.experts import ExpertBlock
from penstock.model.linear import Pack
from penstock.parallel import Grid
from penstock.parallel.gradients import in_place_of
from penstock.parallel.grid import device_groups
from penstock.runtime import Boundary, Recorder, Stage, Transport
from penstock.runtime.transport import Line
from penstock.schedule import Placement
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.recording import Record
from penstock.settings import ConfigError, Groups, Layout


@dataclass(frozen=True, eq=False)
class RehearsedPlace(Surroundings):
    """A rank of a layout, the device that it is rehearsed on, and the counters of its memory and traffic."""

    rank: int
    device: torch.device
    meter: Meter = field(default_factory=Meter)
    #: counts what the rank sends
    traffic: TrafficCount = field(default_factory=TrafficCount)
    given_cut: tuple[tuple[range, ...], ScheduleChoice] | None = None
    hold_values = False

    @classmethod
    def of(cls, device: str, rank: int = 0) -> RehearsedPlace:
        """The place for an engine's option `device`."""
        # The meta device is on every machine, and its operations take the paths of a GPU's.
        return cls(rank, torch.device("cpu" if device == "cpu" else "meta"))

    def grid(self, layout: Layout, options: EngineOptions) -> Grid:
        def group(groups: Groups, axis: str) -> CountedGroup | None:
            ranks = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
            return CountedGroup(self.rank, ranks, axis, self.traffic) if len(ranks) > 1 else None

        return Grid(layout, self.device, self.rank, **device_groups(layout, group))

    def recorder(self, grid: Grid, coordinates: str | None) -> Recorder:
        return MeteredRecorder(self.meter, grid.pp_rank, coordinates)

    def transport(self, pipeline: Pipeline, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        return CountedTransport(pipeline.grid.pp_rank, device, self.meter, self.traffic)

    def stages(
        self,
        units: Sequence[UnitSpec],
        units_by_stage: Mapping[int, range],
        boundary: Boundary,
        options: EngineOptions,
        device: torch.device,
        pack: Pack | None = None,
    ) -> dict[int, Stage]:
        """As `build_stages`, but with tensors without values and the plain stream between stages.

        Raises: ConfigError for a user's own layers that have values, which a rehearsal would destroy.
        """
        for unit in units:
            module = unit.build() if unit.is_own else nn.Module()
            if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                raise ConfigError(
                    f"a rehearsal runs layers without data, and {unit.name} has values that it would lose; make your "
                    'layers for it under torch.device("meta")'
                )
        boundary = replace(boundary, is_open=False)
        units = [replace(unit, initialise=lambda module, seed: None) for unit in units]
        with _disable_current_modes():
            stages = build_stages(units, units_by_stage, boundary, options, torch.device("meta"))
        for stage in stages.values():
            stage.autocast = autocast_of(options.precision, device)
            for _, module in stage.units:
                _allocate(module, device)
                if not options.reproducible:  # The only kernels for that are chosen already.
                    use_kernels_of(device, module)
                for part in module.modules():
                    if isinstance(part, ExpertBlock):
                        part.read_counts = even_counts
        return stages


def even_counts(num_rows: int, counts_E: Tensor, *received: Tensor) -> Sequence[int]:
    """Numbers of rows in place of `read_counts`: equally many for each expert, and all ranks send alike."""
    whole, longer = divmod(num_rows, len(counts_E))
    sizes = [whole + (expert < longer) for expert in range(len(counts_E))]
    return [*sizes, *(size for counts_RE in received for size in sizes[: counts_RE.shape[1]] * len(counts_RE))]


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Move a module's meta tensors to a device, where they get memory."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    moved[tensor] = in_place_of(tensor, new) if isinstance(tensor, nn.Parameter) else new
                tensors[name] = moved[tensor]  # type: ignore[assignment]


class MeteredRecorder(Recorder):
    """A recorder that also reports the end of each action to a meter."""

    #: told of each action's end
    _meter: Meter

    def __init__(self, meter: Meter, rank: int, coordinates: str | None) -> None:
        super().__init__(rank, coordinates=coordinates)
        self._meter = meter

    def end(self, record: Record) -> None:
        super().end(record)
        self._meter.point(str(record.action))

    def _ranks_of(self, group: object) -> tuple[int, ...]:
        return group.ranks if isinstance(group, CountedGroup) else super()._ranks_of(group)  # type: ignore[arg-type]
