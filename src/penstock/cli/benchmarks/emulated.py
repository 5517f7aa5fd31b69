"""Emulated stages: compute that sleeps, so that many devices fit one machine and only the engine costs anything."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.cli.benchmarks.ranks import Turn, in_turns
from penstock.model import Sequences, WeightGradients
from penstock.runtime import Boundary, DistributedTransport, Executor, Feed, Recorder, Stage

NUM_TOKENS, HIDDEN_SIZE = 128, 128  # 64 KiB of fp32


@dataclass(frozen=True)
class Emulation:
    """What is emulated: times of one microbatch through all stages of one rank, in seconds.

    A full backward takes `backward_s`, a split one half of it for the inputs and half for the weights.
    """

    num_ranks: int = 8
    num_microbatches: int = 32
    forward_s: float = 0.020
    backward_s: float = 0.040
    num_steps: int = 5

    def costs(self) -> schedule.Costs:
        half = self.backward_s / 2
        return schedule.Costs(forward=self.forward_s, backward_input=half, backward_weight=half)

    def program(self, name: str) -> schedule.Program:
        return schedule.lower(schedule.build(name, ranks=self.num_ranks, microbatches=self.num_microbatches))


class SleepingLayer(nn.Module):
    """Maps [T, D] to itself and takes its time; knows by how much its sleeps overshot.

    With `gradients`, the weight's half of a backward is left to that owner while it defers, as Penstock's linear
    layers do. With `branches` the two halves hang on two branches of the autograd graph, which torch's runtime needs
    to split them. Otherwise all sides run the same code.
    """

    def __init__(self, gradients: WeightGradients | None = None, branches: bool = False) -> None:
        super().__init__()
        self.gradients, self.branches = gradients, branches
        self.forward_s = self.input_s = self.weight_s = 0.0
        self.asked_s = self.slept_s = 0.0
        self.weight = nn.Parameter(torch.ones(()))

    def take(self, emulation: Emulation, stages_per_rank: int) -> None:
        """From now on sleep as long as one of so many stages of a rank computes."""
        self.forward_s = emulation.forward_s / stages_per_rank
        self.input_s = self.weight_s = emulation.backward_s / 2 / stages_per_rank

    def sleep(self, duration_s: float) -> None:
        start = time.perf_counter()
        if duration_s:
            time.sleep(duration_s)
        self.asked_s += duration_s
        self.slept_s += time.perf_counter() - start

    def forward(self, x: Tensor, sequences: object = None) -> Tensor:
        if self.branches:
            return _SleepForInput.apply(x, self) + _SleepForWeight.apply(self.weight, self)  # type: ignore[operator]
        self.sleep(self.forward_s)
        # A hook and one multiplication: an autograd function in Python would cost more than an engine does.
        y = x * 1.0 if x.requires_grad else x * self.weight
        if y.requires_grad:
            y.register_hook(self._backward)
        return y

    def _backward(self, grad: Tensor) -> None:
        if self.gradients is not None and self.gradients.deferring:
            self.sleep(self.input_s)
            self.gradients.push(_PendingSleep(self))  # type: ignore[arg-type]  # it has what a queue asks for
        else:
            self.sleep(self.input_s + self.weight_s)


@dataclass(frozen=True)
class _PendingSleep:
    """Stands where a linear layer leaves its weight gradient."""

    layer: SleepingLayer
    weight: None = None
    bias: None = None

    def compute(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self.layer.sleep(self.layer.weight_s)
        return iter(())


class _SleepForInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        layer.sleep(layer.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.sleep(ctx.layer.input_s)
        return grads[0].contiguous(), None


class _SleepForWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.sleep(ctx.layer.weight_s)
        return grads[0], None


Step = Callable[[], object]


def penstock_step(name: str, emulation: Emulation) -> tuple[Step, list[SleepingLayer]]:
    """One step of Penstock's executor on this rank, without an optimizer, and its layers."""
    world = dist.group.WORLD
    assert world is not None
    program, rank = emulation.program(name), world.rank()
    transport = DistributedTransport(program.placement, world, torch.device("cpu"), timeout_s=120.0)
    stages, layers = {}, []
    for number in program.placement.stages_of(rank):
        owner = WeightGradients()
        layers.append(SleepingLayer(owner))
        stages[number] = Stage(number, [("layer", layers[-1])], Boundary(HIDDEN_SIZE, torch.float32), owner)
    executor = Executor(program, rank, stages, transport, Recorder(rank))
    sequences = Sequences.from_lengths([NUM_TOKENS], torch.device("cpu"))
    feed = Feed(NUM_TOKENS, sequences, torch.zeros(NUM_TOKENS, HIDDEN_SIZE), torch.sum)
    return lambda: executor.run([feed] * emulation.num_microbatches), layers


