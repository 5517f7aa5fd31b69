"""Tensors of a microbatch on real ranks: gone after its backward, and of no more microbatches at once than promised.

Seen by weak references to the storage of whatever a stage's forward and backward make or are given.
"""

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import Layout, MicroBatchSpec
from penstock.model import Lane, Sequences
from penstock.model.lanes import Driven
from penstock.model.sequences import AuxLosses
from penstock.runtime import Stage, Tape
from penstock.runtime.message import Message
from penstock.schedule import Op, parts
from penstock.schedule.recording import Record
from tests.covering import pairs_of
from tests.dist.launch import run_ranks
from tests.dist.test_combined import Run, batches, engine_of

MICROBATCHES = 4


def tensors_of(*values: Any) -> list[Tensor]:
    inside = [value.tensors if isinstance(value, Message) else value for value in values]
    return [leaf for leaf in tree_leaves(inside) if isinstance(leaf, Tensor)]


def number_of(tensor: Tensor) -> int:
    """The number of its storage, which no other has while anyone refers to it, even weakly."""
    return tensor.untyped_storage()._cdata


@dataclass(eq=False)
class Microbatch:
    """What belongs to a microbatch on one stage, weakly: its tape, and storages by number with the operation's name."""

    tape: weakref.ref[Tape]
    #: the numbers that the step reports of it
    reported: weakref.ref[AuxLosses]
    storages: dict[int, tuple[StorageWeakRef, str]] = field(default_factory=dict)
    #: storages of what leaves for another stage, which lives until it has been taken
    leaving: set[int] = field(default_factory=set)
    num_seen: int = 0

    def see(self, values: Iterable[Tensor], by: str) -> None:
        for storage in (tensor.untyped_storage() for tensor in values):
            self.num_seen += 1
            self.storages[storage._cdata] = (StorageWeakRef(storage), by)

    def alive(self) -> dict[int, str]:
        """The storages that are still there, by number."""
        self.storages = {number: seen for number, seen in self.storages.items() if not seen[0].expired()}
        return {number: by for number, (_, by) in self.storages.items()}

    def held(self) -> list[str]:
        """Those that are held for the microbatch's own sake."""
        aux_losses = self.reported()
        reported = [] if aux_losses is None else [*aux_losses.values.values(), *aux_losses.counts.values()]
        others = self.leaving | set(map(number_of, reported))
        return [by for number, by in self.alive().items() if number not in others]


class Making(TorchDispatchMode):
    """Has a microbatch see what operations give, but for views of what they were given."""

    def __init__(self, microbatch: Microbatch) -> None:
        super().__init__()
        self.microbatch = microbatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(number_of, tensors_of(args, kwargs)))
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tensors_of(result) if number_of(tensor) not in given]
        self.microbatch.see(made, str(func))
        return result


@dataclass(eq=False)
class Kept:
    """The microbatches of one step on one rank, on each of its stages; `peak` had tensors at the same time."""

    microbatches: list[Microbatch] = field(default_factory=list)
    num_ended: int = 0
    peak: int = 0
    #: what was alive of a microbatch after its backward
    left: list[str] = field(default_factory=list)

    def of(self, tape: Tape) -> Microbatch:
        return next(one for one in self.microbatches if one.tape() is tape)

    @contextmanager
    def making(self, microbatch: Microbatch) -> Iterator[None]:
        with Making(microbatch):
            yield
        self.peak = max(self.peak, sum(bool(one.held()) for one in self.microbatches))

    def watch(self, stage: Stage) -> None:
        forward, backward, weight_backward = stage.forward, stage.backward, stage.weight_backward

        def watched_forward(tape: Tape, x: Any, sequences: Sequences, *rest: Any) -> Lane[Any]:
            assert sequences.aux_losses is not None
            microbatch = Microbatch(weakref.ref(tape), weakref.ref(sequences.aux_losses))
            self.microbatches.append(microbatch)
            if stage.index > 0:
                microbatch.see(tensors_of(x), "input")
            result = yield from Driven(forward(tape, x, sequences, *rest), partial(self.making, microbatch))
            microbatch.leaving |= set(map(number_of, tensors_of(result)))
            return result

        def watched_backward(tape: Tape, grad: Any, *rest: Any) -> Lane[Any]:
            microbatch = self.of(tape)
            microbatch.see(tensors_of(grad), "gradient of the output")
            result = yield from Driven(backward(tape, grad, *rest), partial(self.making, microbatch))
            microbatch.leaving |= set(map(number_of, tensors_of(result)))
            return result

        def watched_weight_backward(tape: Tape) -> None:
            with self.making(self.of(tape)):
                weight_backward(tape)

        stage.forward, stage.backward = watched_forward, watched_backward  # type: ignore[method-assign]
        stage.weight_backward = watched_weight_backward  # type: ignore[method-assign]

    def ended(self, record: Record) -> None:
        """Look at the microbatches whose backwards are over, after an action."""
        split = any(action.op is Op.I for action in parts(record.action))
        self.num_ended += sum(action.op is Op.W or (action.op is Op.B and not split) for action in parts(record.action))
        over = [one for one in self.microbatches if one.tape() is None]
        # gloo's own thread lets go of what a collective was given a moment after it has ended.
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and any(one.held() for one in over):
            time.sleep(0.001)
        self.left += [f"{record.action}: {by}" for one in over for by in one.held()]
        if len(over) != self.num_ended:
            self.left.append(f"{record.action}: {self.num_ended} backwards are over, {len(over)} tapes are gone")


