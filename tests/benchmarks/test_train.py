"""What the benchmark of training gives torch's schedules: the same units, dealt to ranks as the schedules want them."""

from typing import Any

import pytest
from benchmarks.train import NUM_RANKS, TORCH_SCHEDULES, Training

from penstock.schedule import Placement, PlacementKind


@pytest.fixture(scope="module")
def schedules() -> Any:
    """Torch's module, which takes a second to import, of whoever only collects tests too."""
    from torch.distributed.pipelining import schedules

    return schedules


@pytest.mark.parametrize("chosen", TORCH_SCHEDULES, ids=[chosen.name for chosen in TORCH_SCHEDULES])
def test_torch_gets_all_units_in_the_placement_of_its_schedule(chosen, schedules: Any):
    kind = PlacementKind.V if chosen.v_shape else PlacementKind.LOOP
    placement = Placement(kind, NUM_RANKS, chosen.stages_per_rank)
    dealt = [tuple(chosen.stages_of(rank)) for rank in range(NUM_RANKS)]
    assert dealt == [placement.stages_of(rank) for rank in range(NUM_RANKS)]
    training = Training.of()
    assert sum(training.even_cut(placement.num_stages)) == len(training.units())
    single = issubclass(getattr(schedules, chosen.name), schedules.PipelineScheduleSingle)
    assert single == (chosen.stages_per_rank == 1)


def test_every_schedule_of_torch_is_a_side(schedules: Any):
    ours = {chosen.name for chosen in TORCH_SCHEDULES}
    names = [name for name in dir(schedules) if name.startswith("Schedule")]
    assert ours == set(names), "torch has another one"


def test_layers_that_cannot_be_divided_evenly_are_refused():
    with pytest.raises(ValueError, match="6 layers cannot be divided among 4 stages"):
        Training.of("--layers", "6").even_cut(4)
