"""`auto` with measured times in real processes: one order for all ranks, that of the first rank's times; the same bits.

The ranks are started once and run all cases.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions, timed_cut
from penstock.model import decoder_units
from penstock.schedule import Costs, costs_of_cut, to_text
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.search import cut as cut_search
from penstock.schedule.search import order as order_search
from penstock.settings import ModelConfig, ScheduleConfig, SearchedPlacement
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2)
NUM_UNITS = 2 * CONFIG.num_layers + 2
SPEC = MicroBatchSpec(num=4)


@dataclass(frozen=True)
class Case:
    """How stages are placed and cut, and how long each unit's F, I and W take on the first rank; None to measure.

    With `search_cut` the cut is searched for, too.
    """

    placement: SearchedPlacement
    times: tuple[tuple[float, float, float], ...] | None = None
    cut: tuple[int, ...] | None = None
    search_cut: bool = False


ALIKE = ((1.0, 1.0, 1.0),) * NUM_UNITS
CHEAP_WEIGHTS = ((1.0, 3.0, 0.1),) * 4 + ((2.0, 1.0, 0.5),) * 4
CASES = [
    Case(SearchedPlacement.LOOP),
    Case(SearchedPlacement.V, cut=(1, 3, 1, 3)),
    *(Case(kind, times) for kind in SearchedPlacement for times in (ALIKE, CHEAP_WEIGHTS)),
    Case(SearchedPlacement.V, search_cut=True),
]


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    sizes: list[int]
    order: str


def batches() -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (2, 6), generator=generator).tolist()
    return [
        PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in step]) for step in lengths
    ]


def train(case: Case, pp: int) -> Outcome:
    choice = ScheduleConfig(
        "auto", placement=case.placement, search_cut=case.search_cut, cut=case.cut if pp > 1 else None
    )
    options = EngineOptions(choice, measure_lengths=(6, 6), timeout_s=60.0, device="cpu")
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=pp), options)
    losses = [engine.train_batch(batch, micro_batches=SPEC).loss for batch in batches()]
    found = Outcome(
        losses,
        {name: p.detach().clone() for name, p in engine.parameters().items()},
        [len(stage) for stage in engine.pipeline.cut],
        to_text(engine.pipeline.program(4).schedule),
    )
    engine.close()
    engine.grid.close()
    return found


def brief_search() -> AbstractContextManager[object]:
    """Searches of a few thousand changes: what is shown is who searches for what, not how good the result is."""
    return mock.patch.multiple(order_search, _NUM_ACTIONS=100_000, _NUM_ACTIONS_OF_STEP=100_000)


def train_all(rank: int, pp: int) -> list[Outcome]:
    """Every case; times that are given are those of the first rank alone."""
    cut_search._TRIALS = ((2, 0.1),)
    with brief_search():
        return [train_given(rank, case, pp) for case in CASES]


def costs_of(times: Sequence[Sequence[float]]) -> Costs:
    forward, backward_input, backward_weight = zip(*times, strict=True)
    return Costs(forward, backward_input, backward_weight)


def train_given(rank: int, case: Case, pp: int) -> Outcome:
    if case.times is None:
        return train(case, pp)
    times = case.times

    def given(*arguments: Any) -> Costs:
        assert rank == 0, "the first rank measures for all"
        return costs_of(times)

    with mock.patch.object(timed_cut, "times_here", given):
        return train(case, pp)


def test_all_ranks_follow_the_order_of_the_first_ranks_times_bit_for_bit() -> None:
    alone = train(Case(SearchedPlacement.LOOP), 1)
    by_rank = run_ranks(2, train_all, 2, timeout_s=100.0)
    for number, case in enumerate(CASES):
        first, second = (outcomes[number] for outcomes in by_rank)
        assert (first.order, first.sizes) == (second.order, second.sizes), case
        assert first.losses == second.losses == alone.losses, case
        held = first.weights | second.weights
        assert held.keys() == alone.weights.keys()
        assert all(torch.equal(value, alone.weights[name]) for name, value in held.items()), case
        if case.cut is not None:
            assert first.sizes == list(case.cut)
        if case.times is not None:
            starts = [sum(first.sizes[:i]) for i in range(len(first.sizes))]
            cut = [range(start, start + size) for start, size in zip(starts, first.sizes, strict=True)]
            costs = costs_of_cut(costs_of(case.times), cut)
            choice = ScheduleChoice(ScheduleConfig("auto", placement=case.placement), costs)
            with brief_search():
                assert first.order == to_text(choice.program(2, 4).schedule), case
    assert len({by_rank[0][number].order for number, case in enumerate(CASES) if case.times is not None}) == 4
