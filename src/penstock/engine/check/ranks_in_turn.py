"""The ranks of a pipeline in one process: each in a thread, of which one runs at a time, until it waits for another.

So a step of several stages is the same every time, and needs neither processes nor torch.distributed. Each rank has
random numbers of its own, as a process has; what layers share beside their tensors is shared here, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.data import PackedBatch
from penstock.engine.callbacks import Callbacks
from penstock.engine.checkpoint.manifest import random_state, set_random_state
from penstock.engine.engine import Engine
from penstock.engine.model_state import ModelState
from penstock.engine.options import EngineOptions
from penstock.engine.pipeline import Pipeline, Surroundings
from penstock.engine.rehearsal.counted import Done, GroupHere
from penstock.engine.training.aux_losses import AuxNotes
from penstock.engine.training.loss import LossFn, LossWeightFn
from penstock.engine.training.trainer import Trainer
from penstock.parallel import Grid
from penstock.parallel.grid import mirrored
from penstock.runtime import Feed, InProcessHub, InProcessTransport, Transport
from penstock.runtime.message import Header, Message
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Placement
from penstock.settings import Groups, Layout


class RankLeft(RuntimeError):
    """Another rank has failed, for which this one waits."""


class Turns:
    """The turns of the ranks of one process: one runs at a time, as far as it can go without the others."""

    #: rank -> event that is set during its turn
    _turns: list[threading.Event]
    #: unfinished rank -> returns True if it can go on
    _ready: dict[int, Callable[[], bool]]
    #: the first error of a rank, which ends all others
    _error: BaseException | None

    def __init__(self, num_ranks: int) -> None:
        self._turns = [threading.Event() for _ in range(num_ranks)]

    def run(self, work: Callable[[int], object]) -> None:
        """Run `work(rank)` of each rank to its end. Raises: the first error of a rank, which ends all."""
        num_ranks, state = len(self._turns), random_state()
        self._ready, self._error = {rank: lambda: True for rank in range(num_ranks)}, None

        def work_of(rank: int) -> None:
            self._turns[rank].wait()
            set_random_state(state)
            try:
                work(rank)
            except BaseException as error:
                self._error = self._error or error
            del self._ready[rank]
            self._hand_over(rank)

        threads = [threading.Thread(target=work_of, args=(rank,), daemon=True) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        self._turns[0].set()
        for thread in threads:
            thread.join()
        set_random_state(state)
        if self._error is not None:
            raise self._error

    def wait_until(self, ready: Callable[[], bool], rank: int) -> None:
        """Let other ranks run until `ready`. Raises: RankLeft once one has failed, or if none can go on."""
        if not ready():
            state, self._ready[rank] = random_state(), ready
            self._hand_over(rank)
            self._turns[rank].wait()
            set_random_state(state)
        if self._error is not None:
            raise RankLeft(f"another rank failed: {self._error}")

    def _hand_over(self, rank: int) -> None:
        """Let the next rank run that can go on; after an error each in turn, so that it ends."""
        self._turns[rank].clear()
        order = sorted(self._ready, key=lambda other: (other - rank - 1) % len(self._turns))
        runnable = [other for other in order if self._error is not None or self._ready[other]()]
        if order and not runnable:
            self._error = RankLeft("no rank can go on: each waits for another")
        if order:
            self._turns[(runnable or order)[0]].set()


# ---- Messages and collectives between the ranks


@dataclass(eq=False)
class _CallsInTurn:
    """The collectives of a group as torch.distributed calls them on one rank; each has ended when its call returns."""

    #: the turns of all ranks, the group's ranks in the layout, and this rank's index in the group
    turns: Turns
    ranks: tuple[int, ...]
    index: int
    #: collective -> the values of the ranks that have entered it, by index
    values: list[dict[int, Tensor]]
    #: this rank's collectives so far
    _num_entered: int = 0

    def _exchange(self, value: Tensor) -> list[Tensor]:
        """All ranks' values for the next collective, in the order of the group."""
        if self._num_entered == len(self.values):
            self.values.append({})
        values = self.values[self._num_entered]
        self._num_entered += 1
        values[self.index] = value.clone()
        self.turns.wait_until(lambda: len(values) == len(self.ranks), self.ranks[self.index])
        return [values[other] for other in range(len(self.ranks))]

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *options: Any) -> Done:
        for output, value in zip(outputs[0], self._exchange(inputs[0]), strict=True):
            output.copy_(value)
        return Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Done:
        values = torch.stack(self._exchange(tensors[0]))
        # Summed in the order of ranks, so that all have the same bits.
        is_max = options.reduceOp == dist.ReduceOp.MAX
        tensors[0].copy_(values.amax(0) if is_max else values.sum(0, dtype=values.dtype))
        return Done()

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Done:
        tensors[0].copy_(self._exchange(tensors[0])[options.rootRank])
        return Done()


