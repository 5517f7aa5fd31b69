"""The bubble and memory of schedules, as the search sees them before it simulates a layout: from small simulations.

So each builder that is entered is planned for, and nothing is declared of it a second time.
"""

from dataclasses import dataclass
from functools import lru_cache

from penstock import schedule
from penstock.schedule import builders
from penstock.schedule.actions import Pair

# Up to so many ranks a pipeline is simulated; beyond, bubble and memory go on as they grow from half of them. Orders in
# a V depend on the ranks modulo 2 and 3, which a half and the whole have in common.
_RANKS = 12
# Of several stages a rank, those that are tried.
_STAGES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Footprint:
    """The bubble and the memory of a schedule with so many stages a rank, on any number of ranks."""

    schedule: str
    stages: int
    #: True if it fuses forwards with backwards
    pairs: bool = False

    def live(self, ranks: int, microbatches: int) -> float:
        """The microbatches of a whole rank's activations that the fullest rank keeps."""
        keeps_all = _simulated(self.schedule, self.stages, _RANKS // 2)[1] >= 3 * (_RANKS // 2)
        return microbatches if keeps_all else min(microbatches, self._at(ranks, 1))

    def bubble(self, ranks: int) -> float:
        """The idle time of a rank, in forwards and backwards of one microbatch through it."""
        return self._at(ranks, 0)

    def _at(self, ranks: int, which: int) -> float:
        whole = _simulated(self.schedule, self.stages, min(ranks, _RANKS))[which]
        if ranks <= _RANKS:
            return whole
        half = _simulated(self.schedule, self.stages, _RANKS // 2)[which]
        return whole + (ranks - _RANKS) * (whole - half) / (_RANKS - _RANKS // 2)


def footprints() -> tuple[Footprint, ...]:
    """The footprints of all schedules that train and whose orders no times decide, by stages on each rank."""
    found = []
    for name in builders.names():
        # Two routes are two copies of the model, and a searched order depends on the stages' times.
        if not builders.trains(name) or "forward" in builders.options(name):
            continue
        for stages in (1,) if builders.default_stages(name) == 1 else _STAGES:
            try:
                small = _built(name, stages, ranks=2)
            except ValueError:
                continue
            if small.placement.num_routes == 1:
                pairs = any(isinstance(step, Pair) for order in small.orders for step in order)
                found.append(Footprint(name, stages, pairs))
    return tuple(found)


def _built(name: str, stages: int, ranks: int) -> schedule.Schedule:
    usual = builders.default_stages(name) == stages
    return builders.build(name, ranks=ranks, microbatches=3 * ranks, stages_per_rank=None if usual else stages)


@lru_cache(4096)
def _simulated(name: str, stages: int, ranks: int) -> tuple[float, float]:
    """The bubble of so many ranks and the microbatches that the fullest keeps, where F, I and W take equal times."""
    built = _built(name, stages, ranks)
    timeline = schedule.simulate(schedule.lower(built), schedule.Costs(1 / 3, 1 / 3, 1 / 3))
    return timeline.makespan - built.num_microbatches, max(timeline.peak_live_microbatches)
