"""torch's own schedules and runtime as an oracle: they read what we write, and we read what they write."""

import itertools
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import (
    Op,
    Pair,
    Placement,
    PlacementKind,
    Program,
    Schedule,
    from_csv,
    lower,
    parts,
    to_csv,
    verify,
)
from tests.schedule.brute_force import harm_of
from tests.schedule.families import NAMES, built, lowered


@cache
def torch_schedules() -> Any:
    """Torch's module, which takes a second to import, of whoever only collects tests too."""
    from torch.distributed.pipelining import schedules

    return schedules


@dataclass
class StandIn:
    """What torch's schedules ask of a stage before they run: its place and the sizes, no module and no group."""

    stage_index: int
    group_rank: int
    group_size: int
    num_stages: int
    has_backward: bool = True
    submod: object = None
    stage_index_to_group_rank: dict = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def stand_ins(ranks: int, stages_per_rank: int = 1, v_shape: bool = False) -> Any:
    """The local stages of rank 0."""
    num_stages = ranks * stages_per_rank
    local = (0, num_stages - 1) if v_shape else range(0, num_stages, ranks)
    return [StandIn(stage, 0, ranks, num_stages) for stage in local]


def loss(*_: object) -> None:
    """Schedules with backwards want one; it is never called."""


def compute_only(order: dict[int, list]) -> str:
    """A CSV of torch's compute actions as torch writes it, idle steps empty."""
    return "\r\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in sorted(order)) + "\r\n"


def torch_simulates(order: dict[int, list], placement: Placement) -> int:
    """Number of steps that torch's own dry run takes; it knows neither reductions nor sharding."""
    unknown = (torch_schedules().REDUCE_GRAD, torch_schedules().UNSHARD, torch_schedules().RESHARD)
    known = {rank: [a for a in order[rank] if a.computation_type not in unknown] for rank in order}
    done = torch_schedules()._simulate_comms_compute(known, placement.rank_of, placement.num_stages)
    return max(len(steps) for steps in done.values())


SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 8, 13)]
# torch knows one copy of a model, and its runtime wants backwards.
RUNNABLE = [name for name in NAMES if name not in ("dualpipe", "inference")]


def runtime_for(schedule: Schedule) -> Any:
    """torch's runtime for a schedule of ours, before it has read any order."""
    placement = schedule.placement
    v_shape = placement.kind is PlacementKind.V
    stages = stand_ins(placement.num_ranks, placement.stages_per_rank, v_shape)
    runtime = torch_schedules()._PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=loss)
    runtime.stage_index_to_group_rank = {stage: placement.rank_of(stage) for stage in range(placement.num_stages)}
    return runtime


@pytest.mark.parametrize("name", RUNNABLE)
def test_torch_lowers_and_runs_dry_our_schedules(name: str, tmp_path: Path):
    file = tmp_path / "schedule.csv"
    for ranks, microbatches in SIZES:
        schedule = built(name, ranks, microbatches)
        file.write_text(to_csv(schedule))
        runtime = runtime_for(schedule)
        runtime._load_csv(str(file), format="compute_only")
        ours = [[str(step) for step in order] for order in schedule.orders]
        assert [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(ranks)] == ours
        # torch reads and runs fused pairs, but its dry run does not know them.
        if not any(isinstance(step, Pair) for order in schedule.orders for step in order):
            num_steps = torch_simulates(runtime.pipeline_order_with_comms, schedule.placement)
            assert num_steps >= 2 * (microbatches + ranks - 1)


@pytest.mark.parametrize("name", RUNNABLE)
def test_torch_reads_our_programs(name: str, tmp_path: Path):
    """Its runtime takes them as they are; its dry run does not, for it lets a receive wait for its send."""
    file = tmp_path / "program.csv"
    for ranks, microbatches in SIZES:
        program = lowered(name, ranks, microbatches)
        file.write_text(to_csv(program))
        runtime = runtime_for(program.schedule)
        runtime._load_csv(str(file), format="compute_comms")
        read = runtime.pipeline_order_with_comms
        ours = [[str(step) for step in steps if str(step) != "STEP"] for steps in program.ranks]
        assert [[str(action) for action in read[rank]] for rank in range(ranks)] == ours


MULTI = {
    "interleaved 1F1B": ("ScheduleInterleaved1F1B", False),
    "looped BFS": ("ScheduleLoopedBFS", False),
    "interleaved zero bubble": ("ScheduleInterleavedZeroBubble", False),
    "zero bubble V": ("ScheduleZBVZeroBubble", True),
    "DualPipeV": ("ScheduleDualPipeV", True),
}


@pytest.mark.parametrize("name", MULTI)
def test_what_torch_writes_is_proved_in_both_forms(name: str, tmp_path: Path):
    """Its orders with our transfers and with its own; where torch itself refuses a size there is nothing to read."""
    theirs, v_shape = getattr(torch_schedules(), MULTI[name][0]), MULTI[name][1]
    file, num_proved = tmp_path / "torch.csv", 0
    sizes = itertools.product((1, 2, 3, 4, 8), (2,) if v_shape else (1, 2, 3), (1, 2, 3, 4, 6, 8, 16))
    for ranks, stages_per_rank, microbatches in sizes:
        try:
            runtime = theirs(stand_ins(ranks, stages_per_rank, v_shape), microbatches, loss_fn=loss)
        except ValueError:
            continue
        num_stages = ranks * stages_per_rank
        runtime._dump_csv(str(file), format="compute_only")
        read = from_csv(file.read_text())
        assert isinstance(read, Schedule)
        homes = [read.placement.rank_of(stage) for stage in range(num_stages)]
        assert ranks == 1 or homes == [runtime.stage_index_to_group_rank[stage] for stage in range(num_stages)]
        words = [str(action) for rank in range(ranks) for action in runtime.pipeline_order[rank] if action is not None]
        assert [str(step) for order in read.orders for step in order] == words
        proof = verify(lower(read))
        num_borders = 0 if ranks == 1 else num_stages - (2 if v_shape else 1)
        assert proof.num_messages == 2 * num_borders * microbatches

        runtime._dump_csv(str(file), format="compute_comms")
        program = from_csv(file.read_text())
        if ranks == 1:  # nothing is sent, so it is read as a schedule
            assert isinstance(program, Schedule)
            program = lower(program)
        assert isinstance(program, Program)
        assert verify(program).num_messages == proof.num_messages
        assert harm_of(program) is None
        ops = {part.op for steps in program.ranks for step in steps for part in parts(step)}
        assert {Op.REDUCE_GRAD, Op.STEP} <= ops
        assert ranks == 1 or from_csv(to_csv(program)) == program
        num_proved += 1
    assert num_proved >= 15