@dataclass(eq=False)
class _ArrivalInTurn:
    """A posted receive, which lets other ranks run until its message is there."""

    #: the receipt of the queue, and the rank that waits for it
    receipt: Receipt
    turns: Turns
    rank: int

    def ready(self) -> bool:
        return True

    def wait(self) -> Any:
        self.turns.wait_until(self.receipt.ready, self.rank)
        return self.receipt.wait()


@dataclass(eq=False)
class LinkInTurn(InProcessTransport):
    """The messages between ranks that run in turn; each arrives in new memory, as from another process."""

    #: the turns of all ranks
    turns: Turns

    def receive(self, channel: Line, header: Header | None) -> Any:
        return _ArrivalInTurn(super().receive(channel, header), self.turns, self.rank)

    def send(self, channel: Line, message: Message) -> None:
        super().send(channel, message.of_tensors(tuple(x.detach().clone() for x in message.tensors)))


# ---- The engine of one of them


@dataclass(eq=False)
class RanksInTurn:
    """The ranks of a layout of pipeline stages alone, in this process."""

    layout: Layout
    #: the device that all of them share
    device: torch.device
    turns: Turns = field(init=False)
    hub: InProcessHub = field(default_factory=InProcessHub)
    #: group -> `_CallsInTurn.values`
    _values: defaultdict[str, list[dict[int, Tensor]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.turns = Turns(self.layout.world_size)

    def grid(self, rank: int) -> Grid:
        """The place of a rank, and its groups."""
        all_ranks = self.layout.groups("pp")
        control = self._group("control", all_ranks, rank)
        return Grid(
            self.layout,
            self.device,
            rank,
            control=control,
            # The thread that writes a checkpoint needs a group of its own.
            background=self._group("background", all_ranks, rank),
            pp_control=control,
            batch_control=control,
            model_control=control,
            mirror_group=self._group("mirror", mirrored(all_ranks), rank),
        )

    def _group(self, name: str, groups: Groups, rank: int) -> GroupHere | None:
        ranks = next((ranks for ranks in groups if rank in ranks), (rank,))
        if len(ranks) == 1:
            return None
        name, index = f"{name} {ranks}", ranks.index(rank)
        return GroupHere(index, len(ranks), name, _CallsInTurn(self.turns, ranks, index, self._values[name]))


@dataclass(frozen=True, eq=False)
class RankInTurn(Surroundings):
    """The surroundings of one of the ranks that share this process."""

    #: all of the ranks, and this one
    ranks: RanksInTurn
    rank: int

    def grid(self, layout: Layout, options: EngineOptions) -> Grid:
        return self.ranks.grid(self.rank)

    def failure_group(self, grid: Grid) -> None:
        """No group: an error of one rank ends the turns of all."""

    def transport(self, pipeline: Pipeline, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        return LinkInTurn(self.ranks.hub, self.rank, self.ranks.turns)


class TrainerInTurn(Trainer):
    """A trainer that notes what the program of its last step has left, before ties are summed."""

    #: losses by microbatch, on the last stage; gradients by full name
    losses: Sequence[Tensor]
    gradients: dict[str, Tensor]

    def finish_gradients(self, losses: Sequence[Tensor], feeds: Iterable[Feed]) -> tuple[float, float, AuxNotes | None]:
        views = (view for buckets in self.buckets.values() for view in buckets.gradients.items())
        self.losses, self.gradients = losses, {name: view.clone() for name, view in views}
        return super().finish_gradients(losses, feeds)


class EngineInTurn(Engine):
    """The engine of one of the ranks that share this process, with the step of a `PlainLoop`."""

    #: notes the losses and gradients of a step
    trainer: TrainerInTurn
    # As of any engine.
    grid: Grid
    callbacks: Callbacks
    #: losses and gradients of the last step
    losses: Sequence[Tensor]
    gradients: dict[str, Tensor]
    #: the loss, and its weight
    _loss_fn: LossFn
    _loss_weight_fn: LossWeightFn

    def __new__(cls, *arguments: Any) -> Self:
        return object.__new__(cls)

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> None:
        ModelState.__init__(self, pipeline, TrainerInTurn(pipeline))
        self.grid, self.callbacks = pipeline.grid, Callbacks(pipeline)
        self._loss_fn, self._loss_weight_fn = loss_fn, loss_weight_fn

    @property
    def modules(self) -> dict[str, nn.Module]:
        return dict(unit for stage in self.pipeline.model.stages.values() for unit in stage.units)

    def take_step(self, microbatches: Sequence[PackedBatch]) -> None:
        self.train_batch(microbatches, self._loss_fn, self._loss_weight_fn)
        self.losses, self.gradients = self.trainer.losses, self.trainer.gradients
