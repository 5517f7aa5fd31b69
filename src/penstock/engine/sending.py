"""Sending weights: an engine as its own ranks and those of other engines know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from penstock.engine.options import EngineOptions
from penstock.engine.passage import Meeting, Passage, Slices, WeightSide
from penstock.engine.pipeline import Pipeline, device_of
from penstock.parallel import connect, naming_ended_ranks
from penstock.parallel.grid import Grid, own_world_rank, world_ranks
from penstock.parallel.tensor_slice import LocalTensor, TensorSlice, local_slices
from penstock.runtime.errors import TransportError
from penstock.settings import Layout


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
