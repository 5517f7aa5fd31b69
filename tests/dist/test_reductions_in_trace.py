"""Gradient reductions as the trace has them: each bucket once, behind its last writer, beside what is left to do."""

from dataclasses import dataclass

import pytest
import torch

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.schedule import Action, Op, Step
from penstock.schedule.actions import COMPUTE, TRANSFERS, parts
from penstock.schedule.recording import CollectiveKind
from penstock.settings import ModelConfig, ScheduleConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=5, num_heads=2)
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v", "combined-interleaved")


@dataclass(frozen=True)
class Seen:
    """One rank's step: its actions in order with start and end, its reductions with launch and wait, its buckets."""

    steps: list[tuple[Step, int, int]]
    reductions: list[tuple[int, int, int]]
    buckets: dict[int, list[int]]


def trace(rank: int, names: tuple[str, ...]) -> dict[str, Seen]:
    found = {}
    for name in names:
        options = EngineOptions(schedule=ScheduleConfig(name), timeout_s=30.0)
        engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=2, dp=2), options)
        batch = PackedBatch.from_documents([torch.arange(7) + engine.grid.dp_rank] * 6)
        for _ in range(2):
            engine.train_batch(batch, micro_batches=MicroBatchSpec(num=6))
        travels = [t for t in engine.recorder.collective_records() if t.kind is CollectiveKind.GRADIENTS]
        found[name] = Seen(
            [(record.action, record.begin_ns, record.end_ns) for record in engine.recorder.records()],
            [(t.num_bytes, t.launch_ns, t.wait_ns or 0) for t in travels],
            {n: [b.gradients.nbytes for b in buckets.buckets] for n, buckets in engine.trainer.gradients.items()},
        )
        for t in travels:
            assert t.wait_ns is not None and t.taken_ns is not None and t.end_ns is not None
            assert t.launch_ns <= t.wait_ns <= t.taken_ns and t.launch_ns <= t.end_ns <= t.taken_ns
        engine.close()
        engine.grid.close()
    return found


def writes(step: Step, stage: int) -> bool:
    return any(action.op in (Op.B, Op.W) and action.stage == stage for action in parts(step))


def computes(step: Step) -> bool:
    return parts(step)[0].op in COMPUTE


@pytest.mark.shows(5, 30, 31, 32, 100)
def test_each_bucket_is_reduced_once_right_behind_its_last_writer_and_beside_the_rest():
    by_rank = run_ranks(4, trace, SCHEDULES, timeout_s=100.0)
    for name in SCHEDULES:
        num_beside = 0
        for rank in by_rank:
            seen = rank[name]
            actions = [step for step, _, _ in seen.steps]
            told = [at for at, step in enumerate(actions) if parts(step)[0].op is Op.REDUCE_GRAD]
            assert sorted(parts(actions[at])[0].stage for at in told) == sorted(seen.buckets)
            launched = []
            for at in told:
                (action,), (_, begin, end) = parts(actions[at]), seen.steps[at]
                own = [num_bytes for num_bytes, launch, _ in seen.reductions if begin <= launch <= end]
                assert own == seen.buckets[action.stage], (name, action)
                launched += own
                last = max(i for i, step in enumerate(actions) if writes(step, action.stage))
                between = {parts(step)[0].op for step in actions[last + 1 : at]}
                assert last < at and between <= TRANSFERS | {Op.REDUCE_GRAD}, (name, action)
            assert len(launched) == len(seen.reductions) > 0
            # Nobody waits before the optimizer step, however much there is left to compute.
            assert actions[-1] == Action(Op.STEP)
            assert all(wait >= seen.steps[-1][1] for _, _, wait in seen.reductions)
            last_compute = max(begin for step, begin, _ in seen.steps if computes(step))
            num_beside += sum(launch < last_compute for _, launch, _ in seen.reductions)
        stages = 1 if name in ("1f1b", "zb-h1") else 2
        # Where a rank has one stage its last writer ends the step; of two the one that ends first is reduced beside.
        assert (num_beside > 0) == (stages > 1), name
