"""Stages on any ranks, as many on each as one likes: searched, proved, written and read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import schedule
from penstock.schedule import Op, Placement, PlacementKind, flatten
from penstock.schedule.choice import ScheduleChoice


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, ...]:
    """The rank of each stage, of up to four ranks and eight stages."""
    num_ranks = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    return tuple(draw(st.permutations([*range(num_ranks), *more])))


@pytest.mark.shows(186)
@settings(max_examples=40, deadline=None)
@given(homes=maps(), num_microbatches=st.integers(1, 5))
def test_a_searched_order_of_any_map_is_proved_and_reads_back(homes: tuple[int, ...], num_microbatches: int) -> None:
    num_ranks = max(homes) + 1
    found = schedule.build("auto", ranks=num_ranks, microbatches=num_microbatches, placement=homes, effort=0.05)
    for stage, home in enumerate(homes):
        assert found.placement.rank_of(stage) == home and stage in found.placement.stages_of(home)
    program = schedule.lower(found)
    schedule.verify(program)
    num_actions = sum(step.op is Op.F for row in found.orders for step in flatten(row))
    assert num_actions == len(homes) * num_microbatches
    # No rank waits less than the work of the fullest one takes, where all stages cost the same.
    work = 3 * num_microbatches * max(map(homes.count, homes)) / found.placement.stages_per_rank
    assert schedule.simulate(program).makespan >= work - 1e-9
    assert schedule.from_text(schedule.to_text(found)) == found
    assert schedule.from_text(schedule.to_text(program)) == program
    read = schedule.from_csv(schedule.to_csv(found), name="auto")
    assert isinstance(read, schedule.Schedule) and read.orders == found.orders
    schedule.verify(ScheduleChoice().forwards(found.placement, num_microbatches))


@pytest.mark.shows(186)
@pytest.mark.parametrize("homes", [(0, 0), (0, 2), (0, 1, 2), (0, -1, 1)])
def test_a_map_gives_each_rank_a_stage(homes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must give a stage to each of the ranks 0 to 1 alone"):
        Placement(PlacementKind.MAP, 2, homes=homes)


def test_only_a_map_has_homes() -> None:
    with pytest.raises(ValueError, match="a map, and nothing else, is given the rank of each stage"):
        Placement(PlacementKind.LOOP, 2, homes=(0, 1))
    with pytest.raises(ValueError, match="a map, and nothing else, is given the rank of each stage"):
        Placement(PlacementKind.MAP, 2)
    with pytest.raises(ValueError, match="leave stages_per_rank out"):
        schedule.build("auto", ranks=2, microbatches=2, stages_per_rank=3, placement=(0, 1, 0))
