"""The transfer of weights from one engine to another in the same world: no disk, one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline
from penstock.parallel import connect
from penstock.parallel.grid import own_world_rank, world_ranks
from penstock.parallel.host import broadcast_value, check_portable, gather_json, gather_on_all_ranks, on_all_ranks
from penstock.parallel.renewable import RenewableGroup, cut_backends, group_at
from penstock.parallel.tensor_slice import TensorSlice, laid_out
from penstock.runtime import PipelineError
from penstock.runtime.errors import TransportError
from penstock.runtime.transport import default_store
from penstock.settings import Layout
from penstock.settings.declare import check_argument

_ASK_AGAIN_S = 0.002

Slices = Mapping[str, Sequence[tuple[TensorSlice, Tensor]]]
"""A rank's tensors by their originals' names: slices with their values, as views; tied copies are listed with them."""


# ---- an engine as other engines know it


@dataclass(eq=False, repr=False)
class WeightEndpoint:
    """An engine as a source or target of weights; every process of the world has one."""

    #: sizes of the grid's axes
    layout: Layout
    #: the engine's settings
    options: EngineOptions
    #: the engine's number among all that the world has made
    _number: int
    #: this process's part of the model; None outside of the layout
    _local: Pipeline | None = None
    #: the version of the last transfer, on processes without a part of the model
    _seen: int = field(default=0, init=False)

    @cached_property
    def _world_ranks(self) -> tuple[int, ...]:
        return tuple(world_ranks(self.layout))

    @cached_property
    def _transfers(self) -> dict[WeightEndpoint, WeightTransfer]:
        """Another engine -> the transfer to it."""
        return {}

    @property
    def is_here(self) -> bool:
        """True on the ranks of the engine's layout; other processes can only take part in `send_weights`."""
        return self._local is not None

    @property
    def version(self) -> int:
        """The version of the weights: the optimizer steps taken, here or in the engine that sent them."""
        return self._seen if self._local is None else self._local.step

    def send_weights(self, to: WeightEndpoint) -> int:
        """Give another engine this one's weights, buffers and extra state, bit for bit; returns their version.

        All ranks of both engines call it on the one that sends; elsewhere it does nothing. The two may have any
        layouts and ranks. Nothing is written to disk, and beyond its parts of both engines a rank holds only what it
        sends or receives of one tensor. The engine that receives has `learns=False`.

        Raises:
            ValueError: the models differ, naming the first tensor; on all ranks alike, with nothing sent.
            TransportError: a rank has ended, or did not come in time.
        """
        check_argument("to", to, WeightEndpoint)
        if to is self:
            raise ValueError("an engine cannot send weights to itself; give another engine")
        if to.options.learns:
            raise ValueError(
                "an engine that learns cannot receive weights, which its optimizer would not know of; make it with "
                "learns=False"
            )
        for engine in (self, to):
            if engine._local is not None:
                engine._local.recovery.check_usable()
        if own_world_rank() not in (*self._world_ranks, *to._world_ranks):
            return self.version
        if dist.is_initialized():
            _visits(_place(self, to), own_world_rank(), 1)
        pipeline = self._local or to._local
        with pipeline.recorder.collective("send weights to another engine") if pipeline else nullcontext():
            try:
                if to not in self._transfers:
                    self._transfers[to] = WeightTransfer(self, to)
                extra = {} if self._local is None else self._local.extra_state.values()
                version = self.version if self._local else None
                version, extra = self._transfers[to].run(self._slices(), to._slices(), version, extra)
            except TransportError:
                if to._local is not None:
                    # Weights of several versions may stand beside each other.
                    words = "weights did not arrive whole; send them again, or load a checkpoint"
                    to._local.recovery.uncertain = words
                if to in self._transfers:
                    self._transfers.pop(to).close()
                raise
        self._seen = to._seen = version
        if to._local is not None:
            to._local.extra_state.take_values(extra)
            to._local.continue_from(version)
            to._local.model.casts.renew()
        return version

    def weights_wait(self, to: WeightEndpoint) -> bool:
        """True if this engine's first rank waits in `send_weights`; called on ranks of the engine `to`."""
        if not dist.is_initialized():
            return False
        place = _place(self, to)
        return _visits(place, self._world_ranks[0]) > _visits(place, own_world_rank())

    def close(self) -> None:
        """Close the transfers to other engines."""
        for transfer in self._transfers.values():
            transfer.close()
        self._transfers.clear()

    def _slices(self) -> Slices:
        return {}


class RemoteEngine(WeightEndpoint):
    """An engine on other ranks of the world, as this process sees it: it takes part in transfers of weights alone."""

    def __init__(self, layout: Layout, options: EngineOptions) -> None:
        grid = connect(layout, options.device, timedelta(seconds=options.timeout_s))
        super().__init__(layout, options, grid.number)

    if not TYPE_CHECKING:  # attributes that are misspelt are found

        def __getattr__(self, name: str) -> Any:
            """Explain that this process has no part of the engine. Raises: PipelineError."""
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise PipelineError(
                f"this engine is on ranks {', '.join(map(str, self._world_ranks))} of the world, and not on this one "
                f"(rank {own_world_rank()}), which can only take part in send_weights; ask engine.is_here"
            )


