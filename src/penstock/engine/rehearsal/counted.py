"""Process groups and a transport that only count: nothing is sent, and what would arrive is memory without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.build import autocast_of, build_stages
from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline
from penstock.engine.rehearsal.memory import planned_grid
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.sharding import UnitSource
from penstock.parallel import Grid
from penstock.parallel.renewable import RenewableGroup
from penstock.runtime import Recorder, Stage, Transport
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Channel, Placement
from penstock.schedule.recording import CollectiveKind, Record
from penstock.schedule.rehearsal import CollectiveTraffic, MemoryKind, MessageTraffic
from penstock.settings import Layout

_KINDS = {
    "allgather": CollectiveKind.ALL_GATHER,
    "_allgather_base": CollectiveKind.ALL_GATHER,
    "all_gather_single": CollectiveKind.ALL_GATHER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "alltoall_base": CollectiveKind.ALL_TO_ALL,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.GRADIENTS,
    "_reduce_scatter_base": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_single": CollectiveKind.REDUCE_SCATTER,
    "send": CollectiveKind.SEND_RECEIVE,
}
"""What torch.distributed calls of a group -> the kind that is counted."""

# The input is their second argument; that of all others is the first.
_INPUT_SECOND = frozenset(name for name in _KINDS if "gather" in name or "scatter" in name or "to_all" in name)
_INPUT_SECOND |= {"alltoall_base"}


class TrafficCount:
    """Counts what a rank sends, and notes the order of its collectives."""

    #: group's ranks and the call in words, in the order of the launches
    launches: list[tuple[tuple[int, ...], str]]
    #: collectives and messages of one kind and size -> their number
    _collectives: Counter[CollectiveTraffic]
    _messages: Counter[MessageTraffic]

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was counted."""
        self.launches, self._collectives, self._messages = [], Counter(), Counter()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within this context count from zero; afterwards go on as before."""
        before = self.launches, self._collectives, self._messages
        self.restart()
        try:
            yield
        finally:
            self.launches, self._collectives, self._messages = before

    def launched(self, kind: CollectiveKind, group: CountedGroup, x: Tensor) -> None:
        """Count a collective with this rank's input."""
        self._collectives[CollectiveTraffic(kind, group.axis, group.size(), x.nbytes)] += 1
        self.launches.append((group.ranks, f"{kind} of {x.numel()} {str(x.dtype).removeprefix('torch.')}"))

    def sent(self, channel: Channel, x: Tensor) -> None:
        """Count a message."""
        self._messages[MessageTraffic(channel, x.nbytes)] += 1

    @property
    def collectives(self) -> tuple[CollectiveTraffic, ...]:
        """The collectives so far, equal ones added up, in the order of their first launch."""
        return tuple(
            CollectiveTraffic(one.kind, one.axis, one.num_ranks, one.num_bytes, number)
            for one, number in self._collectives.items()
        )

    @property
    def messages(self) -> tuple[MessageTraffic, ...]:
        """The messages so far, equal ones added up."""
        return tuple(MessageTraffic(one.channel, one.num_bytes, number) for one, number in self._messages.items())