@dataclass(frozen=True)
class Found:
    num_microbatches: int
    #: storages seen of the microbatch with the fewest
    least_seen: int
    peak: int
    left: list[str]
    #: alive after the step
    outlived: list[str]


def kept(rank: int, runs: list[Run], layout: Layout) -> list[Found]:
    """What a rank keeps in the second step of each run."""
    found = []
    for run in runs:
        engine, spec, watching = engine_of(run, layout), MicroBatchSpec(num=MICROBATCHES), Kept()
        first, second, *_ = batches(engine.grid.dp_rank, MICROBATCHES)
        # What is made for the first time here may stay.
        engine.train_batch(first, micro_batches=spec)
        end = engine.recorder.end
        for stage in engine.pipeline.model.stages.values():
            watching.watch(stage)

        def at_end(record: Record, end: Any = end, watching: Kept = watching) -> None:
            watching.ended(record)
            end(record)

        engine.recorder.end = at_end  # type: ignore[method-assign]
        gc.disable()  # nothing may be left to a collector of cycles
        engine.train_batch(second, micro_batches=spec)
        outlived = [by for one in watching.microbatches for by in one.alive().values()]
        gc.enable()
        seen = [one.num_seen for one in watching.microbatches]
        found.append(Found(len(seen), min(seen), watching.peak, watching.left, outlived))
        engine.close()
        engine.grid.close()
    return found


NAMES = {1: ("1f1b", "combined"), 2: ("interleaved", "combined-interleaved")}
WAYS: tuple[dict[str, Any], ...] = ({}, {"split_backward": True}, {"early_release": True}, {"overlap": False})
EXPERTS, RING = Layout(dp=2, ep=2), Layout(cp=2, ep=2)
LAYOUTS = [EXPERTS, replace(RING, pp=2)]
PAIRS = pairs_of(LAYOUTS, ("none", "full"), WAYS)


@pytest.mark.shows(45)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_of_a_microbatch_outlives_its_backward_and_pairs_keep_one_more(layout: Layout) -> None:
    """Layers with experts, without recomputation and with it, and attention that travels round a ring."""
    plain, fused = NAMES[layout.pp]
    groups: dict[str, list[Run]] = {}
    for how, way in [(how, way) for own, how, way in PAIRS if own == layout]:
        run = Run(plain, MICROBATCHES, recompute=how, stages_per_rank=layout.pp)
        groups.setdefault(how, [run]).append(replace(run, schedule=fused, **way))
    runs = [run for group in groups.values() for run in group]
    for of_rank in run_ranks(layout.world_size, kept, runs, layout, timeout_s=120.0):
        by_run = dict(zip(runs, of_rank, strict=True))
        for run, found in by_run.items():
            assert found.num_microbatches == MICROBATCHES * layout.pp and found.least_seen > 50, run
            assert not found.left and not found.outlived, (run, found.left, found.outlived)
        for run, *in_pairs in groups.values():
            assert by_run[run].peak >= 1
            for pair in in_pairs:
                assert 1 <= by_run[pair].peak <= by_run[run].peak + 1, pair
