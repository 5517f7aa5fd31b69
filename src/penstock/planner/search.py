"""The search: every layout that the devices and the model allow, pruned by memory and bounds, the rest simulated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from penstock.planner.cluster import Cluster
from penstock.planner.estimate import Candidate, Estimate, Workload, estimate, state_bytes, unit_size
from penstock.planner.explain import well_known
from penstock.planner.footprint import Footprint, footprints
from penstock.planner.links import wiring
from penstock.planner.model_costs import RecomputedPart, unit_costs
from penstock.planner.shape import EXPERTS, GRADIENT_BYTES
from penstock.planner.times import Clock, Constants
from penstock.settings import Layout
from penstock.settings.declare import checked


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """The settings, by their dotted names, with which a run trains in this layout and order."""
    layout = candidate.layout
    found: dict[str, Any] = {f"parallel.{axis}": size for axis, size in layout.sizes.items()}
    found |= {
        "parallel.ep": layout.ep,
        "parallel.order": layout.order,
        "schedule.name": candidate.schedule,
        "train.num_microbatches": candidate.num_microbatches,
        "train.recompute": "full" if candidate.recompute is RecomputedPart.FULL else "none",
        "optimizer.zero": candidate.zero > 0,
    }
    if layout.pp > 1 and candidate.cut is not None:
        found["schedule.cut"] = list(candidate.cut)
    if candidate.stages_per_rank > 1:
        found["schedule.stages_per_rank"] = candidate.stages_per_rank
    live = dict(candidate.options).get("max_live_microbatches")
    if live is not None:
        found["schedule.max_live_microbatches"] = live
    return found


NUM_BEST = 10
"""Layouts of a plan."""


class NothingFits(ValueError):
    """No layout of the devices can train the model; the message says what would be needed."""


# A figure that no simulation of the layout gave is an estimate: what it calls this much too big is not simulated.
_MARGIN = 1.05
# Actions to simulate in a search of usual effort, some twenty seconds of one core, and in one simulation.
_NUM_ACTIONS = 500_000
_NUM_ACTIONS_OF_ONE = 60_000
_MICROBATCHES = (1, 2, 4, 8)
_ALONE = Footprint("1f1b", 1)  # of one rank
_LEAST_TOKENS = 1024  # of a sequence on a context-parallel rank
_MOST_RANKS = 512  # of one pipeline
_SEARCHED_RANKS, _SEARCHED_MICROBATCHES = 16, 64  # up to which `auto` takes seconds
_EFFORT = 0.1  # of `auto`, whose first orders are nearly its best


@dataclass(frozen=True)
class Bounded:
    """A candidate with what is known before it is simulated: its expected step, and a bound that no order beats."""

    candidate: Candidate
    expected_s: float
    bound_s: float


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    `best` are the ten fastest that fit, `tried` all that were simulated. `left_out` counts candidates by the reason for
    which they were not; `known` says of well-known layouts why they are not the first.
    """

    workload: Workload
    cluster: Cluster
    constants: Constants
    best: tuple[Estimate, ...]
    tried: tuple[Estimate, ...]
    left_out: dict[str, int]
    known: tuple[tuple[str, str], ...] = ()


@checked
def plan(
    workload: Workload,
    cluster: Cluster,
    constants: Constants | None = None,
    *,
    num_best: int = NUM_BEST,
    effort: float = 1.0,
) -> Plan:
    """Find the fastest layouts and schedules; the same arguments always give the same plan.

    effort: how much is simulated; 1 is some twenty seconds of one core where most layouts fit, 4 four times that.

    Raises: NothingFits with what would be needed; ValueError for a batch that no layout can share, or such an effort.
    """
    if not 0 < effort < math.inf:
        raise ValueError(f"effort must be a positive number, not {effort}")
    constants = constants or Constants()
    found = _Search(workload, cluster, constants, effort).run(num_best)
    return replace(found, known=well_known(workload, cluster, constants, found.best[0]))


