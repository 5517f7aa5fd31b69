"""The estimate of one layout: its step's time and what it is made of, and the memory of its fullest rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from penstock import schedule
from penstock.planner.cluster import Cluster
from penstock.planner.links import wiring
from penstock.planner.model_costs import MessageKind, RecomputedPart, Style, UnitCosts, UnitSize, unit_costs
from penstock.planner.shape import GRADIENT_BYTES, ModelShape, value_bytes
from penstock.planner.times import Clock, Constants, Order, SimulatedStep, simulate_step
from penstock.schedule.placement import Placement
from penstock.schedule.rehearsal import communicator_bytes
from penstock.schedule.rules import channels_of
from penstock.settings import Layout


@dataclass(frozen=True)
class RankMemory:
    parameters: float
    gradients: float
    optimizer: float
    tapes: float = 0.0
    #: the largest unit's intermediate results
    transient: float = 0.0
    reserved: float = 0.0
    #: that its device has
    device: float = math.inf

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.tapes + self.transient + self.reserved


@dataclass(frozen=True)
class StageTransient:
    """The needs of a stage besides its tapes while one of its units runs.

    `grown_bytes`: what a tape gains in I where backward computes again what it keeps for W. By then the head, whose
    needs are the greatest, is done, so only `late_bytes` are needed besides; before, `bytes`.
    """

    bytes: float
    late_bytes: float
    grown_bytes: float

    @classmethod
    def of(cls, units: Sequence[UnitCosts], head: UnitCosts) -> StageTransient:
        grown = sum(unit.weight_bytes - unit.kept_bytes for unit in units)
        late = (unit.transient_bytes - max(0.0, unit.weight_bytes - unit.kept_bytes) for unit in units if unit != head)
        return cls(max(unit.transient_bytes for unit in units), max(late, default=0.0), max(0.0, grown))

    def most_beside(self, tapes: float, splits: bool) -> tuple[float, float]:
        """The tapes and the bytes besides at the moment that needs the most; `tapes` are the most at any time."""
        if not splits:
            return tapes, self.bytes
        return max((tapes, self.late_bytes), (tapes - self.grown_bytes, self.bytes), key=sum)


# Bytes of a parameter's two moments. With 16 bits there is an fp32 master too.
_MOMENTS, _MASTER = 8, 4
# What a device's context and its libraries take; nothing on a CPU, whose memory is the process's.
CONTEXT_BYTES = 2**30


@dataclass(frozen=True)
class Workload:
    """A model that is trained on batches of equal sequences."""

    shape: ModelShape
    seq_len: int
    num_sequences: int
    #: of products
    dtype: str = "bf16"
    #: True if parameters are in fp32 and cast for each product
    autocast: bool = False
    #: of tokens with a label; the others have no logits
    label_share: float = 1.0

    @property
    def num_tokens(self) -> int:
        """The tokens of a step."""
        return self.seq_len * self.num_sequences

    @property
    def element_bytes(self) -> int:
        """The bytes of an activation, and of a parameter in a product."""
        return value_bytes(self.dtype)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of a parameter, which low-precision products round from 16 bits."""
        return 4 if self.autocast else self.element_bytes

    @property
    def optimizer_bytes(self) -> int:
        """The bytes of a parameter's state in the optimizer."""
        return _MOMENTS + (0 if self.parameter_bytes == 4 else _MASTER)


