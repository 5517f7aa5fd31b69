"""`auto` for the times of a run's own stages: the order depends on them, is none worse, and is what is told."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import schedule
from penstock.cli import dry_run
from penstock.engine import EngineOptions
from penstock.engine.cut import times_here
from penstock.engine.folders.run_check import check_run
from penstock.engine.run_data import RunData
from penstock.model import decoder_units
from penstock.schedule import Costs, PlacementKind, Timeline, costs_of_cut
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.search import order as order_search
from penstock.settings import ModelConfig, ScheduleConfig, SearchedPlacement, from_dict
from tests.e2e.training import CORPUS

RIVALS = {"loop": ("zb-h1", "1f1b"), "v": ("zb-v", "v-half")}


def random_costs(chance: random.Random, num_stages: int) -> Costs:
    def times(least: float) -> list[float]:
        return [chance.uniform(least, 3.0) for _ in range(num_stages)]

    return Costs(times(1.0), times(1.0), times(0.5))


def simulated(choice: ScheduleChoice, ranks: int, microbatches: int, costs: Costs) -> Timeline:
    program = choice.program(ranks, microbatches)
    schedule.verify(program)
    return schedule.simulate(program, costs)


@pytest.mark.parametrize("kind", RIVALS)
@pytest.mark.parametrize("ranks, microbatches", [(2, 5), (3, 6), (4, 4), (4, 9)])
def test_no_schedule_of_the_same_memory_is_faster_at_its_times(kind: str, ranks: int, microbatches: int) -> None:
    chance, num_stages = random.Random(f"{kind} {ranks}"), ranks * (2 if kind == "v" else 1)
    costs = random_costs(chance, num_stages)
    searched = ScheduleChoice(ScheduleConfig("auto", placement=SearchedPlacement(kind)), costs)
    found = simulated(searched, ranks, microbatches, costs)
    assert max(found.peak_live_microbatches) <= ranks
    for name in RIVALS[kind]:
        for early in (False, True):
            rival = simulated(ScheduleChoice(ScheduleConfig(name, early_gradients=early)), ranks, microbatches, costs)
            assert max(rival.peak_live_microbatches) <= ranks
            assert found.span_cost <= rival.span_cost * (1 + 1e-12), (name, costs)


@pytest.mark.parametrize("kind", ["loop", "v"])
def test_other_times_have_another_order(kind: str) -> None:
    choice, orders = ScheduleChoice(ScheduleConfig("auto", placement=SearchedPlacement(kind))), []
    num_stages = choice.placement(3).num_stages
    for slow in range(num_stages):
        times = [3.0 if stage == slow else 1.0 for stage in range(num_stages)]
        costs = Costs(times, times, times)
        orders.append(choice.timed(costs).program(3, 6).schedule.orders)
        assert orders[-1] == choice.timed(costs).program(3, 6).schedule.orders, "a search has one answer"
    assert len(set(orders)) > num_stages / 2


def test_where_stages_live_does_not_wait_for_a_search() -> None:
    choice = ScheduleChoice(ScheduleConfig("auto", placement=SearchedPlacement.V, max_live_microbatches=8.0))
    placement = choice.timed(random_costs(random.Random(0), 32)).placement(16)
    assert (placement.kind, placement.num_ranks, placement.stages_per_rank) == (PlacementKind.V, 16, 2)
    assert ScheduleChoice.of("auto").placement(4).kind is PlacementKind.LOOP
    assert ScheduleChoice(ScheduleConfig("auto", 3)).placement(4).stages_per_rank == 3


def test_each_part_of_a_unit_is_measured() -> None:
    units = decoder_units(ModelConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2))
    begin = time.perf_counter()
    times = times_here(units, 16, (8, 8), EngineOptions(), torch.device("cpu"))
    taken = time.perf_counter() - begin
    parts: Any = times.forward, times.backward_input, times.backward_weight
    of_units = list(zip(*parts, strict=True))
    assert len(of_units) == len(units)
    assert all(min(own) > 0 for own in of_units)
    # What is alike is measured once, and nothing takes longer than all of it did.
    assert of_units[1] == of_units[3] and of_units[2] == of_units[4]
    assert sum(map(sum, set(of_units))) < taken
    assert times.totals == pytest.approx(list(map(sum, of_units)))


def settings(folder: Path, **of_schedule: Any) -> dict[str, Any]:
    (folder / "corpus.py").write_text(CORPUS)
    return {
        "output": str(folder / "run"),
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 4, "num_heads": 2},
        "data": {"corpus": str(folder / "corpus.py"), "cache": None, "sequence_length": 32, "num_sequences": 8},
        "parallel": {"pp": 2, "device": "cpu"},
        "train": {"num_microbatches": 4},
        "schedule": {"name": "auto", **of_schedule},
    }


def test_a_dry_run_tells_the_bubble_of_the_order_it_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    times = Costs(*zip(*([chance.uniform(1.0, 5.0) for _ in range(3)] for _ in range(10)), strict=True))  # type: ignore[arg-type]
    monkeypatch.setattr(dry_run, "times_here", lambda *arguments: times)
    monkeypatch.setattr(order_search, "_NUM_ACTIONS", 200_000)
    config = check_run(from_dict(settings(tmp_path, measure=True, placement="v")))
    plan = dry_run.plan_run(config, RunData.load(config))
    sizes = [len(stage.units) for stage in plan.stages]
    assert plan.is_measured and len(sizes) == 4
    costs = costs_of_cut(times, schedule.check_cut(sizes, 10, 4))
    told = simulated(ScheduleChoice(config.schedule, costs), 2, 4, costs)
    assert plan.bubble_rate == told.bubble_rate > 0
    # No cut has a faster slowest rank.
    loads = [costs.forward[n] + costs.backward_input[n] + costs.backward_weight[n] for n in range(4)]  # type: ignore[index]
    best = schedule.balanced_cut(times.totals, ScheduleChoice(config.schedule).placement(2))
    assert [len(stage) for stage in best] == sizes
    assert max(loads[0] + loads[3], loads[1] + loads[2]) < 0.6 * sum(loads)
    equal = check_run(from_dict(settings(tmp_path)))
    assert not dry_run.plan_run(equal, RunData.load(equal)).is_measured