def layouts(workload: Workload, cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts of all devices that the model and the batch can be shared by."""
    shape, devices = workload.shape, cluster.num_devices
    num_experts = (EXPERTS in shape.pattern and shape.num_experts) or 1
    for tp in _divisors(devices):
        key_heads = max(shape.num_kv_heads, tp) % min(shape.num_kv_heads, tp) == 0
        can_share = shape.num_heads % tp == 0 and shape.intermediate_size % tp == 0 and key_heads
        if tp > cluster.smallest_host or not can_share:
            continue
        for pp in _divisors(devices // tp):
            if pp > min(_MOST_RANKS, len(shape.pattern)):
                continue
            for cp in _divisors(devices // tp // pp):
                dp = devices // (tp * pp * cp)
                short = cp > 1 and workload.seq_len // cp < _LEAST_TOKENS
                if short or workload.num_sequences % dp or cp & (cp - 1):
                    continue
                for ep in _divisors(math.gcd(dp * cp, num_experts)):
                    if ep & (ep - 1) == 0:
                        yield Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order="pp-dp-cp-tp")


@lru_cache(4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


@dataclass
class _Search:
    """One search: makes candidates, bounds them, and simulates the most promising."""

    #: the model and the batch
    workload: Workload
    cluster: Cluster
    constants: Constants
    effort: float
    #: the schedules, by stages on each rank
    footprints: tuple[Footprint, ...] = field(default_factory=footprints)
    #: reason -> the number of candidates that were left out for it
    left_out: Counter[str] = field(default_factory=Counter)
    #: the least bytes that any candidate is expected to need, and that candidate; None before the first
    least: tuple[float, Candidate] | None = None
    #: what was simulated
    tried: list[Estimate] = field(default_factory=list)

    def run(self, num_best: int) -> Plan:
        bounded = sorted(self._bounded(), key=lambda one: (one.expected_s, str(one.candidate)))
        best = self._simulated(bounded, num_best)
        if not best:
            raise NothingFits(self._needed())
        best = self._with_searched(best, num_best)
        return Plan(self.workload, self.cluster, self.constants, tuple(best), tuple(self.tried), dict(self.left_out))

    def _bounded(self) -> Iterator[Bounded]:
        found = False
        for layout in layouts(self.workload, self.cluster):
            found = True
            for recompute in (RecomputedPart.NONE, RecomputedPart.FULL):
                for zero in (0, 1) if layout.dp * layout.cp > 1 else (0,):
                    yield from self._of_layout(layout, recompute, zero)
        if not found:
            workload, shape = self.workload, self.workload.shape
            raise NothingFits(
                f"no layout of {self.cluster.num_devices} devices can share {workload.num_sequences} sequences of a "
                f"step and {len(shape.pattern)} blocks of {shape.num_heads} heads: some product of pp, tp and cp must "
                "leave a number of data-parallel ranks that divides the sequences"
            )

    def _of_layout(self, layout: Layout, recompute: RecomputedPart, zero: int) -> Iterator[Bounded]:
        workload, share = self.workload, self.workload.num_sequences // layout.dp
        for microbatch in _MICROBATCHES:
            if share % microbatch or (microbatch > 1 and layout.cp > 1):
                continue
            base = Candidate(layout, "1f1b", 1, microbatch, share // microbatch, zero, recompute)
            rank = _RankCosts.of(workload, base, self.cluster, self.constants)
            for footprint in self.footprints if layout.pp > 1 else [_ALONE]:
                # Fused pairs hide experts' messages; without experts on other ranks they gain nothing.
                if footprint.pairs and layout.ep == 1:
                    continue
                candidate = replace(base, schedule=footprint.schedule, stages_per_rank=footprint.stages)
                bounded = self._one(candidate, footprint, rank)
                if bounded is not None:
                    yield bounded

    def _one(self, candidate: Candidate, footprint: Footprint, rank: _RankCosts) -> Bounded | None:
        """Bound one candidate; None, and counted, if it is impossible or too big."""
        ranks, stages, num = candidate.layout.pp, candidate.stages_per_rank, candidate.num_microbatches
        if stages * ranks > len(self.workload.shape.pattern) + 2:
            return None
        # The fullest rank keeps at least so much of the mean; the estimate's error is the margin's business.
        needed = rank.fullness * (rank.state_bytes + footprint.live(ranks, num) * rank.kept_bytes)
        if self.least is None or needed < self.least[0]:
            self.least = needed, candidate
        if needed > _MARGIN * self.cluster.memory_bytes:
            self.left_out["too big before it is simulated"] += 1
            return None
        actions_s = self.constants.action_s * 2 * stages
        bound_s = num * (rank.microbatch_s + actions_s) + rank.after_s
        expected_s = bound_s + footprint.bubble(ranks) * (rank.microbatch_s + actions_s)
        # Each link carries a message of each microbatch and stage, one after another, and gradients their own.
        links_s = max(num * stages * rank.message_s, rank.reduce_s)
        bound_s, expected_s = max(bound_s, links_s), max(expected_s, links_s)
        return Bounded(candidate, expected_s, bound_s)

    def _simulated(self, bounded: Sequence[Bounded], num_best: int) -> list[Estimate]:
        """Simulate in order of the expected step until none can be among the best, or the actions are spent."""
        best: list[Estimate] = []
        num_left = round(self.effort * _NUM_ACTIONS)
        for one in bounded:
            worst = best[num_best - 1].step_s if len(best) >= num_best else math.inf
            # The actions that are simulated, transfers included.
            candidate = one.candidate
            size = 4 * candidate.layout.pp * candidate.stages_per_rank * candidate.order.num_simulated
            if one.bound_s > worst:
                self.left_out["no order can be among the best"] += 1
            elif num_left <= 0 or size > _NUM_ACTIONS_OF_ONE:
                self.left_out["expected to be slower, not simulated"] += 1
            else:
                num_left -= size
                if (found := self._estimate(one.candidate)) is not None:
                    best = sorted([*best, found], key=lambda e: (e.step_s, str(e.candidate)))[: num_best + 1]
        return best[:num_best]

    def _estimate(self, candidate: Candidate) -> Estimate | None:
        """Simulate a candidate; None if it cannot be built or does not fit."""
        try:
            simulated = estimate(self.workload, candidate, self.cluster, self.constants)
        except ValueError:
            self.left_out["not possible for the schedule"] += 1
            return None
        self.tried.append(simulated)
        if simulated.fits:
            return simulated
        self.left_out["too big when simulated"] += 1
        return None

    def _with_searched(self, best: list[Estimate], num_best: int) -> list[Estimate]:
        """Add the orders that `auto` finds for the fastest layouts, where they are small enough to search."""
        estimates = list(best)
        seen: set[tuple[Layout, int, RecomputedPart]] = set()
        for one in best[:3]:
            candidate, ranks = one.candidate, one.candidate.layout.pp
            key = candidate.layout, candidate.microbatch, candidate.recompute
            small = 1 < ranks <= _SEARCHED_RANKS and candidate.num_microbatches <= _SEARCHED_MICROBATCHES
            if key in seen or not small:
                continue
            seen.add(key)
            room = one.memory.device - (one.memory.total - one.memory.tapes)
            rank = _RankCosts.of(self.workload, candidate, self.cluster, self.constants)
            live = math.floor(min(2 * ranks, room / (_MARGIN * rank.kept_bytes)))
            if live >= 1:
                options = (("effort", _EFFORT), ("max_live_microbatches", float(live)))
                searched = replace(candidate, schedule="auto", stages_per_rank=1, options=options, cut=None)
                estimates += filter(None, [self._estimate(searched)])
        return sorted(estimates, key=lambda e: (e.step_s, str(e.candidate)))[:num_best]

    def _needed(self) -> str:
        """The need of the smallest layout, when nothing fits."""
        assert self.least is not None
        needed, candidate = self.least
        if self.tried:
            smallest = min(self.tried, key=lambda one: one.peak_bytes)
            needed, candidate = smallest.peak_bytes, smallest.candidate
        have = max(kind.device.memory_bytes for kind in self.cluster.kinds)
        return (
            f"no layout of {self.cluster.num_devices} devices fits: the least that one needs is {needed / 2**30:,.1f} "
            f"GiB on its fullest rank ({candidate}), and the largest device has {have / 2**30:,.1f} GiB; devices of "
            "that size would do, or more of these"
        )


@dataclass(frozen=True)
class _RankCosts:
    """The mean rank of a layout: seconds of a microbatch and after all of them, bytes of state and of a microbatch.

    `message_s` is that of the pipelines' slowest link, and `reduce_s` that of all gradients.
    """

    microbatch_s: float
    after_s: float
    message_s: float
    reduce_s: float
    state_bytes: float
    kept_bytes: float
    #: the most that a rank has of a mean rank's layers, over what its device has of a mean device's memory
    fullness: float

    @classmethod
    def of(cls, workload: Workload, candidate: Candidate, cluster: Cluster, constants: Constants) -> _RankCosts:
        layout, zero = candidate.layout, candidate.zero
        size = unit_size(workload, candidate)
        ranks, wires = layout.pp, wiring(cluster, layout)
        places = wires.places
        clocks = {place: Clock(place, constants, workload.dtype) for place in dict.fromkeys(places)}
        units = unit_costs(workload.shape, size)
        numbers = Counter(map(id, units))
        once = {id(unit): unit for unit in units}
        kept = dense = experts = 0.0
        whole_s = dict.fromkeys(clocks, 0.0)
        for key, unit in once.items():
            passes = (unit.forward, unit.backward_input, unit.backward_weight)
            for place, clock in clocks.items():
                whole_s[place] += numbers[key] * sum(clock.pass_time(work)[0] for work in passes)
            kept += numbers[key] * unit.kept_bytes / ranks
            dense += numbers[key] * unit.parameters / ranks
            experts += numbers[key] * unit.expert_parameters / ranks
        # Each rank has the share of the layers that makes all of them as fast.
        seconds = 1 / sum(1 / whole_s[place] for place in places)
        owned = dense / (candidate.copies if zero else 1) + experts / (candidate.expert_copies if zero else 1)
        least_s = min(clock.memory_s(workload.optimizer_bytes * owned) for clock in clocks.values())
        message = workload.shape.stream_bytes(size.tokens, workload.element_bytes) / layout.tp
        message_s = message * max((edge.byte_s for edge in wires.edges[:-1]), default=0.0) / constants.links
        sent = (1 if zero else 2) * GRADIENT_BYTES * dense * (1 - 1 / candidate.copies)
        reduce_s = min(clock.message_s(sent, clock.place.gradients) for clock in clocks.values())
        shares = (ranks * seconds / whole_s[place] / place.device.memory_bytes for place in places)
        fullness = cluster.memory_bytes * max(shares)
        state = state_bytes(workload, candidate, dense, experts).total
        return cls(seconds, least_s, message_s, reduce_s, state, kept, fullness)