# ---- the transfer from one engine to another


_Piece = tuple[TensorSlice, int, int]
"""A slice of a tensor, the process that sends it, and the one that receives it."""


class WeightTransfer:
    """The transfer of weights from one engine to another; every rank of either makes it at the same point.

    Raises: TransportError naming ranks that did not come in time.
    """

    #: processes of the engine that sends, of the one that receives, and of both in order; and this process
    sources: Sequence[int]
    targets: Sequence[int]
    ranks: Sequence[int]
    rank: int
    #: carries slices, on host memory; None if one process has both engines alone
    group: RenewableGroup | None
    #: carries them between GPUs, where each process has one of its own for both engines; None elsewhere
    device_group: RenewableGroup | None
    #: name -> slices that this process sends or receives; None before the first transfer
    _pieces: dict[str, list[_Piece]] | None

    def __init__(self, source: WeightEndpoint, target: WeightEndpoint) -> None:
        self.sources, self.targets = source._world_ranks, target._world_ranks
        self.ranks, self.rank = sorted({*self.sources, *self.targets}), own_world_rank()
        self.group, self.device_group, self._pieces = None, None, None
        if len(self.ranks) > 1:
            timeout_s = max(source.options.timeout_s, target.options.timeout_s)
            place = _place(source, target)
            store = PrefixStore(f"{place}/{self._meet(place, timeout_s)}", default_store())
            members = (self.ranks.index(self.rank), len(self.ranks), timedelta(seconds=timeout_s))
            self.group = group_at(store, *members)
            device = _own_gpu(source, target)
            gpus = gather_json(device and str(torch.cuda.get_device_properties(device).uuid), self.group)
            if device is not None and None not in gpus and len(set(gpus)) == len(gpus):
                self.device_group = group_at(PrefixStore("gpu", store), *members, backend="nccl")
                # All make the communicator here: later some have nothing to send.
                dist.all_reduce(torch.zeros(1, device=device), group=self.device_group)

    def run(
        self, source: Slices, target: Slices, version: int | None, extra: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Copy the source's tensors into the target's; returns the version and extra state of the source's ranks.

        Raises:
            ValueError: the models differ, naming the first tensor; on all ranks alike, before anything is sent.
            TypeError: a rank has an extra state that cannot be sent; on all ranks alike.
            TransportError: a rank has ended, or did not come in time.
        """
        try:
            if self._pieces is None:
                views = gather_json([_view(source), _view(target)], self.group)
                by_rank = dict(zip(self.ranks, views, strict=True))
                self._pieces = on_all_ranks(lambda: self._plan(by_rank), self.group, ValueError)
            versions = gather_json(version, self.group)
            for name, pieces in self._pieces.items():
                self._move(pieces, source.get(name, ()), target.get(name, ()))
            extra = self._extra_state(extra)
        except (RuntimeError, dist.DistError) as error:
            raise TransportError(
                f"weights were not sent: a rank of {list(self.ranks)} has ended or did not come in time ({error})"
            ) from error
        return next(value for value in versions if value is not None), extra

    def close(self) -> None:
        """Close the groups, so that no rank waits in them."""
        for group in (self.group, self.device_group):
            if group is not None:
                cut_backends(group.backends())

    def _meet(self, place: str, timeout_s: float) -> int:
        """Wait until all ranks have made this transfer as often as this one; returns how often.

        Raises: TransportError naming ranks that have not, after which this rank does not count as there either.
        """
        num_visits, deadline = _visits(place, self.rank), time.monotonic() + timeout_s
        while missing := [other for other in self.ranks if _visits(place, other) < num_visits]:
            if time.monotonic() > deadline:
                _visits(place, self.rank, -1)
                raise TransportError(
                    f"weights were not sent: after {timeout_s:g} s rank {', '.join(map(str, missing))} has not called "
                    "send_weights"
                )
            time.sleep(_ASK_AGAIN_S)
        return num_visits

    def _plan(self, by_rank: Mapping[int, Any]) -> dict[str, list[_Piece]]:
        """The slices that this rank moves, by name, in one order on all ranks. Raises: ValueError if models differ."""
        source_forms, holders = _tensors({rank: by_rank[rank][0] for rank in self.sources})
        target_forms, takers = _tensors({rank: by_rank[rank][1] for rank in self.targets})
        for name in [*source_forms, *target_forms]:
            source_form, target_form = source_forms.get(name), target_forms.get(name)
            if source_form is None or target_form is None:
                lacks = "sends" if source_form is None else "receives"
                raise ValueError(
                    f"weights cannot be sent, because the engine that {lacks} has no {name}; both need the same model, "
                    "with the same adapters"
                )
            if source_form != target_form:
                raise ValueError(
                    f"weights cannot be sent, because {name} is {source_form} in the engine that sends, and "
                    f"{target_form} in the one that receives; both need the same model in the same precision"
                )
        return {
            name: [piece for piece in _pieces(holders[name], takers[name]) if self.rank in piece[1:]]
            for name in source_forms
        }

    def _extra_state(self, rank_state: Mapping[str, Any]) -> dict[str, Any]:
        """The extra state of the source's ranks, from the first rank that has a name. Tensors lie in host memory."""

        def sendable() -> list[str]:
            check_portable(rank_state)
            return list(rank_state)

        names = gather_on_all_ranks(sendable, self.group, TypeError)
        states: dict[str, Any] = {}
        for index, rank_names in enumerate(names):
            if not states.keys() >= set(rank_names):
                states = broadcast_value(rank_state, index, self.group) | states
        return states

    @torch.no_grad()
    def _move(
        self, pieces: Sequence[_Piece], sources: Iterable[Any], targets: Sequence[tuple[TensorSlice, Tensor]]
    ) -> None:
        """Send and receive the slices of one tensor; extra memory is that of the slices that leave or arrive."""
        leaving, sent = dict[TensorSlice, Tensor](), list[tuple[Tensor, int]]()
        arriving, received = list[tuple[Tensor, list[Tensor]]](), list[tuple[Tensor, int]]()
        on_host = self.device_group is None
        for part, source, target in pieces:
            places = [values[part.within(outer)] for outer, values in targets if _contains(outer, part)]
            if source == self.rank:
                values = next(values[part.within(outer)] for outer, values in sources if _contains(outer, part))
                if target == self.rank:
                    arriving.append((values, places))
                    continue
                if part not in leaving:
                    leaving[part] = laid_out(values.detach().cpu() if on_host else values.detach())
                sent.append((_bytes(leaving[part]), self.ranks.index(target)))
            else:
                first = places[0]
                # A slice is received in place if that is contiguous where it arrives.
                in_place = not (on_host and first.device.type != "cpu") and first.is_contiguous() and not first.is_neg()
                room = torch.device("cpu") if on_host else first.device
                buffer = first if in_place else torch.empty(first.shape, dtype=first.dtype, device=room)
                received.append((_bytes(buffer), self.ranks.index(source)))
                arriving.append((buffer, places))
        group = self.device_group or self.group
        works = group.exchange(sent, received) if group is not None and (sent or received) else []
        for work in works:
            work.wait()
        for values, places in arriving:
            for place in places:
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)


