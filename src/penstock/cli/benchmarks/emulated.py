"""Emulated stages: compute that sleeps, so that many devices fit one machine and only the engine costs anything."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.cli.benchmarks.ranks import Job, jobs_in_turns
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


@dataclass(frozen=True)
class Engine:
    """One engine's step on this rank, without an optimizer, and the layers in it.

    `simulated_s` is the makespan of the order that the engine follows.
    """

    step: Callable[[], object]
    layers: list[SleepingLayer]
    simulated_s: float
    close: Callable[[], None]


def penstock_engine(program: schedule.Program, emulation: Emulation) -> Engine:
    """Penstock's executor."""
    world = dist.group.WORLD
    assert world is not None
    rank = world.rank()
    transport = DistributedTransport(program.placement, world, torch.device("cpu"), timeout_s=120.0)
    stages, layers = {}, []
    for number in program.placement.stages_of(rank):
        owner = WeightGradients()
        layers.append(SleepingLayer(owner))
        stages[number] = Stage(number, [("layer", layers[-1])], Boundary(HIDDEN_SIZE, torch.float32), owner)
    executor = Executor(program, rank, stages, transport, Recorder(rank))
    sequences = Sequences.from_lengths([NUM_TOKENS], torch.device("cpu"))
    feed = Feed(NUM_TOKENS, sequences, torch.zeros(NUM_TOKENS, HIDDEN_SIZE), torch.sum)
    feeds = [feed] * emulation.num_microbatches
    return Engine(lambda: executor.run(feeds), layers, _makespan_s(program, emulation), transport.close)


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


def torch_engine(name: str, program: schedule.Program, emulation: Emulation) -> Engine:
    """torch.distributed.pipelining, with the class of that name and the placement of our program."""
    from torch.distributed import pipelining

    placement, rank = program.placement, dist.get_rank()
    splits = any(action.op is schedule.Op.I for order in program.ranks for action in schedule.flatten(order))
    layers = [SleepingLayer(branches=splits) for _ in placement.stages_of(rank)]
    stages = [
        pipelining.PipelineStage(layer, number, placement.num_stages, torch.device("cpu"))
        for layer, number in zip(layers, placement.stages_of(rank), strict=True)
    ]
    kind = getattr(pipelining.schedules, TORCH_NAMES[name])
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    given: Any = stages[0] if single else stages
    runner = kind(given, emulation.num_microbatches, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    rows = NUM_TOKENS * emulation.num_microbatches
    inputs = (torch.zeros(rows, HIDDEN_SIZE),) if any(stage.is_first for stage in stages) else ()
    target = torch.zeros(rows) if any(stage.is_last for stage in stages) else None
    followed = program if single else _torch_program(runner.pipeline_order)
    step = lambda: runner.step(*inputs, target=target)  # noqa: E731
    return Engine(step, layers, _makespan_s(followed, emulation), lambda: None)


def _torch_program(order: Mapping[int, Sequence[object]]) -> schedule.Program:
    """The program of torch's own order, which may differ from ours of that name."""
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    plan = schedule.from_csv("\n".join(rows) + "\n")
    return schedule.lower(plan) if isinstance(plan, schedule.Schedule) else plan


def _makespan_s(program: schedule.Program, emulation: Emulation) -> float:
    return schedule.simulate(program, emulation.costs()).makespan


class _EmulatedTurn:
    """One engine on one rank; sleeps begin once everything has been used once."""

    def __init__(self, side: str, rank: int, name: str, program: schedule.Program, emulation: Emulation) -> None:
        ours = side == "penstock"
        self.engine = penstock_engine(program, emulation) if ours else torch_engine(name, program, emulation)
        self.close = self.engine.close
        self.engine.step()
        for layer in self.engine.layers:
            layer.take(emulation, program.placement.stages_per_microbatch)

    def __call__(self) -> tuple[float, float, float, float]:
        """Start, end, the simulated makespan, and by what share the sleeps of this rank overshot so far."""
        layers = self.engine.layers
        dist.barrier()
        start = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        overshoot = sum(layer.slept_s for layer in layers) / sum(layer.asked_s for layer in layers) - 1
        return start, end, self.engine.simulated_s, overshoot


def compare(names: Sequence[str], emulations: Sequence[Emulation]) -> Iterator[dict[str, Any]]:
    """Measured step over simulated makespan, for both engines in one run, each in processes of its own.

    All emulations are of one number of ranks, with as many steps each.
    """
    cases = [(name, emulation) for emulation in emulations for name in names]

    def jobs() -> Iterator[Job]:
        for name, emulation in cases:
            sides = ("penstock", "torch") if name in TORCH_NAMES else ("penstock",)
            yield Job(sides, (name, emulation.program(name), emulation))

    found = jobs_in_turns(emulations[0].num_ranks, _EmulatedTurn, jobs(), num_rounds=emulations[0].num_steps)
    for (name, emulation), sides in zip(cases, found, strict=True):
        row: dict[str, Any] = {
            "schedule": name,
            "ranks": emulation.num_ranks,
            "microbatches": emulation.num_microbatches,
        }
        row |= {side: _summary(list(zip(*ranks, strict=True))) for side, ranks in sides.items()}
        if "torch" in row:
            row["excess_of_torch"] = (row["penstock"]["ratio"] - 1) / (row["torch"]["ratio"] - 1)
        yield row


def _summary(rounds: list[Any]) -> dict[str, Any]:
    """What an engine's rounds, each with what every rank has told, come to."""
    simulated_s = rounds[0][0][2]
    ratios = [(max(rank[1] for rank in r) - min(rank[0] for rank in r)) / simulated_s for r in rounds]
    return {
        "simulated_s": simulated_s,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "sleep_overshoot": statistics.mean(rank[3] for rank in rounds[-1]),
    }


_COLUMNS = (
    ("schedule", lambda row: row["schedule"]),
    ("ranks", lambda row: str(row["ranks"])),
    ("microbatches", lambda row: str(row["microbatches"])),
    ("simulated", lambda row: f"{row['penstock']['simulated_s']:.2f} s"),
    ("penstock", lambda row: _ratio(row["penstock"])),
    ("torch", lambda row: _ratio(row["torch"]) if "torch" in row else "-"),
    ("of torch's excess", lambda row: f"{row['excess_of_torch']:.2f}" if "torch" in row else "-"),
    ("sleep's own", lambda row: f"{row['penstock']['sleep_overshoot']:.1%}"),
)


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rows as a table, its head first."""
    return [[head for head, _ in _COLUMNS], *([text(row) for _, text in _COLUMNS] for row in rows)]


def _ratio(side: dict[str, Any]) -> str:
    low, high = side["range"]
    return f"{side['ratio']:.3f} ({low:.3f} to {high:.3f})"
