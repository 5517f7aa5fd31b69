"""Saved in one layout, loaded in the next: the losses go on as in one run that was never interrupted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.engine.checkpoint import Checkpointer, checkpointer
from penstock.model import decoder_units
from penstock.parallel.tensor_slice import local_slices
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, Precision, ScheduleConfig
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

# fp64, a few steps of Adam: rounding stays well below.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Link:
    """One layout of a chain, in which one step is trained."""

    layout: Layout
    schedule: str = "1f1b"
    stages: int = 1
    zero: bool = False


CHAIN = [
    Link(Layout(pp=4)),
    Link(Layout(dp=4), zero=True),
    Link(Layout(pp=2, tp=2), "interleaved", 2),
    Link(Layout(cp=2, tp=2), zero=True),
    Link(Layout(pp=2, dp=2), "dualpipe", 2, zero=True),
    Link(Layout(pp=2, dp=2, ep=2), "zb-h1", zero=True),
    Link(Layout(dp=2, tp=2, ep=2)),
    Link(Layout(pp=2, cp=2, ep=2), "zb-v", 2, zero=True),
    Link(Layout(dp=2, cp=2, ep=4), zero=True),
    Link(Layout(tp=4)),
]


def opened(link: Link, config: ModelConfig, precision: Precision) -> Engine:
    options = EngineOptions(
        schedule=ScheduleConfig(link.schedule, link.stages),
        precision=precision,
        optimizer=OptimizerConfig(LearningRate(1e-2, num_warmup_steps=3), clip_norm=0.5, zero=link.zero),
        timeout_s=60.0,
    )
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, link.layout, options)


def batch_of(step: int, dp_rank: int, dp: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 12, (16,), generator=generator).tolist()
    documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    return PackedBatch.from_documents(documents[dp_rank::dp])


def one_step(engine: Engine) -> tuple[float, float]:
    batch = batch_of(engine.step, engine.grid.dp_rank, engine.layout.dp)
    result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
    return result.loss, result.grad_norm


def checkpoints(engine: Engine, folder: Path) -> Checkpointer:
    return Checkpointer(folder, engine.grid, {"seed": 0}, aliases=engine.ties)


def resume(engine: Engine, saved: Checkpointer) -> None:
    found = saved.latest()
    if found is not None:
        assert engine.step == 0
        saved.load(found, engine.state())
        engine.load_progress(found.extra)
        engine.trainer.trained.rebuild_as_loaded()
        assert engine.step == found.step > 0


def walk(rank: int, folder: Path) -> list[tuple[float, float]]:
    """Train one step in each layout, each from what the one before has saved."""
    told = []
    for link in CHAIN:
        engine = opened(link, SPARSE, Precision.FP64)
        saved = checkpoints(engine, folder)
        resume(engine, saved)
        told.append(one_step(engine))
        saved.save(engine.step, engine.state(), engine.progress(), wait=True)
        engine.close()
        engine.grid.close()
    return told


@pytest.mark.shows(94, 96)
def test_a_chain_of_layouts_is_one_run(tmp_path: Path) -> None:
    assert len({link.layout for link in CHAIN}) == len(CHAIN) and all(link.layout.world_size == 4 for link in CHAIN)
    by_rank = run_ranks(4, walk, tmp_path, timeout_s=200.0)
    alone = opened(Link(Layout()), SPARSE, Precision.FP64)
    resume(alone, checkpoints(alone, tmp_path))
    engine = opened(Link(Layout()), SPARSE, Precision.FP64)
    wanted = [one_step(engine) for _ in range(len(CHAIN) + 1)]
    assert by_rank == [by_rank[0]] * 4
    for found, expected in zip([*by_rank[0], one_step(alone)], wanted, strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=0)


def reads_of(rank: int, folder: Path) -> tuple[int, int, int, int]:
    """Of a load in another layout: bytes read, the most behind one read, how many lived at once, and bytes held."""
    engine = opened(Link(Layout(tp=2, dp=2), zero=True), DENSE, Precision.BF16)
    alive: list[weakref.ref[Tensor]] = []
    num_bytes = longest = most = 0
    original = checkpointer.take

    def watched(file: Any, name: str, indices: tuple[slice, ...]) -> Tensor:
        nonlocal num_bytes, longest, most
        taken = original(file, name, indices)
        num_bytes += taken.nbytes
        longest = max(longest, taken.untyped_storage().nbytes())
        alive.append(weakref.ref(taken))
        most = max(most, sum(ref() is not None for ref in alive))
        return taken

    checkpointer.take = watched
    resume(engine, checkpoints(engine, folder))
    held = sum(part.nbytes for value in engine.state().values() for part in local_slices(value).values())
    return num_bytes, longest, most, held


def test_a_rank_reads_its_share_one_tensor_at_a_time(tmp_path: Path) -> None:
    first = opened(Link(Layout()), DENSE, Precision.BF16)
    one_step(first)
    saved = checkpoints(first, tmp_path)
    saved.save(first.step, first.state(), first.progress(), wait=True)
    every = [part.nbytes for value in first.state().values() for part in local_slices(value).values()]
    for num_bytes, longest, most, held in run_ranks(4, reads_of, tmp_path, timeout_s=60.0):
        assert most == 1 and 0 < longest <= max(every)
        assert num_bytes == held < 0.6 * sum(every)
