"""Measured over simulated time of schedules, for Penstock's executor and torch's where it has the schedule.

Stages are emulated: their compute sleeps, so that one machine stands for many devices and only the engine costs time.
Both engines take turns in one run, each in processes of its own.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import main, new_parser, progress
from benchmarks.ranks import Job, jobs_in_turns
from penstock import schedule
from penstock.cli.options import Parser
from penstock.cli.output import print_table
from penstock.model import Sequences, WeightGradients
from penstock.runtime import Boundary, DistributedTransport, Executor, Feed, Recorder, Stage
from penstock.schedule import builders

NUM_TOKENS, HIDDEN_SIZE = 128, 128  # 64 KiB of fp32

_WAKE_S = 100e-6
"""Typical delay of a sleep's end on an idle machine."""


@dataclass(frozen=True)
class Emulation:
    """The emulated times of one microbatch through all stages of one rank, in seconds.

    A full backward takes `backward_s`; a split one takes half of it for the inputs and half for the weights.
    """

    num_ranks: int
    num_microbatches: int
    forward_s: float
    backward_s: float
    num_steps: int

    def costs(self) -> schedule.Costs:
        half = self.backward_s / 2
        return schedule.Costs(forward=self.forward_s, backward_input=half, backward_weight=half)

    def program(self, name: str) -> schedule.Program:
        return schedule.lower(schedule.build(name, ranks=self.num_ranks, microbatches=self.num_microbatches))


class EmulatedDevice:
    """Computes for a given time, accurate to a few microseconds: it sleeps, then spins until the end.

    forward_s, input_s, weight_s: time of a stage's forward and of the two halves of its backward. asked_s, took_s:
    sums of the requested and the actual times.
    """

    __slots__ = ("asked_s", "forward_s", "input_s", "took_s", "weight_s")

    #: the times of a forward, and of a backward for the input and the weight
    forward_s: float
    input_s: float
    weight_s: float
    #: the time that was asked for and taken so far
    asked_s: float
    took_s: float

    def __init__(self) -> None:
        self.forward_s = self.input_s = self.weight_s = self.asked_s = self.took_s = 0.0

    def compute(self, duration_s: float, start: float | None = None) -> None:
        """Return when `duration_s` have passed since `start`, or since now."""
        now = time.perf_counter()
        start = now if start is None else start
        end = start + duration_s
        if end - now > _WAKE_S:
            time.sleep(end - now - _WAKE_S)
        while now < end:
            now = time.perf_counter()
        self.asked_s += duration_s
        self.took_s += now - start


class EmulatedLayer(nn.Module):
    """Maps [T, D] to itself in the emulated time, which includes that of its own code.

    With `gradients`, the weight's half of a backward is left to that owner while it defers, as in Penstock's linear
    layers. With `branches`, the two halves are two branches of the autograd graph, which torch's runtime needs to split
    them. Otherwise all sides run the same code.
    """

    def __init__(self, gradients: WeightGradients | None = None, branches: bool = False) -> None:
        super().__init__()
        self.gradients, self.branches, self.device = gradients, branches, EmulatedDevice()
        self.weight = nn.Parameter(torch.ones(()))

    def take(self, emulation: Emulation, stages_per_rank: int) -> None:
        """Take the time of one stage, with `stages_per_rank` stages on a rank, from now on."""
        self.device.forward_s = emulation.forward_s / stages_per_rank
        self.device.input_s = self.device.weight_s = emulation.backward_s / 2 / stages_per_rank

    def forward(self, x: Tensor, sequences: object = None) -> Tensor:
        start, device = time.perf_counter(), self.device
        if self.branches:
            y = _Input.apply(x, device) + _Weight.apply(self.weight, device)  # type: ignore[operator]
        else:
            # A hook and a view: a Python autograd function would cost more than an engine does.
            y = x.view_as(x) if x.requires_grad else x * self.weight
            if y.requires_grad:
                y.register_hook(self._backward)
        device.compute(device.forward_s, start)
        return y

    def _backward(self, grad: Tensor) -> None:
        device = self.device
        if self.gradients is not None and self.gradients.queue is not None:
            self.gradients.queue.append(_PendingWeight(device))  # type: ignore[arg-type]  # it has the interface of a queue's entry
            device.compute(device.input_s)
        else:
            device.compute(device.input_s + device.weight_s)


