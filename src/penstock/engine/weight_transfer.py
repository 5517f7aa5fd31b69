"""Sending weights: an engine as its own ranks and those of other engines know it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline, device_of
from penstock.parallel import connect, naming_ended_ranks
from penstock.parallel.grid import Grid, own_world_rank, world_ranks
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.renewable import RenewableGroup, cut_backends, gloo_group
from penstock.parallel.tensor_slice import LocalTensor, TensorSlice, local_slices
from penstock.runtime.distributed import default_store
from penstock.runtime.errors import TransportError
from penstock.settings import Layout

# ---- Weights on their way from one engine to another of the same world: no disk, one tensor at a time


_ASK_AGAIN_S = 0.002

Slices = Mapping[str, Sequence[tuple[TensorSlice, Tensor]]]
"""A rank's tensors by the names under which they count: slices with their values, as views; copies stand beside."""


@dataclass(frozen=True)
class WeightSide:
    """One of two engines between which weights travel, known on the ranks of both.

    number: of the engine, among all that the world has made. ranks: its processes, by their number in the world.
    own: what this process has of it; empty where it is none of them.
    """

    number: int
    ranks: Sequence[int]
    own: Slices


@dataclass(frozen=True)
class _Piece:
    """A slice of a tensor that goes from one process to another; `part` lies within a slice of each."""

    part: TensorSlice
    source: int
    target: int


class Passage:
    """The way of weights from one engine to another; every rank of either makes it at the same point.

    Args:
        rank: this process in the world.
        timeout_s: how long the ranks of both wait for each other.

    Raises: TransportError naming ranks that have not come in time.
    """

    #: the processes of both engines, in order, and this one
    ranks: Sequence[int]
    rank: int
    #: carries slices, on host memory; None where one process has both engines alone
    group: RenewableGroup | None
    #: name -> the slices that leave this process or arrive on it; None before the first transfer
    _pieces: dict[str, list[_Piece]] | None

    def __init__(self, source: WeightSide, target: WeightSide, rank: int, timeout_s: float) -> None:
        self.ranks, self.rank = sorted({*source.ranks, *target.ranks}), rank
        self.group, self._pieces = None, None
        if len(self.ranks) > 1:
            meeting = Meeting(source.number, target.number)
            number = meeting.wait(self.ranks, rank, timeout_s)
            store = PrefixStore(f"{meeting.place}/{number}", default_store())
            place, size = self.ranks.index(rank), len(self.ranks)
            self.group = gloo_group(store, place, size, timedelta(seconds=timeout_s))

    def transfer(self, source: WeightSide, target: WeightSide, version: int | None) -> int:
        """Copy every tensor of the source into the target's; returns the version, which the source's ranks give.

        Raises:
            ValueError: the models differ, naming the first tensor; on all ranks alike, before anything is sent.
            TransportError: a rank has ended, or did not come in time.
        """
        gather = partial(gather_json, group=self.group)
        try:
            if self._pieces is None:
                views = gather([_view(source.own), _view(target.own)])
                by_rank = dict(zip(self.ranks, views, strict=True))
                self._pieces = on_all_ranks(lambda: self._plan(by_rank, source, target), gather, ValueError)
            versions = gather(version)
            for name, pieces in self._pieces.items():
                self._move(pieces, source.own.get(name, ()), target.own.get(name, ()))
        except (RuntimeError, dist.DistError) as error:
            raise TransportError(
                f"weights were not sent: a rank of {list(self.ranks)} has ended or did not come in time ({error})"
            ) from error
        return next(given for given in versions if given is not None)

    def close(self) -> None:
        """Cut the way, so that nobody waits in it."""
        if self.group is not None:
            cut_backends(self.group.backends())

    # ---- what goes where

    def _plan(self, by_rank: Mapping[int, Any], source: WeightSide, target: WeightSide) -> dict[str, list[_Piece]]:
        """This rank's part in each tensor's way, in one order on all ranks. Raises: ValueError if models differ."""
        given = _Tensors.of({rank: by_rank[rank][0] for rank in source.ranks})
        wanted = _Tensors.of({rank: by_rank[rank][1] for rank in target.ranks})
        given.check_same(wanted)
        found: dict[str, list[_Piece]] = {}
        for name in given.forms:
            pieces = list(_pieces(given.holders[name], wanted.holders[name]))
            found[name] = [piece for piece in pieces if self.rank in (piece.source, piece.target)]
        return found

    # ---- one tensor

    @torch.no_grad()
    def _move(self, pieces: Sequence[_Piece], own: Iterable[Any], into: Sequence[tuple[TensorSlice, Tensor]]) -> None:
        """Send and receive the slices of one tensor; memory beyond both engines' is that of what leaves or arrives."""
        works, leaving, arriving = [], dict[TensorSlice, Tensor](), list[tuple[Tensor, list[Tensor]]]()
        for piece in pieces:
            places = [values[piece.part.within(outer)] for outer, values in into if _contains(outer, piece.part)]
            if piece.source == self.rank:
                values = next(values[piece.part.within(outer)] for outer, values in own if _contains(outer, piece.part))
                if piece.target == self.rank:
                    arriving.append((values, places))
                    continue
                if piece.part not in leaving:
                    leaving[piece.part] = values.detach().cpu().contiguous()
                works.append(self._group().send([_bytes(leaving[piece.part])], self.ranks.index(piece.target), 0))
            else:
                buffer = _landing(places[0])
                works.append(self._group().recv([_bytes(buffer)], self.ranks.index(piece.source), 0))
                arriving.append((buffer, places))
        for work in works:
            work.wait()
        for values, places in arriving:
            for place in places:
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)

    def _group(self) -> RenewableGroup:
        assert self.group is not None
        return self.group