def _own_gpu(source: WeightEndpoint, target: WeightEndpoint) -> torch.device | None:
    """The GPU on which this process has its parts of both engines; None if it cannot send from there."""
    devices = {engine._local.device for engine in (source, target) if engine._local is not None}
    staged = "host" in (source.options.transport, target.options.transport)
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" and not staged else None


def _contains(outer: TensorSlice, part: TensorSlice) -> bool:
    return outer.overlap(part) == part


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _place(source: WeightEndpoint, target: WeightEndpoint) -> str:
    """The prefix of the store's keys for transfers from one engine to another."""
    return f"penstock/weights/{source._number}-{target._number}"


def _visits(place: str, rank: int, more: int = 0) -> int:
    """Add `more` to the number of times that a process has entered a transfer, and return it."""
    return default_store().add(f"{place}/{rank}", more)


# ---- two models

_View = Mapping[str, tuple[str, Sequence[int], Sequence[Any]]]
"""A rank's tensors: name -> dtype and whole shape as text, that shape, and its slices' starts and shapes."""


def _view(slices_by_name: Slices) -> _View:
    view = {}
    for name, parts in slices_by_name.items():
        full_shape, dtype = parts[0][0].full_shape, str(parts[0][1].dtype).removeprefix("torch.")
        slices = [[part.start, part.shape] for part in dict.fromkeys(part for part, _ in parts)]
        view[name] = f"{dtype} {list(full_shape)}", full_shape, slices
    return view


def _tensors(by_rank: Mapping[int, _View]) -> tuple[dict[str, str], dict[str, dict[TensorSlice, list[int]]]]:
    """An engine's tensors: name -> dtype and shape as text, and name -> slices with the processes that hold them."""
    forms, holders = {}, {}
    for rank, view in by_rank.items():
        for name, (form, full_shape, parts) in view.items():
            forms.setdefault(name, form)
            for start, shape in parts:
                part = TensorSlice(tuple(start), tuple(shape), tuple(full_shape))
                holders.setdefault(name, {}).setdefault(part, []).append(rank)
    return forms, holders


def _pieces(
    holders_by_part: Mapping[TensorSlice, Sequence[int]], targets_by_part: Mapping[TensorSlice, Sequence[int]]
) -> Iterable[_Piece]:
    """The slices of one tensor to move: from the target itself if it has them, else from the holders in turn."""
    turn = 0
    for target_part, targets in targets_by_part.items():
        for target in targets:
            for part, holders in holders_by_part.items():
                common = part.overlap(target_part)
                if common is not None:
                    yield common, target if target in holders else holders[turn % len(holders)], target
            turn += 1