class _Done:
    """A collective that is over as soon as it is launched."""

    def wait(self, *limits: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Nowhere:
    """Takes every call that torch.distributed makes of a group, and does nothing but count it."""

    #: the group that it stands for
    _group: CountedGroup
    #: where calls are counted
    _traffic: TrafficCount

    def __init__(self, group: CountedGroup, traffic: TrafficCount) -> None:
        self._group, self._traffic = group, traffic

    def __getattr__(self, name: str) -> Any:
        if name not in _KINDS:
            raise AttributeError(f"{name} cannot be rehearsed")

        def call(*arguments: Any, **settings: Any) -> _Done:
            kind, given = _KINDS[name], arguments[1 if name in _INPUT_SECOND else 0]
            self._traffic.launched(kind, self._group, given[0] if isinstance(given, list) else given)
            return _Done()

        return call


class CountedGroup(RenewableGroup):
    """This rank's place in a process group of which nobody else is there."""

    #: the global ranks of the group
    ranks: tuple[int, ...]
    #: the axes of the layout along which they lie, which are also its name
    axis: str
    _own_name: str
    #: takes the calls that a real group's communicators would
    inner: _Nowhere
    backend: _Nowhere

    def __init__(self, rank: int, ranks: tuple[int, ...], axis: str, traffic: TrafficCount) -> None:
        dist.ProcessGroup.__init__(self, ranks.index(rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self.ranks, self.axis, self._own_name = ranks, axis, axis
        self.inner = self.backend = _Nowhere(self, traffic)

    def send_receive(self, sent: Tensor, to: int, arrived: Tensor, source: int) -> list[Any]:
        """Count a step round a ring as that, whatever the backend makes of it."""
        return [self.inner.send([sent], to, 0)]


@dataclass(eq=False)
class _Arrival:
    """A posted receive, whose message is there as soon as it is asked for."""

    #: filled by the message; counted by the meter
    buffer: Tensor
    meter: Meter

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        self.meter.claim(MemoryKind.TRANSIENT, [self.buffer])
        return self.buffer


class CountedTransport:
    """A transport with nobody at the other ends: a receive allocates, a send is held until the link's next one."""

    #: the rank in the pipeline, and its device
    rank: int
    _device: torch.device
    #: counts the messages' memory
    _meter: Meter
    #: counts the messages
    _traffic: TrafficCount
    #: the last tensor of each link
    _leaving: dict[Line, Tensor]

    def __init__(self, rank: int, device: torch.device, meter: Meter, traffic: TrafficCount) -> None:
        self.rank, self._device, self._meter, self._traffic = rank, device, meter, traffic
        self._leaving = {}

    def receive(self, channel: Line, shape: Sequence[int], dtype: torch.dtype) -> Receipt:
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        self._meter.claim(MemoryKind.TRANSPORT, [buffer])
        return _Arrival(buffer, self._meter)

    def send(self, channel: Line, tensor: Tensor) -> None:
        assert isinstance(channel, Channel)
        self._traffic.sent(channel, tensor)
        self._meter.claim(MemoryKind.TRANSPORT, [tensor])
        self._leaving[channel] = tensor

    def num_pending(self) -> int:
        return len(self._leaving)

    def settle(self) -> None:
        self._leaving.clear()

    def abandon(self) -> None:
        self._leaving.clear()

    def close(self) -> None:
        """Nothing to do."""


class MeteredTransport:
    """A real transport whose buffers a meter counts as the transport's, for the same figures of a real run."""

    #: the real one
    _inner: Transport
    #: the rank in the pipeline
    rank: int
    #: counts the messages' memory
    _meter: Meter

    def __init__(self, inner: Transport, meter: Meter) -> None:
        self._inner, self._meter, self.rank = inner, meter, inner.rank

    def receive(self, channel: Line, shape: Sequence[int], dtype: torch.dtype) -> Receipt:
        receipt = self._inner.receive(channel, shape, dtype)
        buffer: Tensor = receipt.buffer  # type: ignore[attr-defined]
        self._meter.claim(MemoryKind.TRANSPORT, [buffer])
        return _MeteredReceipt(receipt, self._meter)

    def send(self, channel: Line, tensor: Tensor) -> None:
        self._meter.claim(MemoryKind.TRANSPORT, [tensor])
        self._inner.send(channel, tensor)

    def num_pending(self) -> int:
        return self._inner.num_pending()

    def settle(self) -> None:
        self._inner.settle()

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        self._inner.close()


@dataclass(eq=False)
class _MeteredReceipt:
    #: the receipt that is waited for, which the meter is shown
    receipt: Receipt
    meter: Meter

    def ready(self) -> bool:
        return self.receipt.ready()

    def wait(self) -> Tensor:
        tensor = self.receipt.wait()
        self.meter.claim(MemoryKind.TRANSIENT, [tensor])
        return tensor


# ---- Pipelines whose steps are measured: a real one, and one of a rank that is rehearsed alone and without data


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