TORCH_NAMES = {
    "afab": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""torch's class of the same schedule; it has no other ones."""


def torch_step(name: str, emulation: Emulation) -> tuple[Step, list[SleepingLayer]]:
    """The same of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    placement, rank = emulation.program(name).placement, dist.get_rank()
    splits = any(
        action.op is schedule.Op.I for order in emulation.program(name).ranks for action in schedule.flatten(order)
    )
    layers = [SleepingLayer(branches=splits) for _ in placement.stages_of(rank)]
    stages = [
        pipelining.PipelineStage(layer, number, placement.num_stages, torch.device("cpu"))
        for layer, number in zip(layers, placement.stages_of(rank), strict=True)
    ]
    kind = getattr(pipelining.schedules, TORCH_NAMES[name])
    given: Any = stages[0] if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else stages
    runner = kind(given, emulation.num_microbatches, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    rows = NUM_TOKENS * emulation.num_microbatches
    inputs = (torch.zeros(rows, HIDDEN_SIZE),) if any(stage.is_first for stage in stages) else ()
    target = torch.zeros(rows) if any(stage.is_last for stage in stages) else None
    return lambda: runner.step(*inputs, target=target), layers


def _prepare(side: str, rank: int, name: str, emulation: Emulation) -> Turn:
    """One engine's step; sleeps begin once everything has been used once."""
    step, layers = (penstock_step if side == "penstock" else torch_step)(name, emulation)
    step()
    for layer in layers:
        layer.take(emulation, len(layers))

    def turn() -> tuple[float, float, float]:
        """Start, end, and by what share the sleeps of this rank overshot so far."""
        dist.barrier()
        start = time.perf_counter()
        step()
        end = time.perf_counter()
        return start, end, sum(layer.slept_s for layer in layers) / sum(layer.asked_s for layer in layers) - 1

    return turn


def compare(name: str, emulation: Emulation) -> dict[str, Any]:
    """Measured step over simulated makespan, for both engines in the same run, each in processes of its own."""
    simulated_s = schedule.simulate(emulation.program(name), emulation.costs()).makespan
    sides = ("penstock", "torch") if name in TORCH_NAMES else ("penstock",)
    found = in_turns(sides, emulation.num_ranks, _prepare, name, emulation, num_rounds=emulation.num_steps)
    result: dict[str, Any] = {
        "schedule": name,
        "ranks": emulation.num_ranks,
        "microbatches": emulation.num_microbatches,
        "simulated_s": simulated_s,
    }
    for side, ranks in found.items():
        rounds = list(zip(*ranks, strict=True))
        ratios = [(max(end for _, end, _ in r) - min(start for start, _, _ in r)) / simulated_s for r in rounds]
        result[side] = {
            "ratio": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "sleep_overshoot": statistics.mean(overshoot for _, _, overshoot in rounds[-1]),
        }
    if "torch" in result:
        result["excess_of_torch"] = (result["penstock"]["ratio"] - 1) / (result["torch"]["ratio"] - 1)
    return result
