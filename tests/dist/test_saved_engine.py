"""`Engine.save` and `Engine.load`: a user's own loop goes on where it was, in its layout or in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import (
    Decay,
    Engine,
    EngineOptions,
    Layout,
    LearningRate,
    MicroBatchSpec,
    OptimizerConfig,
    PackedBatch,
    Precision,
)
from penstock.model import decoder_units
from tests.covering import EVERY
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

# fp64, a few steps of Adam: rounding stays well below.
TOLERANCE = 1e-10
NUM_STEPS = 2

PIPELINES = [(Layout(), "1f1b"), (Layout(pp=2), "zb-h1"), (Layout(pp=3), "1f1b"), (Layout(pp=2), "dualpipe")]
GRIDS = [
    (Layout(dp=2), "1f1b"),
    (Layout(pp=2, dp=2), "1f1b"),
    (Layout(dp=2, tp=2, ep=2), "1f1b"),
    (Layout(pp=2, cp=2), "zb-h1"),
]
Place = tuple[Layout, str]


def opened(place: Place, sparse: bool, seed: int = 0) -> Engine:
    layout, schedule = place
    config = SPARSE if sparse else DENSE
    optimizer = OptimizerConfig(
        LearningRate(1e-2, Decay.LINEAR, num_warmup_steps=2, num_decay_steps=9), zero=layout.dp > 1
    )
    options = EngineOptions(schedule, precision=Precision.FP64, optimizer=optimizer, seed=seed, timeout_s=60.0)
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)


def some_steps(engine: Engine) -> list[tuple[float, ...]]:
    """Steps on batches that depend on the step alone; each with a random number that is drawn after it."""
    found = []
    for _ in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(engine.step)
        lengths = torch.randint(2, 12, (16,), generator=generator).tolist()
        documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
        batch = PackedBatch.from_documents(documents[engine.grid.dp_rank :: engine.layout.dp])
        taken = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
        found.append((taken.step, taken.loss, taken.grad_norm, taken.learning_rate, float(torch.rand(()))))
    return found


def saved(rank: int, place: Place, sparse: bool, folder: Path) -> list[tuple[float, ...]]:
    """Save after some steps; the steps after that."""
    engine = opened(place, sparse)
    some_steps(engine)
    torch.manual_seed(17)
    engine.save(folder, extra={"rank": rank})
    return some_steps(engine)


def loaded(rank: int, place: Place, sparse: bool, folder: Path, again: Path) -> tuple[list[tuple[float, ...]], Any]:
    """Go on from there with an engine that began with other weights, and save as it was found."""
    engine = opened(place, sparse, seed=1)
    torch.manual_seed(rank)
    extra = engine.load(folder)
    engine.save(again)
    return some_steps(engine), extra


def whole_state(folder: Path, sparse: bool) -> dict[str, Tensor]:
    engine = opened((Layout(), "1f1b"), sparse, seed=2)
    engine.load(folder)
    state = {name: tensor for name, tensor in engine.state().items() if isinstance(tensor, Tensor)}
    assert len(state) == len(engine.state()) > 2 * len(engine.parameters())
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.shows(118)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("first", [PIPELINES[1], GRIDS[1]], ids=["pp2", "pp2-dp2-zero"])
def test_any_layout_goes_on_from_what_another_has_saved(tmp_path: Path, first: Place, sparse: bool) -> None:
    wanted = run_ranks(first[0].world_size, saved, first, sparse, tmp_path / "a")
    state = whole_state(tmp_path / "a", sparse)
    # Of the other layouts each is read once from either of the first two: pipelines without experts, grids with them.
    others = GRIDS if sparse else [*PIPELINES, *GRIDS[:2]]
    if EVERY:
        others = [*PIPELINES, *(GRIDS if sparse else GRIDS[:2])]
    for number, target in enumerate([first, *(others if EVERY else others[(first in GRIDS) ^ sparse :: 2])]):
        world_size, again = target[0].world_size, tmp_path / f"b{number}"
        found = run_ranks(world_size, loaded, target, sparse, tmp_path / "a", again)
        for rank, (steps, extra) in enumerate(found):
            same_world = world_size == first[0].world_size
            assert extra == {"rank": rank if same_world else 0}
            # The two directions of a bidirectional pipeline are summed apart, and then added.
            one_sum = [place for place in PIPELINES if place[1] != "dualpipe"]
            if target == first or (first in one_sum and target in one_sum):
                assert steps == wanted[0], "not bit for bit"
            else:
                for own, theirs in zip(steps, wanted[0], strict=True):
                    assert own == pytest.approx(theirs, abs=TOLERANCE, rel=0)
        theirs = whole_state(again, sparse)
        assert theirs.keys() == state.keys() and all(torch.equal(theirs[name], state[name]) for name in state)
