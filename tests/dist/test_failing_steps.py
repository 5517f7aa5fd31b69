"""Steps that fail on one rank, at places drawn by chance: all ranks hear of it, and the next step is as ever."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions, token_cross_entropy
from penstock.model import decoder_units
from penstock.runtime import PipelineError, StepError
from penstock.runtime.errors import TransportError
from penstock.runtime.recovery import Failure
from penstock.settings import OptimizerConfig, Precision, ScheduleConfig
from tests.covering import EVERY
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

NUM_PLACES = 9 if EVERY else 5
NUM_MICROBATCHES = 4
KINDS = ("before", "within", "after", "out of memory")
# Seconds on a machine that may have several other things to do; `python -m benchmarks.failures` measures the figure.
LIMIT_S = 10.0


@dataclass(frozen=True)
class Case:
    """A layout with a schedule; `own_layers`: running statistics and random numbers in the model."""

    layout: Layout
    schedule: str = "1f1b"
    sparse: bool = False
    own_layers: bool = False
    zero: bool = False

    def engine(self, timeout_s: float = 120.0) -> Engine:
        options = EngineOptions(
            schedule=ScheduleConfig(self.schedule),
            precision=Precision.FP64,
            optimizer=OptimizerConfig(zero=self.zero),
            timeout_s=timeout_s,
        )
        if self.own_layers:
            torch.manual_seed(0)
            inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            layers = [nn.Embedding(VOCABULARY, 8), inner, nn.Dropout(0.3), nn.Linear(8, VOCABULARY)]
            return Engine.from_layers(layers, 8, self.layout, options)
        config = SPARSE if self.sparse else DENSE
        return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, self.layout, options)

    def __str__(self) -> str:
        extra = [name for name in ("sparse", "own_layers", "zero") if getattr(self, name)]
        return " ".join([str(self.layout), self.schedule, *extra])


CASES = (
    Case(Layout(pp=2), own_layers=True),
    Case(Layout(pp=2), "zb-v"),
    Case(Layout(dp=2), own_layers=True, zero=True),
    Case(Layout(tp=2)),
    Case(Layout(dp=2, ep=2), "combined-1f1b", sparse=True),
    Case(Layout(pp=2, dp=2, ep=2), "combined-1f1b", sparse=True, zero=True),
)


class Fault(Exception):
    """Raised on purpose, with the time of it."""


def raise_fault(kind: str, times: list[float]) -> None:
    times.append(time.monotonic())
    if kind == "out of memory":
        raise torch.OutOfMemoryError("made to fail")
    raise Fault("made to fail")


def break_step(engine: Engine, place: int, kind: str, times: list[float]) -> Callable[[], None]:
    """Let one action of this rank fail in the next step, before, within or after its work; returns what mends it."""
    executor = engine.pipeline.executor(NUM_MICROBATCHES, engine.trainer.start_reduction)
    place %= len(executor._steps)
    step, handler = executor._steps[place]

    def broken(record: Any) -> Any:
        if kind in ("before", "out of memory"):
            raise_fault(kind, times)
        waiting = handler(record)
        if kind == "after" or waiting is None:
            return finished(waiting)
        return halfway(waiting)

    def finished(waiting: Any) -> Generator[Any, None, None]:
        if waiting is not None:
            yield from waiting
        raise_fault(kind, times)

    def halfway(waiting: Any) -> Generator[Any, None, None]:
        """Fail in the middle of a stage: its units have run in part, and collectives may be under way."""
        mended = [break_stage(stage, times) for stage in engine.pipeline.model.stages.values()]
        try:
            yield from waiting
        finally:
            for mend in mended:
                mend()
        raise_fault(kind, times)

    executor._steps[place] = step, broken

    def mend() -> None:
        executor._steps[place] = step, handler

    return mend


def break_stage(stage: Any, times: list[float]) -> Callable[[], None]:
    forward, backward = stage.forward, stage.backward

    def once(lane: Any) -> Any:
        for turn in lane:
            yield turn
            raise_fault("within", times)
        raise_fault("within", times)

    stage.forward = lambda *given, **options: once(forward(*given, **options))
    stage.backward = lambda *given, **options: once(backward(*given, **options))

    def mend() -> None:
        del stage.forward, stage.backward

    return mend


def batch_of(step: int, dp_rank: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    return PackedBatch.from_documents(
        [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (5, 7, 4, 6, 5, 3)]
    )


def train(rank: int, case: Case, fails: bool) -> dict[str, Any]:
    """One step after each failure; what each step gave and left, and when each failure was raised and heard of."""
    engine, drawn, heard = case.engine(), random.Random(str(case)), []
    torch.manual_seed(7)
    results, texts, raised = [], [], []
    for step in range(NUM_PLACES):
        failing, place, kind = drawn.randrange(case.layout.world_size), drawn.randrange(1000), drawn.choice(KINDS)
        batch = batch_of(step, engine.grid.dp_rank)
        if fails:
            times: list[float] = []
            mend = break_step(engine, place, kind, times) if rank == failing else None
            with pytest.raises(StepError) as caught:
                engine.train_batch(batch_of(77, engine.grid.dp_rank), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
            heard.append(time.monotonic())
            texts.append((failing, kind, str(caught.value), type(caught.value.__cause__).__name__))
            raised.append(times[0] if times else None)
            if mend is not None:
                mend()
        result = engine.train_batch(batch, micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
        results.append((result.loss, result.grad_norm, result.aux_losses, result.num_microbatches, result.step))
    state = {name: p.detach().clone() for name, p in engine.parameters().items()}
    state |= {
        f"{n}.{name}": buffer.clone()
        for n, stage in engine.pipeline.model.stages.items()
        for _, unit in stage.units
        for name, buffer in unit.named_buffers()
    }
    num_pending = engine.pipeline.transport.num_pending()
    engine.close()
    return {"results": results, "state": state, "texts": texts, "raised": raised, "heard": heard, "left": num_pending}


@pytest.mark.shows(15, 112)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_fails_anywhere_is_as_if_it_had_not_been(case: Case) -> None:
    failed, clean = (run_ranks(case.layout.world_size, train, case, fails, timeout_s=120.0) for fails in (True, False))
    assert len(CASES) * NUM_PLACES >= 30
    for rank, (ours, theirs) in enumerate(zip(failed, clean, strict=True)):
        assert ours["results"] == theirs["results"] and len(ours["results"]) == NUM_PLACES
        assert ours["state"].keys() == theirs["state"].keys() and ours["state"]
        for name, tensor in ours["state"].items():
            assert torch.equal(tensor, theirs["state"][name]), name
        assert ours["left"] == 0
        for failing, kind, text, cause in ours["texts"]:
            own = "OutOfMemoryError" if kind == "out of memory" else "Fault"
            assert text.startswith(f"rank {failing} ") and " failed in " in text and f"{own}: made to fail" in text
            if rank == failing:
                assert cause == own
    latencies = [
        max(one["heard"][place] for one in failed) - next(t for one in failed if (t := one["raised"][place]))
        for place in range(NUM_PLACES)
    ]
    print(f"{case}: heard on all ranks after {max(latencies):.3f} s at most")
    assert max(latencies) < LIMIT_S


def lose_gathered_weights(rank: int) -> bool:
    """Let the failure strike while weights that the other rank has stepped are still on their way to this one."""
    engine = Case(Layout(dp=2), zero=True).engine()
    engine.train_batch(batch_of(0, rank), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    wanted = {name: p.detach().clone() for name, p in engine.parameters().items()}
    times: list[float] = []
    mend = break_step(engine, 0, "before", times) if rank == 0 else lambda: None
    for buckets in engine.trainer.buckets.values():
        for bucket in buckets.buckets:
            own = bucket.parameters[bucket.owned].clone()
            bucket.parameters.fill_(float("nan"))
            bucket.parameters[bucket.owned] = own
    with pytest.raises(StepError):
        engine.train_batch(batch_of(1, rank), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    mend()
    found = all(torch.equal(wanted[name], p) for name, p in engine.parameters().items())
    engine.close()
    return found


@pytest.mark.shows(112)
def test_weights_that_were_on_their_way_arrive_after_a_failure() -> None:
    assert run_ranks(2, lose_gathered_weights) == [True, True]


ERRORS = {
    "nccl": lambda: dist.DistBackendError("NCCL error: unhandled system error"),
    "nccl behind a link": lambda: TransportError("activations can no longer be sent"),
    "cuda": lambda: torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
}


def break_a_device(rank: int, name: str) -> tuple[str, float, bool]:
    """The second rank's device or its communicator fails, which closes no connection of the first one's."""
    engine = Case(Layout(pp=2)).engine()
    executor = engine.pipeline.executor(NUM_MICROBATCHES, engine.trainer.start_reduction)
    step, handler = executor._steps[0]

    def broken(record: Any) -> Any:
        error = ERRORS[name]()
        raise error from (dist.DistBackendError("NCCL error") if name == "nccl behind a link" else None)

    if rank == 1:
        executor._steps[0] = step, broken
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        engine.train_batch(batch_of(0, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    waited_s = time.monotonic() - start
    executor._steps[0] = step, handler
    try:
        engine.train_batch(batch_of(0, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    except PipelineError:
        goes_on = False
    else:
        goes_on = True
    engine.close()
    return str(caught.value), waited_s, goes_on


@pytest.mark.shows(206)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_one_ranks_device_is_announced_since_no_connection_closes(name: str) -> None:
    for text, waited_s, goes_on in run_ranks(2, break_a_device, name, timeout_s=120.0):
        assert text.startswith("rank 1 ") and str(ERRORS[name]()) in text, text
        assert waited_s < LIMIT_S
        # CUDA takes no more of a process after such an error.
        assert goes_on is (name != "cuda")


def test_a_rank_that_hears_of_a_failure_begins_no_further_action() -> None:
    engine, num_losses = Case(Layout()).engine(), 0

    def loss(logits: torch.Tensor, microbatch: PackedBatch) -> torch.Tensor:
        nonlocal num_losses
        num_losses += 1
        engine.pipeline.recovery.alarm.failure = Failure(1, "rank 1 failed in 0B1, step 1: CUDA error")
        return token_cross_entropy(logits, microbatch)

    with pytest.raises(StepError, match="rank 1 failed in 0B1"):
        engine.train_batch(batch_of(0, 0), loss, micro_batches=MicroBatchSpec(2))
    assert num_losses == 1, "the second microbatch's forward was begun"
    engine.close()


@pytest.mark.shows(206)
def test_no_weight_is_stepped_on_what_an_abort_has_left() -> None:
    """NCCL's `wait` orders streams: after an abort it raises nothing, and the buffer holds anything."""
    engine = Case(Layout()).engine()
    before = {name: p.detach().clone() for name, p in engine.parameters().items()}
    (buckets,) = engine.trainer.buckets.values()
    wait, calls = buckets.wait, list[int]()

    def wait_as_nccl() -> None:
        wait()
        calls.append(len(calls))
        if len(calls) < 2:
            return  # before the first gradient
        engine.pipeline.recovery.alarm.failure = Failure(1, "rank 1 failed in 0B1, step 1: CUDA error")
        for bucket in buckets.buckets:
            bucket.gradients.add_(1000.0)

    buckets.wait = wait_as_nccl
    with pytest.raises(StepError, match="rank 1 failed in 0B1"):
        engine.train_batch(batch_of(0, 0), micro_batches=MicroBatchSpec(2))
    assert len(calls) == 2 and all(torch.equal(before[name], p) for name, p in engine.parameters().items())
    engine.close()
