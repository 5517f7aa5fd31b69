"""The step of a schedule under given costs, from the simulated program; long steps repeat their steady middle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock import schedule
from penstock.schedule import builders
from penstock.schedule.actions import COMPUTE

# Beyond so many rounds of the ranks only the middle of a step grows, by the same time for each round.
_ROUNDS = 3
_MORE_ROUNDS = {"zb-v": 8, "dualpipe-v": 4}
# Searched orders differ with the times, so their programs are not worth keeping; of the others the last few are.
_KEPT_PROGRAMS = 64


@dataclass(frozen=True)
class Order:
    """The order of a step: a schedule by name with its size and options.

    `early_gradients`: each gradient is sent before the weights' part of its backward, as the engine does by default.
    """

    name: str
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    early_gradients: bool = False

    @property
    def is_searched(self) -> bool:
        """True if the order depends on the stages' times."""
        return "forward" in builders.options(self.name)

    @property
    def placement(self) -> schedule.Placement:
        """The placement of its stages, which depends on neither microbatches nor times."""
        kind = dict(self.options).get("placement", "loop")
        if self.is_searched:
            return schedule.Placement(schedule.PlacementKind(kind), self.ranks, self.stages_per_rank)
        return _program(self._with(1 if self.name != "dualpipe" else 2 * self.ranks), None).placement

    @property
    def num_simulated(self) -> int:
        """The microbatches of the programs that `simulate_step` simulates, added up."""
        enough = _MORE_ROUNDS.get(self.name, _ROUNDS)
        if self.microbatches // self.ranks <= enough:
            return self.microbatches
        return (2 * enough - 1) * self.ranks + 2 * (self.microbatches % self.ranks)

    def _with(self, microbatches: int) -> Order:
        return Order(self.name, self.ranks, microbatches, self.stages_per_rank, self.options, self.early_gradients)


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    `makespan` and `span` (the longest time of a rank from its own start) are in the costs' unit, as are each rank's
    `busy` and `peak_bytes` of live tapes, and `outside`, the time before its first action and after its last.
    `splits` is true for ranks that compute I and W apart.
    """

    makespan: float
    span: float
    busy: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    outside: tuple[float, ...]
    splits: tuple[bool, ...]

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest rank computes nothing."""
        return 1 - max(self.busy) / self.makespan if self.makespan else 0.0


def simulate_step(order: Order, costs: schedule.Costs, order_costs: schedule.Costs | None = None) -> SimulatedStep:
    """Simulate an order's program under the costs; a searched order is found for `order_costs`, by default the same.

    Of an order with many rounds of microbatches the programs of two and of three rounds are simulated (of some
    schedules, of more), and the step goes on as it grew from one to the other: the middle of each order is steady.

    Raises: ValueError for an order that cannot be built.
    """
    rounds, ranks = order.microbatches // order.ranks, order.ranks
    enough = _MORE_ROUNDS.get(order.name, _ROUNDS)
    if rounds <= enough or order.is_searched:
        return _simulated(order, costs, order_costs)
    rest = order.microbatches % ranks
    short = _simulated(order._with((enough - 1) * ranks + rest), costs)
    longer = _simulated(order._with(enough * ranks + rest), costs)
    more = rounds - enough

    def grown(before: float, after: float) -> float:
        return after + more * (after - before)

    busy = tuple(map(grown, short.busy, longer.busy))
    # A rank may yet have had time to spare in the rounds that were simulated, and none in the end.
    least = max(outside + own for outside, own in zip(longer.outside, busy, strict=True))
    return SimulatedStep(
        max(least, grown(short.makespan, longer.makespan)),
        max(*busy, grown(short.span, longer.span)),
        busy,
        tuple(map(grown, short.peak_bytes, longer.peak_bytes)),
        longer.outside,
        longer.splits,
    )


def _simulated(order: Order, costs: schedule.Costs, order_costs: schedule.Costs | None = None) -> SimulatedStep:
    timeline = schedule.simulate(_program(order, (order_costs or costs) if order.is_searched else None), costs)
    computed = [[event for event in events if _computes(event.action)] for events in timeline.events]
    return SimulatedStep(
        timeline.makespan,
        timeline.span_cost,
        tuple(sum(event.end - event.start for event in events) for events in computed),
        timeline.peak_live_bytes,
        tuple(timeline.makespan - (events[-1].end - events[0].start) for events in computed),
        tuple(any(schedule.parts(event.action)[0].op is schedule.Op.I for event in events) for events in computed),
    )


def _computes(step: schedule.Step) -> bool:
    return schedule.parts(step)[0].op in COMPUTE


@lru_cache(_KEPT_PROGRAMS)
def _program(order: Order, costs: schedule.Costs | None) -> schedule.Program:
    """The program of an order; a searched one is made for the costs."""
    options = dict(order.options)
    if costs is not None:
        own = ("forward", "backward_input", "backward_weight", "transfer")
        options |= {name: getattr(costs, name) for name in own}
        share = costs.weight_memory_share
        options.setdefault("weight_memory_share", min(1.0, max(share) if isinstance(share, tuple) else share))  # type: ignore[arg-type]
    built = schedule.build(
        order.name,
        ranks=order.ranks,
        microbatches=order.microbatches,
        stages_per_rank=order.stages_per_rank,
        **options,
    )
    return schedule.lower(schedule.early_gradients(built) if order.early_gradients else built)
