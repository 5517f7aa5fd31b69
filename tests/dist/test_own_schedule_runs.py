"""A user's own schedule runs: handed to an engine or named, bit for bit one process; what cannot be proved does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch, schedule
from penstock.model import decoder_units
from penstock.runtime.errors import StepError
from penstock.schedule import Schedule, ScheduleError
from penstock.settings.objects import load_object
from tests.dist.grid_cases import DENSE, VOCABULARY
from tests.dist.launch import run_ranks

REFERENCE = f"{Path(__file__).parents[2]}/examples/own_schedule.py:eager_1f1b"
NUM = 6


def backwards_first(ranks: int, microbatches: int) -> Schedule:
    built = schedule.build("1f1b", ranks=ranks, microbatches=microbatches)
    orders = (*built.orders[:-1], tuple(reversed(built.orders[-1])))
    return Schedule("backwards-first", built.placement, microbatches, orders)


def given_as(way: str, ranks: int) -> Schedule | str:
    own = load_object(REFERENCE)
    return {"handed": own, "order": own(ranks, NUM), "named": REFERENCE, "broken": backwards_first}[way]


def some_steps(rank: int, pp: int, way: str) -> tuple[list[tuple[float, float]], float]:
    options = EngineOptions(given_as(way, pp) if pp > 1 else "1f1b", timeout_s=60.0)
    engine = Engine(decoder_units(DENSE), DENSE.hidden_size, Layout(pp=pp), options)
    generator = torch.Generator().manual_seed(5)
    batch = PackedBatch.from_documents([torch.randint(0, VOCABULARY, (n,), generator=generator) for n in range(3, 14)])
    found = []
    try:
        for _ in range(3):
            taken = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=NUM))
            found.append((taken.loss, taken.grad_norm))
        return found, engine.evaluate([batch], micro_batches=MicroBatchSpec(num=NUM))
    finally:
        engine.close()


@pytest.mark.shows(110)
@pytest.mark.parametrize("way", ["handed", "order", "named"])
def test_every_bit_is_that_of_one_process(way: str) -> None:
    wanted = some_steps(0, 1, way)
    for pp in (2, 4):
        assert run_ranks(pp, some_steps, pp, way) == [wanted] * pp


def refused(rank: int) -> tuple[str, bool]:
    """The reason, and whether this rank came to it before it heard of it."""
    with pytest.raises(StepError, match="ScheduleError: rank 1, action 3: 1I5 waits for 1F5") as caught:
        some_steps(rank, 2, "broken")
    return str(caught.value).partition("ScheduleError")[2], isinstance(caught.value.__cause__, ScheduleError)


@pytest.mark.shows(110)
def test_what_cannot_be_proved_runs_on_no_rank() -> None:
    (first, by_itself), (second, too) = run_ranks(2, refused)
    assert first == second and "rank 1" in first and (by_itself or too)