@dataclass(frozen=True)
class _PendingWeight:
    """Stands in for the deferred weight gradient of a linear layer."""

    device: EmulatedDevice
    weight: None = None
    bias: None = None

    def compute(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self.device.compute(self.device.weight_s)
        return iter(())


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: EmulatedDevice) -> Tensor:
        ctx.device = device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.device.compute(ctx.device.input_s)
        return grads[0], None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: EmulatedDevice) -> Tensor:
        ctx.device = device
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.device.compute(ctx.device.weight_s)
        return grads[0], None


def _loss(output: Tensor, target: object = None) -> Tensor:
    """A sum whose gradient has its own memory, as torch's sends need, instead of one expanded number."""
    return (output * 1.0).sum()


@dataclass(frozen=True)
class EmulatedSide:
    """One engine's step on this rank, without an optimizer, and the layers in it.

    `simulated_s` is the makespan of the order that the engine follows.
    """

    step: Callable[[], object]
    layers: list[EmulatedLayer]
    simulated_s: float
    close: Callable[[], None]


def penstock_engine(program: schedule.Program, emulation: Emulation) -> EmulatedSide:
    """Penstock's executor."""
    world = dist.group.WORLD
    assert world is not None
    rank = world.rank()
    transport = DistributedTransport(program.placement, world, torch.device("cpu"), timeout_s=120.0)
    stages, layers = {}, []
    for number in program.placement.stages_of(rank):
        owner = WeightGradients()
        layers.append(EmulatedLayer(owner))
        stages[number] = Stage(number, [("layer", layers[-1])], Boundary(HIDDEN_SIZE, torch.float32), owner)
    executor = Executor(program, stages, transport, Recorder(rank))
    sequences = Sequences.from_lengths([NUM_TOKENS], torch.device("cpu"))
    feed = Feed(NUM_TOKENS, sequences, torch.zeros(NUM_TOKENS, HIDDEN_SIZE), _loss)
    feeds = [feed] * emulation.num_microbatches
    return EmulatedSide(lambda: executor.run(feeds), layers, _makespan_s(program, emulation), transport.close)