def _contains(outer: TensorSlice, part: TensorSlice) -> bool:
    return outer.overlap(part) == part


def _landing(place: Tensor) -> Tensor:
    """The memory that a slice arrives in: its place, if that is a run of host memory."""
    return (
        place if place.device.type == "cpu" and place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# ---- two models


@dataclass(frozen=True)
class _Tensors:
    """An engine's tensors: name -> dtype and whole shape, and name -> slices with the processes that have them."""

    forms: dict[str, tuple[str, tuple[int, ...]]]
    holders: dict[str, dict[TensorSlice, list[int]]]

    @classmethod
    def of(cls, by_rank: Mapping[int, Mapping[str, Any]]) -> _Tensors:
        forms, holders = {}, {}
        for rank, view in by_rank.items():
            for name, (dtype, full_shape, parts) in view.items():
                forms.setdefault(name, (dtype, tuple(full_shape)))
                for start, shape in parts:
                    part = TensorSlice(tuple(start), tuple(shape), tuple(full_shape))
                    ranks = holders.setdefault(name, {}).setdefault(part, [])
                    ranks.append(rank)
        return cls(forms, holders)

    def check_same(self, wanted: _Tensors) -> None:
        """Refuse to send to a model with other tensors. Raises: ValueError naming the first that differs."""
        for name in [*self.forms, *wanted.forms]:
            own, theirs = self.forms.get(name), wanted.forms.get(name)
            if own is None or theirs is None:
                lacks = "sends" if own is None else "receives"
                raise ValueError(
                    f"weights cannot be sent, because the engine that {lacks} has no {name}; both need the same model, "
                    "with the same adapters"
                )
            if own != theirs:
                raise ValueError(
                    f"weights cannot be sent, because {name} is {_words(own)} in the engine that sends, and "
                    f"{_words(theirs)} in the one that receives; both need the same model in the same precision"
                )


def _words(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"


def _pieces(
    given: Mapping[TensorSlice, Sequence[int]], wanted: Mapping[TensorSlice, Sequence[int]]
) -> Iterable[_Piece]:
    """One tensor's slices on their way: from the process itself where it has them, else from the holders in turn."""
    turn = 0
    for target_part, targets in wanted.items():
        for target in targets:
            for part, holders in given.items():
                common = part.overlap(target_part)
                if common is not None:
                    yield _Piece(common, target if target in holders else holders[turn % len(holders)], target)
            turn += 1


def _view(own: Slices) -> dict[str, Any]:
    """Describe what a rank has, as a JSON value."""
    found = {}
    for name, parts in own.items():
        shapes = [[part.start, part.shape] for part in dict.fromkeys(part for part, _ in parts)]
        part, values = parts[0]
        found[name] = [str(values.dtype).removeprefix("torch."), part.full_shape, shapes]
    return found


# ---- meeting


@dataclass(frozen=True)
class Meeting:
    """The place where ranks of two engines, given by number, meet to send weights from one to the other."""

    source: int
    target: int

    @property
    def place(self) -> str:
        """The beginning of keys in the store."""
        return f"penstock/weights/{self.source}-{self.target}"

    def come(self, rank: int) -> None:
        """Say that a process is there."""
        default_store().add(f"{self.place}/{rank}", 1)

    def num_visits(self, rank: int) -> int:
        """The number of times that a process has come."""
        return default_store().add(f"{self.place}/{rank}", 0)

    def wait(self, ranks: Sequence[int], rank: int, timeout_s: float) -> int:
        """Wait until all ranks have come as often as this one; returns how often.

        Raises: TransportError naming those that have not; this one has then not come either.
        """
        number, deadline = self.num_visits(rank), time.monotonic() + timeout_s
        while missing := [other for other in ranks if self.num_visits(other) < number]:
            if time.monotonic() > deadline:
                default_store().add(f"{self.place}/{rank}", -1)
                raise TransportError(
                    f"weights were not sent: after {timeout_s:g} s rank {', '.join(map(str, missing))} has not called "
                    "send_weights"
                )
            time.sleep(_ASK_AGAIN_S)
        return number


# ---- Sending weights: an engine as its own ranks and those of other engines know it


class Port:
    """The place where weights leave and reach an engine; each process of the world has one, the engine's own or not."""

    #: the engine among all that the world has made, and its processes
    number: int
    ranks: tuple[int, ...]
    #: the engine's settings
    options: EngineOptions
    #: this process's part of the model; None where it has none
    pipeline: Pipeline | None
    #: gives this process's tensors
    _slices: Callable[[], Slices]
    #: the last version that has passed here, where there is no pipeline
    _seen: int
    #: another engine -> the way to it
    _passages: dict[Port, Passage]

    def __init__(self, grid: Grid, options: EngineOptions, pipeline: Pipeline | None, slices: Callable[[], Slices]):
        self.number, self.ranks, self.options = grid.number, tuple(world_ranks(grid.layout)), options
        self.pipeline, self._slices, self._seen, self._passages = pipeline, slices, 0, {}

    @classmethod
    @naming_ended_ranks()
    def if_outside(cls, layout: Layout, options: EngineOptions) -> Port | None:
        """That of an engine on other ranks, which make it at the same point; None if this process is one of them."""
        if own_world_rank() in world_ranks(layout):
            return None
        timeout = timedelta(seconds=options.timeout_s)
        return cls(connect(layout, device_of(options.device), timeout), options, None, dict)

    @property
    def version(self) -> int:
        """The version of the engine's weights, as far as this process has heard of it."""
        return self._seen if self.pipeline is None else self.pipeline.step

    def is_awaited(self, to: Port) -> bool:
        """True if this engine's first rank waits to send weights to that one."""
        if not dist.is_initialized():
            return False
        meeting = Meeting(self.number, to.number)
        return meeting.num_visits(self.ranks[0]) > meeting.num_visits(own_world_rank())

    def send(self, to: Port) -> int:
        """Send; see `ModelState.send_weights`."""
        self._check(to)
        if own_world_rank() not in (*self.ranks, *to.ranks):
            return self.version
        source, target = (WeightSide(port.number, port.ranks, port._slices()) for port in (self, to))
        if dist.is_initialized():
            Meeting(self.number, to.number).come(own_world_rank())
        with self._recorded(to):
            try:
                version = self._passage(to, source, target).transfer(source, target, self._given_version())
            except TransportError:
                to._break()
                if to in self._passages:
                    self._passages.pop(to).close()
                raise
        self._seen = version
        to._arrived(version)
        return version

    def close(self) -> None:
        """Leave the ways to other engines."""
        for passage in self._passages.values():
            passage.close()
        self._passages.clear()

    def _passage(self, to: Port, source: WeightSide, target: WeightSide) -> Passage:
        if to not in self._passages:
            timeout_s = max(self.options.timeout_s, to.options.timeout_s)
            self._passages[to] = Passage(source, target, own_world_rank(), timeout_s)
        return self._passages[to]

    def _check(self, to: Port) -> None:
        """Raises: ValueError, PipelineError."""
        if to is self:
            raise ValueError("an engine cannot send weights to itself; give another engine")
        if to.options.learns:
            raise ValueError(
                "an engine that learns cannot receive weights, which its optimizer would not know of; make it with "
                "learns=False"
            )
        for port in (self, to):
            if port.pipeline is not None:
                port.pipeline.recovery.check_usable()

    def _recorded(self, to: Port) -> AbstractContextManager[None]:
        pipeline = self.pipeline or to.pipeline
        return nullcontext() if pipeline is None else pipeline.recorder.collective("send weights to another engine")

    def _given_version(self) -> int | None:
        return None if self.pipeline is None else self.version

    def _arrived(self, version: int) -> None:
        self._seen = version
        if self.pipeline is not None:
            self.pipeline.continue_from(version)
            self.pipeline.casts.renew()

    def _break(self) -> None:
        """Note that weights of several versions may stand beside each other."""
        if self.pipeline is not None:
            self.pipeline.recovery.uncertain = "weights did not arrive whole; send them again, or load a checkpoint"


def slices_of(state: Mapping[str, LocalTensor], aliases: Mapping[str, str]) -> Slices:
    """A rank's tensors under the names that count: a tied copy under its owner's."""
    found: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
    for name, local in state.items():
        found.setdefault(aliases.get(name, name), []).extend(local_slices(local).items())
    return {name: parts for name, parts in found.items() if parts}
