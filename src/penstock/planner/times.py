"""From work to time: the constants of the cost model, fitted or by default, and the seconds of a pass and of a message.

The time of a pass is the sum of its arithmetic at a share of the peak, its bytes at a share of the memory's bandwidth,
and its messages at a share of the link's. So efficiency follows from shape: products of I operations a byte, whose
weights are n wide at their narrowest, reach ``compute / (1 + width / n + I0 / I)`` of the peak, where
``I0 = compute * peak / (memory * bandwidth)``.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from penstock import schedule
from penstock.planner.links import PipelinePlace, Price
from penstock.planner.model_costs import MessageKind, Style, Work
from penstock.schedule import builders
from penstock.schedule.actions import COMPUTE, parts

LEAST_COMPUTE, MOST_COMPUTE = 0.02, 1.0
"""The bounds that `compute` is fitted within; an action takes at least no time."""


@dataclass(frozen=True)
class Constants:
    """The constants of the cost model. The first two are fitted, the same for all runs of a source; the others stay.

    Source: defaults of the first two by `benchmarks/plan_published.py` on arXiv 2205.05198, of the others what copies
    and collectives of large blocks reach on published devices.
    """

    #: The share of the peak that products reach while their operands are at hand.
    compute: float = 0.76
    #: The time that every compute action takes besides.
    action_s: float = 0.0005
    #: The share of the memory's bandwidth that is reached.
    memory: float = 0.8
    #: The share of a link's bandwidth that is reached.
    links: float = 0.8
    #: The share of `compute` that attention's own products reach.
    attention: float = 0.7
    #: The width at which a product reaches half of that share: with a narrowest side of n, it reaches n / (n + width).
    width: float = 128.0

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "links"):
            if not 0 < getattr(self, name) <= 2:
                raise ValueError(f"{name} must be a share above 0, got {getattr(self, name)!r}")
        if not 0 <= self.action_s < math.inf:
            raise ValueError(f"action_s must be a time of at least 0, got {self.action_s!r}")

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """A sentence for each constant that stands at its bound, and so hides what the cost model lacks."""
        found = []
        if self.compute >= MOST_COMPUTE:
            found.append(f"compute is at its bound of {MOST_COMPUTE:g}: no product is faster than the peak")
        if self.compute <= LEAST_COMPUTE:
            found.append(f"compute is at its bound of {LEAST_COMPUTE:g}: products are slower by something else")
        if self.action_s == 0:
            found.append("action_s is at its bound of 0: no action takes less than its work")
        return tuple(found)


@dataclass(frozen=True)
class Clock:
    """The times of passes and messages at a place in the pipelines."""

    place: PipelinePlace
    constants: Constants
    #: the dtype of products with weights
    dtype: str
    style: Style = Style()

    def pass_time(self, work: Work) -> tuple[float, dict[MessageKind, float]]:
        """The seconds of a pass, and those of them in which it waits for messages, by kind.

        The ring of context parallelism is hidden behind attention's own products.
        """
        device, ours = self.place.device, self.constants
        wide = "fp32" if self.dtype == "fp32" else "bf16" if "bf16" in device.peak_flops else self.dtype
        core_s = work.core_flops / ((self.style.attention or ours.attention * ours.compute) * device.peak(wide))
        products = work.flops + ours.width * work.narrow_flops
        compute_s = products / (ours.compute * device.peak(self.dtype)) + core_s
        compute_s += work.traffic_bytes / (ours.memory * device.memory_bandwidth)
        tensor_s = self.message_s(work.tensor_bytes, self.place.tensor, num_messages=2)
        waits = {
            MessageKind.TENSOR: max(0.0, tensor_s - compute_s) if self.style.overlapped_tensor else tensor_s,
            MessageKind.CONTEXT: max(0.0, self.message_s(work.context_bytes, self.place.context) - core_s),
            MessageKind.EXPERTS: self.message_s(work.expert_bytes, self.place.experts),
        }
        waits = {kind: wait for kind, wait in waits.items() if wait > 0}
        return compute_s + sum(waits.values()), waits

    def message_s(self, sent_bytes: float, price: Price, num_messages: int = 1) -> float:
        """The time of messages in which each rank sends so many bytes."""
        if not sent_bytes:
            return 0.0
        return sent_bytes * price.byte_s / self.constants.links + num_messages * price.latency_s

    def memory_s(self, num_bytes: float) -> float:
        """The time to read or write a number of bytes."""
        return num_bytes / (self.constants.memory * self.place.device.memory_bandwidth)


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
        few = replace(self, microbatches=1 if self.name != "dualpipe" else 2 * self.ranks)
        return _program(few, None).placement

    @property
    def num_simulated(self) -> int:
        """The microbatches of the programs that `simulate_step` simulates, added up."""
        enough = _MORE_ROUNDS.get(self.name, _ROUNDS)
        if self.microbatches // self.ranks <= enough:
            return self.microbatches
        return (2 * enough - 1) * self.ranks + 2 * (self.microbatches % self.ranks)


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
    short = _simulated(replace(order, microbatches=(enough - 1) * ranks + rest), costs)
    longer = _simulated(replace(order, microbatches=enough * ranks + rest), costs)
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
    computed = [[event for event in events if parts(event.action)[0].op in COMPUTE] for events in timeline.events]
    return SimulatedStep(
        timeline.makespan,
        timeline.span_cost,
        tuple(sum(event.end - event.start for event in events) for events in computed),
        timeline.peak_live_bytes,
        tuple(timeline.makespan - (events[-1].end - events[0].start) for events in computed),
        tuple(any(parts(event.action)[0].op is schedule.Op.I for event in events) for events in computed),
    )


@lru_cache(_KEPT_PROGRAMS)
def _program(order: Order, costs: schedule.Costs | None) -> schedule.Program:
    """The program of an order; a searched one is made for the costs."""
    options = dict(order.options)
    if costs is not None:
        own = ("forward", "backward_input", "backward_weight")
        options |= {"transfer": costs.arrival, **{name: getattr(costs, name) for name in own}}
        share = costs.weight_memory_share
        options.setdefault("weight_memory_share", min(1.0, max(share) if isinstance(share, tuple) else share))  # type: ignore[arg-type]
    built = schedule.build(
        order.name,
        ranks=order.ranks,
        microbatches=order.microbatches,
        stages_per_rank=None if builders.default_stages(order.name) == order.stages_per_rank else order.stages_per_rank,
        **options,
    )
    return schedule.lower(schedule.early_gradients(built) if order.early_gradients else built)