TORCH_NAMES = {
    "afab": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""torch's class for the same schedule; it has no others."""


def torch_engine(name: str, program: schedule.Program, emulation: Emulation) -> EmulatedSide:
    """torch.distributed.pipelining, with its class for `name` and the placement of our program."""
    from torch.distributed import pipelining

    placement, rank = program.placement, dist.get_rank()
    splits = any(action.op is schedule.Op.I for order in program.ranks for action in schedule.flatten(order))
    layers = [EmulatedLayer(branches=splits) for _ in placement.stages_of(rank)]
    stages = [
        pipelining.PipelineStage(layer, number, placement.num_stages, torch.device("cpu"))
        for layer, number in zip(layers, placement.stages_of(rank), strict=True)
    ]
    kind = getattr(pipelining.schedules, TORCH_NAMES[name])
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    given: Any = stages[0] if single else stages
    runner = kind(given, emulation.num_microbatches, loss_fn=_loss, scale_grads=False)
    rows = NUM_TOKENS * emulation.num_microbatches
    inputs = (torch.zeros(rows, HIDDEN_SIZE),) if any(stage.is_first for stage in stages) else ()
    target = torch.zeros(rows) if any(stage.is_last for stage in stages) else None
    followed = program if single else _torch_program(runner.pipeline_order)
    step = lambda: runner.step(*inputs, target=target)  # noqa: E731
    return EmulatedSide(step, layers, _makespan_s(followed, emulation), lambda: None)


def _torch_program(order: Mapping[int, Sequence[object]]) -> schedule.Program:
    """The program of torch's own order, which may differ from ours of that name."""
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    plan = schedule.from_csv("\n".join(rows) + "\n")
    return schedule.lower(plan) if isinstance(plan, schedule.Schedule) else plan


def _makespan_s(program: schedule.Program, emulation: Emulation) -> float:
    return schedule.simulate(program, emulation.costs()).makespan


class _EmulatedTurn:
    """One engine on one rank; its layers take time after one step of warm-up."""

    #: one of ours or torch's
    engine: Any
    #: ends it
    close: Callable[[], None]

    def __init__(self, side: str, rank: int, name: str, program: schedule.Program, emulation: Emulation) -> None:
        ours = side == "penstock"
        self.engine = penstock_engine(program, emulation) if ours else torch_engine(name, program, emulation)
        self.close = self.engine.close
        self.engine.step()
        for layer in self.engine.layers:
            layer.take(emulation, program.placement.stages_per_microbatch)

    def __call__(self) -> tuple[float, float, float, float]:
        """Start, end, the simulated makespan, and the share by which this rank's devices have been late so far."""
        layers = self.engine.layers
        dist.barrier()
        start = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        late = sum(layer.device.took_s for layer in layers) / sum(layer.device.asked_s for layer in layers) - 1
        return start, end, self.engine.simulated_s, late


def compare(
    names: Sequence[str], emulations: Sequence[Emulation], against_torch: bool = True
) -> Iterator[dict[str, Any]]:
    """Measured step over simulated makespan, for both engines or ours alone, in one run, each in processes of its own.

    All emulations have the same number of ranks and of steps.
    """
    cases = [(name, emulation) for emulation in emulations for name in names]

    def jobs() -> Iterator[Job]:
        for name, emulation in cases:
            sides = ("penstock", "torch") if against_torch and name in TORCH_NAMES else ("penstock",)
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
    """Summarise an engine's rounds, each a list of its ranks' figures."""
    simulated_s = rounds[0][0][2]
    ratios = [(max(rank[1] for rank in r) - min(rank[0] for rank in r)) / simulated_s for r in rounds]
    return {
        "simulated_s": simulated_s,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "late": statistics.mean(rank[3] for rank in rounds[-1]),
    }


_COLUMNS = (
    ("schedule", lambda row: row["schedule"]),
    ("ranks", lambda row: str(row["ranks"])),
    ("microbatches", lambda row: str(row["microbatches"])),
    ("simulated", lambda row: f"{row['penstock']['simulated_s']:.2f} s"),
    ("penstock", lambda row: _ratio(row["penstock"])),
    ("torch", lambda row: _ratio(row["torch"]) if "torch" in row else "-"),
    ("of torch's excess", lambda row: f"{row['excess_of_torch']:.2f}" if "torch" in row else "-"),
    ("devices late by", lambda row: f"{row['penstock']['late']:.1%}"),
)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print_table([[head for head, _ in _COLUMNS], *([text(row) for _, text in _COLUMNS] for row in rows)])


def _ratio(side: dict[str, Any]) -> str:
    low, high = side["range"]
    return f"{side['ratio']:.3f} ({low:.3f} to {high:.3f})"


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each schedule, number of ranks and of microbatches."""
    names = _names(given.schedules)
    num_rows = len(names) * len(given.ranks) * len(given.microbatches)
    found = []
    for ranks in given.ranks:
        for row in compare(names, [emulation(given, ranks, microbatches) for microbatches in given.microbatches]):
            found.append(row)
            what = f"{row['schedule']}, {row['ranks']} ranks, {row['microbatches']} microbatches"
            progress(f"{len(found)}/{num_rows} {what}: {row['penstock']['ratio']:.3f}")
    return found


def emulation(given: argparse.Namespace, ranks: int, microbatches: int) -> Emulation:
    """The emulation of so many ranks and microbatches with the times of these options."""
    return Emulation(ranks, microbatches, given.forward_ms * 1e-3, given.backward_ms * 1e-3, given.steps)


def _names(given: list[str]) -> list[str]:
    """The requested schedules; `all` stands for every one that trains.

    Raises: ValueError for an unknown name, or that of a schedule without backwards.
    """
    known = [name for name in schedule.names() if builders.trains(name)]
    if given == ["all"]:
        return known
    for name in given:
        schedule.describe(name)
        if name not in known:
            raise ValueError(f"schedule {name} has no backward; possible are {', '.join(known)}")
    return given


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("schedules", __doc__, "--ranks 4 8 --schedules all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], metavar="N", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[32], metavar="N", help="microbatches of a step")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["afab", "1f1b"],
        metavar="NAME",
        help="names, or all for every one that trains",
    )
    parser.add_argument("--forward-ms", type=float, default=20.0, help="F of a rank's stages together")
    parser.add_argument("--backward-ms", type=float, default=40.0, help="B; I and W take half of it each")
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("schedules"))
