"""Emulated stages: compute that sleeps, so that many devices fit one machine and only the engine costs anything."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.cli.benchmarks.ranks import on_ranks

NUM_TOKENS, HIDDEN_SIZE = 128, 128  # 64 KiB of fp32


@dataclass(frozen=True)
class Emulation:
    """What is emulated: times of one microbatch through all stages of one rank, in seconds."""

    num_ranks: int = 8
    num_microbatches: int = 32
    forward_s: float = 0.020
    backward_s: float = 0.040
    num_steps: int = 5

    def costs(self) -> schedule.Costs:
        half = self.backward_s / 2
        return schedule.Costs(forward=self.forward_s, backward_input=half, backward_weight=half)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "SleepingLayer") -> Tensor:
        ctx.layer = layer
        layer.sleep(layer.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.layer.sleep(ctx.layer.backward_s)
        return grads[0].contiguous(), None, None


class SleepingLayer(nn.Module):
    """Maps [T, D] to itself and takes its time; knows by how much its sleeps overshot."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.asked_s = self.slept_s = 0.0
        self.weight = nn.Parameter(torch.ones(()))

    def sleep(self, duration_s: float) -> None:
        start = time.perf_counter()
        if duration_s:
            time.sleep(duration_s)
        self.asked_s += duration_s
        self.slept_s += time.perf_counter() - start

    def forward(self, x: Tensor, sequences: object = None) -> Tensor:
        return _Sleep.apply(x, self.weight, self)  # type: ignore[return-value]


Step = Callable[[], object]


def timed(step: Step) -> tuple[float, float]:
    """(start, end) of one step on this rank, all ranks having started together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def penstock_step(rank: int, name: str, emulation: Emulation, layer: SleepingLayer) -> Step:
    """One step of Penstock's executor on this rank, without an optimizer."""
    from penstock.model import Sequences
    from penstock.runtime import Boundary, DistributedTransport, Executor, Feed, Recorder, Stage

    world = dist.group.WORLD
    assert world is not None
    num_ranks = emulation.num_ranks
    built = schedule.build(name, ranks=num_ranks, microbatches=emulation.num_microbatches)
    transport = DistributedTransport(built.placement, world, torch.device("cpu"), timeout_s=120.0)
    stage = Stage(rank, [("layer", layer)], Boundary(HIDDEN_SIZE, torch.float32))
    executor = Executor(schedule.lower(built), rank, {rank: stage}, transport, Recorder(rank))
    sequences = Sequences.from_lengths([NUM_TOKENS], torch.device("cpu"))
    x = torch.zeros(NUM_TOKENS, HIDDEN_SIZE)
    feeds = [Feed(NUM_TOKENS, sequences, x, torch.sum)] * emulation.num_microbatches
    return lambda: executor.run(feeds)


def torch_step(rank: int, name: str, emulation: Emulation, layer: SleepingLayer) -> Step:
    """One step of torch.distributed.pipelining's runtime on this rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(layer, rank, emulation.num_ranks, torch.device("cpu"))
    kind = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    runner = kind(stage, emulation.num_microbatches, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    rows = NUM_TOKENS * emulation.num_microbatches
    x, target = torch.zeros(rows, HIDDEN_SIZE), torch.zeros(rows)
    last = emulation.num_ranks - 1
    if rank == 0:
        return lambda: runner.step(x, target=target if last == 0 else None)
    if rank == last:
        return lambda: runner.step(target=target)
    return lambda: runner.step()


def _measure(rank: int, name: str, emulation: Emulation) -> dict[str, Any]:
    """Both engines in turn, a warm-up each, in the same processes."""
    layers = {side: SleepingLayer(0.0, 0.0) for side in ("penstock", "torch")}
    steps = {
        "penstock": penstock_step(rank, name, emulation, layers["penstock"]),
        "torch": torch_step(rank, name, emulation, layers["torch"]),
    }
    for step in steps.values():
        timed(step)
    spans: dict[str, list[tuple[float, float]]] = {side: [] for side in steps}
    for layer in layers.values():
        layer.forward_s, layer.backward_s = emulation.forward_s, emulation.backward_s
    for _ in range(emulation.num_steps):
        for side, step in steps.items():
            spans[side].append(timed(step))
    overshoot = {side: layer.slept_s / layer.asked_s - 1 for side, layer in layers.items()}
    return {"spans": spans, "overshoot": overshoot}


def compare(name: str, emulation: Emulation) -> dict[str, Any]:
    """Measured step over simulated makespan, for both engines in the same run."""
    built = schedule.build(name, ranks=emulation.num_ranks, microbatches=emulation.num_microbatches)
    simulated_s = schedule.simulate(schedule.lower(built), emulation.costs()).makespan
    ranks = on_ranks(emulation.num_ranks, _measure, name, emulation)
    result: dict[str, Any] = {
        "schedule": name,
        "ranks": emulation.num_ranks,
        "microbatches": emulation.num_microbatches,
        "simulated_s": simulated_s,
    }
    for side in ("penstock", "torch"):
        steps_s = [
            max(r["spans"][side][i][1] for r in ranks) - min(r["spans"][side][i][0] for r in ranks)
            for i in range(emulation.num_steps)
        ]
        ratios = [s / simulated_s for s in steps_s]
        result[side] = {
            "ratio": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "sleep_overshoot": statistics.mean(r["overshoot"][side] for r in ranks),
        }
    result["excess_of_torch"] = (result["penstock"]["ratio"] - 1) / (result["torch"]["ratio"] - 1)
    return result
