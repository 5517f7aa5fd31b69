"""Steps of many schedules, cuts and microbatches on two ranks, and what a planner needs to predict them.

In each round the model's units are timed first, on all ranks at once, and a few runs whose steps are given to the
planner; only then are all others run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import mean

import torch

from benchmarks.ranks import Turn, in_turns
from benchmarks.train import NUM_RANKS, RATE, Training
from penstock.data import MicroBatchSpec
from penstock.engine import Engine, EngineOptions
from penstock.engine.timed_cut import UnitTimes, times_here, unit_costs
from penstock.schedule import Costs, Timeline, parts
from penstock.schedule.actions import COMPUTE
from penstock.settings import Layout, LearningRate, OptimizerConfig, ScheduleConfig

MODEL = Training(num_layers=8, hidden_size=256, intermediate_size=704, vocab_size=2048, sequence_tokens=128)
NUM_SEQUENCES = 16
_UNITS = "units"


@dataclass(frozen=True)
class Combination:
    """A schedule, the numbers of units of its stages, and the microbatches into which a step's sequences are cut."""

    name: str
    cut: tuple[int, ...]
    num_microbatches: int

    def __str__(self) -> str:
        return f"{self.name} {'-'.join(map(str, self.cut))}, {self.num_microbatches} microbatches"

    @property
    def stages_per_rank(self) -> int:
        return len(self.cut) // NUM_RANKS

    @property
    def training(self) -> Training:
        """The model with this combination's microbatches."""
        sequences = NUM_SEQUENCES // self.num_microbatches
        return replace(MODEL, num_microbatches=self.num_microbatches, microbatch_sequences=sequences)


_EVEN, _EVEN_IN_FOUR = MODEL.even_cut(2), MODEL.even_cut(4)

KNOWN = (
    Combination("1f1b", _EVEN, 4),
    Combination("1f1b", _EVEN, 16),
    Combination("interleaved", _EVEN_IN_FOUR, 16),
)
"""The runs whose steps are given: few long actions, many, and many short ones."""

COMBINATIONS = (
    Combination("1f1b", _EVEN, 8),
    Combination("1f1b", (11, 7), 8),
    Combination("1f1b", (7, 11), 16),
    Combination("afab", _EVEN, 4),
    Combination("afab", (11, 7), 16),
    Combination("interleaved", _EVEN_IN_FOUR, 4),
    Combination("looped-bfs", _EVEN_IN_FOUR, 8),
    Combination("zb-h1", _EVEN, 4),
    Combination("zb-h1", (11, 7), 8),
    Combination("zb-h2", _EVEN, 16),
    Combination("zb-v", _EVEN_IN_FOUR, 8),
    Combination("zb-v", (6, 5, 4, 3), 16),
    Combination("dualpipe-v", _EVEN_IN_FOUR, 4),
)

EMULATED_NAMES = ("afab", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v")
EMULATED_SIZES = ((4, 8), (8, 16))
"""Ranks and microbatches."""


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, and those of it before and after its microbatches are computed."""

    step_s: float
    rest_s: float


@dataclass(frozen=True)
class Round:
    """One round: the units' times in seconds by number of microbatches, and the steps of all combinations."""

    units: dict[int, Costs]
    steps: dict[Combination, StepTime]


def run(num_rounds: int) -> list[Round]:
    """Time the units and run each combination, in turns; one round more than asked for warms up."""
    sides = {str(one): one for one in (*KNOWN, *COMBINATIONS)}
    found = in_turns([_UNITS, *sides], NUM_RANKS, _prepare, sides, num_rounds=num_rounds)
    return [
        Round(
            _mean_times([of_rank[i] for of_rank in found[_UNITS]]),
            {
                one: StepTime(*map(max, zip(*(of_rank[i] for of_rank in found[what]), strict=True)))
                for what, one in sides.items()
            },
        )
        for i in range(num_rounds)
    ]


def _mean_times(of_ranks: Sequence[dict[int, list[tuple[float, ...]]]]) -> dict[int, Costs]:
    """The units' times by number of microbatches, the mean of the ranks'."""
    return {
        number: unit_costs(
            [
                UnitTimes(*map(mean, zip(*unit, strict=True)))
                for unit in zip(*(own[number] for own in of_ranks), strict=True)
            ]
        )
        for number in of_ranks[0]
    }


def _prepare(side: str, rank: int, sides: dict[str, Combination]) -> Turn:
    return _units if side == _UNITS else _step(sides[side])


def _units() -> dict[int, list[tuple[float, ...]]]:
    """The units' times by number of microbatches, measured while all ranks compute."""
    options, device = EngineOptions(device="cpu"), torch.device("cpu")
    found = {}
    for combination in (*KNOWN, *COMBINATIONS):
        if combination.num_microbatches not in found:
            own = combination.training
            times = times_here(own.units(), own.hidden_size, own.lengths, options, device)
            found[combination.num_microbatches] = [astuple(one) for one in times]
    return found


def _step(combination: Combination) -> Turn:
    """A step's seconds, and those before and after this rank computes its microbatches."""
    training = combination.training
    engine = Engine(
        training.units(),
        training.hidden_size,
        Layout(pp=NUM_RANKS),
        EngineOptions(
            schedule=ScheduleConfig(combination.name, cut=combination.cut, stages_per_rank=combination.stages_per_rank),
            optimizer=OptimizerConfig(LearningRate(RATE), clip_norm=0),
            device="cpu",
        ),
    )
    batch, spec = training.batch(), MicroBatchSpec(num=training.num_microbatches)

    def turn() -> tuple[float, float]:
        start = time.perf_counter()
        engine.train_batch(batch, micro_batches=spec)
        took = time.perf_counter() - start
        # Only rank 0 has the timeline, and counts.
        timeline = engine.timeline()
        return took, took - _computing_s(timeline) if timeline is not None else 0.0

    return turn


def _computing_s(timeline: Timeline) -> float:
    """Seconds from a step's first action to the last of its microbatches."""
    steps = (event for events in timeline.events for event in events)
    return max(event.end for event in steps if parts(event.action)[0].op in COMPUTE) / 1e3