@dataclass(frozen=True)
class Candidate:
    """One way to train it: everything that the search varies.

    `zero`: what data-parallel ranks share: 0 nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters
    too. The engine has 0 and 1; published runs use all.
    """

    layout: Layout
    schedule: str
    stages_per_rank: int
    microbatch: int
    num_microbatches: int
    zero: int = 0
    recompute: RecomputedPart = RecomputedPart.NONE
    options: tuple[tuple[str, object], ...] = ()
    #: the number of units of each stage; by default the cut whose slowest rank is fastest
    cut: tuple[int, ...] | None = None
    style: Style = Style()

    @property
    def copies(self) -> int:
        """The ranks with the same parameters."""
        return self.layout.dp * self.layout.cp

    @property
    def expert_copies(self) -> int:
        """The ranks with the same routed experts."""
        folded = self.style.folded_ep
        return max(1, self.copies * self.layout.tp // folded) if folded else self.copies // self.layout.ep

    @property
    def order(self) -> Order:
        return Order(
            self.schedule,
            self.layout.pp,
            self.num_microbatches,
            self.stages_per_rank,
            self.options,
            # Stages that launch collectives keep their backwards whole, as the engine does.
            self.style.early_gradients and not self.layout.shares_layers,
        )

    def __str__(self) -> str:
        ours = self.layout
        sizes = " ".join(f"{axis}{size}" for axis, size in (*ours.sizes.items(), ("ep", ours.ep)) if size > 1)
        stages = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        zero = f" zero{self.zero}" if self.zero else ""
        again = "" if self.recompute is RecomputedPart.NONE else f" recompute {self.recompute.value}"
        return (
            f"{sizes or 'one device'} {self.schedule}{stages} mb{self.microbatch}x{self.num_microbatches}{zero}{again}"
        )


@dataclass(frozen=True)
class Estimate:
    """The step of a candidate.

    `parts_s`: the step on its busiest rank by what the time goes to: computing, waiting for each kind of message, the
    pipeline's bubble, gradients and optimizer; they add up to `step_s`.
    """

    candidate: Candidate
    step_s: float
    tokens_s_device: float
    mfu: float
    bubble: float
    memory: RankMemory
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """The bytes of the fullest rank."""
        return self.memory.total

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory.device


@dataclass(frozen=True)
class StageCosts:
    """The stages of a candidate: seconds and bytes of each, and the waits that its passes contain."""

    costs: schedule.Costs
    #: the rank's seconds in waits of one microbatch through a stage, by kind
    waits_s: tuple[dict[MessageKind, float], ...]
    after_s: float
    units: tuple[tuple[UnitCosts, ...], ...]


def estimate(workload: Workload, candidate: Candidate, cluster: Cluster, constants: Constants) -> Estimate:
    """Estimate a candidate's step by simulating its program; the estimate's candidate has its cut written out.

    Raises: ValueError for a schedule that cannot be built, or a cut that cannot be.
    """
    stages = stage_costs(workload, candidate, cluster, constants)
    step = simulate_step(candidate.order, stages.costs)
    step_s = step.makespan
    memory = fullest(workload, candidate, cluster, stages, step)
    tokens = workload.num_tokens / (step_s * candidate.layout.world_size)
    flops = tokens * workload.shape.flops_per_token(workload.seq_len, workload.label_share)
    return Estimate(
        replace(candidate, cut=tuple(map(len, stages.units))),
        step_s,
        tokens,
        flops / cluster.peak(workload.dtype),
        step.bubble,
        memory,
        _parts(candidate, stages, step),
    )


def stage_costs(workload: Workload, candidate: Candidate, cluster: Cluster, constants: Constants) -> StageCosts:
    """The costs of a candidate's stages, for `schedule.simulate`."""
    layout, style = candidate.layout, candidate.style
    size = unit_size(workload, candidate)
    units = unit_costs(workload.shape, size)
    wires, placement = wiring(cluster, layout, style.folded_ep), candidate.order.placement
    clocks = {place: Clock(place, constants, workload.dtype, style) for place in dict.fromkeys(wires.places)}
    once = {id(unit): unit for unit in units}
    timed = {
        place: {key: _PassTimes.of(unit, clock, candidate, workload) for key, unit in once.items()}
        for place, clock in clocks.items()
    }
    total_s = [sum(timed[place][id(unit)].total_s for unit in units) for place in wires.places]
    own_s = timed[wires.places[total_s.index(min(total_s))]]
    cut = stages_of(candidate, [own_s[id(unit)].total_s for unit in units], [min(total_s) / one for one in total_s])
    members = tuple(tuple(units[i] for i in stage) for stage in cut)
    # Copies of a stage on several routes go by the slowest of their places.
    ranks = [max(placement.copies_of(stage), key=lambda rank: total_s[rank]) for stage in range(len(cut))]
    times = [[timed[wires.places[rank]][id(unit)] for unit in stage] for rank, stage in zip(ranks, members)]
    kept = tuple(sum(unit.kept_bytes for unit in stage) for stage in members)
    weights = tuple(sum(unit.weight_bytes for unit in stage) for stage in members)
    largest = max(sum(unit.parameters for unit in stage) for stage in members)
    most_experts = max(sum(unit.expert_parameters for unit in stage) for stage in members)
    gradients_s = [_gradients(workload, candidate, clock, (largest, most_experts)) for clock in clocks.values()]
    reduce_s, after_s = map(max, zip(*gradients_s))
    shared = layout.tp if style.sequence_parallel else 1
    costs = schedule.Costs(
        forward=tuple(sum(t.forward_s for t in stage) for stage in times),
        backward_input=tuple(sum(t.input_s for t in stage) for stage in times),
        backward_weight=tuple(sum(t.weight_s for t in stage) for stage in times),
        # In published runs it is that of each unit, whose kernels are launched one by one.
        action=constants.action_s * (1 if style.own_engine else len(units) / len(cut)),
        transfer=tuple(edge.latency_s for edge in wires.edges) if layout.pp > 1 else 0.0,
        message_bytes=workload.shape.stream_bytes(size.tokens, workload.element_bytes) / shared,
        bandwidth=tuple(constants.links / edge.byte_s for edge in wires.edges) if layout.pp > 1 else None,
        reduce=reduce_s,
        step=after_s,
        microbatch_bytes=kept,
        weight_memory_share=tuple(part / whole if whole else 0.0 for part, whole in zip(weights, kept)),
    )
    waits = tuple(
        {
            kind: sum(t.waits_s.get(kind, 0.0) for t in stage)
            for kind in MessageKind
            if any(kind in t.waits_s for t in stage)
        }
        for stage in times
    )
    return StageCosts(costs, waits, after_s, members)


def unit_size(workload: Workload, candidate: Candidate) -> UnitSize:
    """The size of a candidate's units on one rank."""
    layout, style = candidate.layout, candidate.style
    if workload.dtype not in ("fp8", "fp4"):
        style = replace(style, fused_casts=True)
    return UnitSize(
        workload.seq_len,
        candidate.microbatch,
        layout.tp,
        layout.cp,
        style.folded_ep or layout.ep,
        candidate.recompute,
        style,
        workload.element_bytes,
        workload.label_share,
    )


def _gathered_bytes(workload: Workload, candidate: Candidate, stage: Sequence[UnitCosts]) -> float:
    """The bytes that a stage's ranks gather of what they share while they compute, as FSDP2 does.

    Embedding and head are gathered for all of forward and backward, and of the blocks, of an attention and an MLP each,
    one at a time. In a pipeline all parameters stay gathered, and gradients whole and in fp32, for all microbatches.
    """
    if candidate.zero < 3:
        return 0.0
    sizes = [unit.parameters for unit in stage]
    if candidate.layout.pp > 1:
        return (workload.element_bytes + GRADIENT_BYTES) * sum(sizes)
    return workload.element_bytes * (sizes[0] + sum(sizes[-3:]))


@dataclass(frozen=True)
class _PassTimes:
    """The seconds of a unit's passes, and its waits in all of them together."""

    forward_s: float
    input_s: float
    weight_s: float
    waits_s: dict[MessageKind, float]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    @classmethod
    def of(cls, unit: UnitCosts, clock: Clock, candidate: Candidate, workload: Workload) -> _PassTimes:
        passes = [clock.pass_time(work) for work in (unit.forward, unit.backward_input, unit.backward_weight)]
        forward, inputs, weights = (seconds for seconds, _ in passes)
        kinds = dict.fromkeys(kind for _, waits_of in passes for kind in waits_of)
        waits = {kind: sum(waits_of.get(kind, 0.0) for _, waits_of in passes) for kind in kinds}
        if candidate.zero == 3:
            # Parameters are gathered before each pass and gradients scattered after it, while another unit computes.
            size, copies = workload.parameter_bytes * unit.parameters, candidate.copies
            gathered = clock.message_s(size * (copies - 1) / copies, clock.place.gradients)
            more = max(0.0, gathered - forward), max(0.0, 2 * gathered - inputs - weights)
            forward, inputs = forward + more[0], inputs + more[1]
            waits[MessageKind.GRADIENTS] = sum(more)
        return cls(forward, inputs, weights, waits)


def stages_of(candidate: Candidate, times: Sequence[float], speeds: Sequence[float]) -> tuple[range, ...]:
    """The units of each stage: by hand, or the cut whose slowest rank is fastest.

    times: of the units on the fastest rank; speeds: of the ranks, 1 for the fastest.
    """
    placement = candidate.order.placement
    if candidate.cut is not None:
        return schedule.check_cut(candidate.cut, len(times), placement.stages_per_route)
    longest = max(times)
    differ = tuple(speeds) if min(speeds) < 1 else ()
    return _cut(tuple(round(1e4 * time / longest) for time in times), placement, differ)


@lru_cache(512)
def _cut(times: tuple[int, ...], placement: schedule.Placement, speeds: tuple[float, ...]) -> tuple[range, ...]:
    if not speeds:
        return schedule.balanced_cut(times, placement)
    # Where ranks differ, each of their stages is made as fast as the others.
    of_stages = [min(speeds[rank] for rank in placement.copies_of(i)) for i in range(placement.stages_per_route)]
    apart = schedule.Placement(schedule.PlacementKind.LOOP, len(of_stages))
    return schedule.balanced_cut(times, apart, of_stages)


def _gradients(
    workload: Workload, candidate: Candidate, clock: Clock, largest: tuple[float, float]
) -> tuple[float, float]:
    """The seconds of a stage's gradient reduction, and of the optimizer step of a rank.

    `largest`: the most parameters of a stage, outside its routed experts and in them.
    """
    zero, per_rank = candidate.zero, candidate.stages_per_rank
    copies = candidate.copies, candidate.expert_copies
    prices = clock.place.gradients, clock.place.expert_gradients

    def sent_s(size: int) -> float:
        groups = zip(largest, copies, prices, strict=True)
        return sum(clock.message_s(size * count * (ranks - 1) / ranks, price) for count, ranks, price in groups)

    # An all-reduce scatters and gathers; ZeRO's gradients are only scattered.
    reduce_s = 0.0 if zero == 3 else sent_s(GRADIENT_BYTES) * (2 if zero == 0 else 1)
    owned = sum(count / (ranks if zero else 1) for count, ranks in zip(largest, copies, strict=True))
    traffic = 2 * workload.optimizer_bytes + GRADIENT_BYTES + workload.parameter_bytes
    step_s = clock.memory_s(per_rank * owned * traffic)
    return reduce_s, step_s + (per_rank * sent_s(workload.parameter_bytes) if zero in (1, 2) else 0.0)


def state_bytes(workload: Workload, candidate: Candidate, dense: float, experts: float) -> RankMemory:
    """The bytes of the parameters, gradients and optimizer state of a rank with this number of parameters."""
    style = candidate.style

    def shared(size: float, least: int) -> float:
        if candidate.zero < least:
            return size * (dense + experts)
        return size * (dense / candidate.copies + experts / candidate.expert_copies)

    return RankMemory(
        shared(style.parameter_bytes or workload.parameter_bytes, 3),
        shared(style.gradient_bytes or GRADIENT_BYTES, 2),
        shared(workload.optimizer_bytes, 1),
    )


@lru_cache
def _num_links(placement: Placement) -> Counter[int]:
    """The links of each rank with its neighbours."""
    return Counter(rank for channel in channels_of(placement) for rank in (channel.source, channel.destination))


def fullest(
    workload: Workload, candidate: Candidate, cluster: Cluster, stages: StageCosts, step: SimulatedStep
) -> RankMemory:
    """The memory of the rank that needs the most of its device's."""
    placement, head, memories = candidate.order.placement, stages.units[-1][-1], []
    places = wiring(cluster, candidate.layout, candidate.style.folded_ep).places
    num_groups, num_links = candidate.layout.num_device_groups, _num_links(placement)
    for rank, (tapes, splits) in enumerate(zip(step.peak_bytes, step.splits, strict=True)):
        local = [stages.units[stage % len(stages.units)] for stage in placement.stages_of(rank)]
        dense = sum(sum(unit.parameters for unit in units) for units in local)
        experts = sum(sum(unit.expert_parameters for unit in units) for units in local)
        state = state_bytes(workload, candidate, dense, experts)
        kept, transient = max((StageTransient.of(units, head).most_beside(tapes, splits) for units in local), key=sum)
        transient += sum(_gathered_bytes(workload, candidate, units) for units in local)
        device = places[rank].device
        is_gpu = device.memory_bandwidth > 1e12
        reserved = CONTEXT_BYTES + communicator_bytes(num_links[rank], num_groups) if is_gpu else 0.0
        memories.append(replace(state, tapes=kept, transient=transient, reserved=reserved, device=device.memory_bytes))
    return max(memories, key=lambda memory: memory.total / memory.device)


def _parts(candidate: Candidate, stages: StageCosts, step: SimulatedStep) -> dict[str, float]:
    busy, placement = max(step.busy), candidate.order.placement
    waits: dict[str, float] = {}
    for stage in placement.stages_of(step.busy.index(busy)):
        for kind, wait in stages.waits_s[stage % len(stages.waits_s)].items():
            waits[kind.value] = waits.get(kind.value, 0.0) + wait * candidate.num_microbatches / placement.num_routes
    bubble = max(0.0, step.makespan - busy - stages.after_s)
    rest = step.makespan - busy - bubble
    return {"compute": busy - sum(waits.values()), **waits, "bubble": bubble, "gradients and optimizer": rest}
