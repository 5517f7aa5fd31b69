"""The costs of a program's actions: time, bytes sent, bytes kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from penstock.schedule.actions import PLACED, Action, Op, Pair, Resource, Schedule, Step, spared
from penstock.schedule.placement import Placement
from penstock.schedule.rules import partner
from penstock.settings.declare import checked

PerStage: TypeAlias = float | Sequence[float]
PerLink: TypeAlias = float | Sequence[float]

_TIMES = (
    *("forward", "backward_input", "backward_weight", "recompute", "offload"),
    *("action", "transfer", "reduce", "step", "pair"),
)
# Sums and products of such numbers stay far from where a float overflows.
LARGEST_COST = 1e100
_OF_STAGES = ("microbatch_bytes", "kept_bytes", "weight_memory_share")
_SIZES = ("message_bytes", *_OF_STAGES)


@checked
@dataclass(frozen=True)
class Costs:
    """Times in any one unit, which is also that of the timeline, and sizes in bytes.

    The times of F, I, W and of a fused pair cover one microbatch on *all* of a rank's stages that it passes through,
    divided evenly among them, so that schedules compare at equal work; or a list gives one time for each stage of the
    model. A full backward takes `backward_input` plus `backward_weight`.

    A transfer keeps no rank busy. Reductions run one after another beside their rank's compute; the optimizer step
    waits for them.

    >>> Costs(forward=[1.0, 2.0], transfer=0.1).forward
    (1.0, 2.0)

    Raises: ValueError for a time or size that is negative, not finite or above 1e100.
    """

    #: The time of F.
    forward: PerStage = 1.0
    #: The time of I.
    backward_input: PerStage = 1.0
    #: The time of W.
    backward_weight: PerStage = 1.0
    #: The time from a send to the message's arrival; or a list with one for each rank: that of the link between the
    #: rank and the next one, the last between the last rank and the first. Two ranks have the first link alone.
    transfer: PerLink = 0.0
    #: The time of a gradient reduction.
    reduce: float = 0.0
    #: The time of the optimizer step.
    step: float = 0.0
    #: The time that every compute action takes besides, whatever it computes; a pair takes it once if `pair` is given.
    action: float = 0.0
    #: The time of a fused pair, whose stage is that of its forward; None for the sum of its two actions.
    pair: PerStage | None = None
    #: Each microbatch's factor on its compute and bytes, if microbatches differ; a pair takes the mean of its two.
    lengths: Sequence[float] = ()
    #: The bytes of a message, which add their share of `bandwidth` to its time.
    message_bytes: float = 0.0
    #: Bytes that a channel carries in a unit of time, one message after another; None if unlimited. A list has those of
    #: each link, as `transfer` has.
    bandwidth: PerLink | None = None
    #: The bytes that a rank keeps of a microbatch, or a list with those of each stage of the model.
    microbatch_bytes: PerStage = 0.0
    #: The share of them that is kept from the microbatch's I until its W; a list gives one for each stage.
    weight_memory_share: PerStage = 1.0
    #: The part of `backward_input` in which activations are recomputed, which is also the time of R; and the bytes of a
    #: microbatch that keeps them all until its I, where a forward is marked to keep them, and from an R on. None for as
    #: many as others.
    recompute: PerStage = 0.0
    kept_bytes: PerStage | None = None
    #: The time in which a microbatch's activations move to host memory, or back; a rank's go one after another.
    offload: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in (*_TIMES, *_SIZES, "lengths"):
            value = getattr(self, name)
            # Arrays have a length, too.
            if hasattr(value, "__len__"):
                object.__setattr__(self, name, value := tuple(value))
            for one in value if isinstance(value, Sequence) else () if value is None else (value,):
                check_cost(name, one, "a time" if name in _TIMES else "a number")
        if hasattr(self.bandwidth, "__len__"):
            object.__setattr__(self, "bandwidth", tuple(self.bandwidth))  # type: ignore[arg-type]
        widths = self.bandwidth if isinstance(self.bandwidth, Sequence) else (self.bandwidth,)
        for one in widths:
            if one is not None and not one >= 1 / LARGEST_COST:
                raise ValueError(
                    f"bandwidth must be at least {1 / LARGEST_COST:g} bytes in a unit of time, got {one!r}"
                )

    @property
    def totals(self) -> list[float]:
        """The times of F, I and W together, one for each stage or unit; all three are lists."""
        return [sum(own) for own in zip(self.forward, self.backward_input, self.backward_weight)]  # type: ignore[arg-type]

    @property
    def sending(self) -> PerLink:
        """The time that a message of length 1 occupies its channel, or that of each link's."""
        if isinstance(self.bandwidth, Sequence):
            return tuple(self.message_bytes / width for width in self.bandwidth)
        return self.message_bytes / self.bandwidth if self.bandwidth else 0.0

    @property
    def arrival(self) -> PerLink:
        """The time from a send to the arrival of a message of length 1 on a free channel, or that of each link's."""
        latency, sending = self.transfer, self.sending
        if not isinstance(latency, Sequence) and not isinstance(sending, Sequence):
            return latency + sending
        num = len(latency if isinstance(latency, Sequence) else sending)  # type: ignore[arg-type]
        both = (one if isinstance(one, Sequence) else (one,) * num for one in (latency, sending))
        return tuple(map(sum, zip(*both, strict=True)))

    @property
    def has_bytes(self) -> bool:
        """True if the bytes of a tape are known."""
        sizes = self.microbatch_bytes
        return any(sizes) if isinstance(sizes, Sequence) else sizes > 0

    def share_of(self, stage: int) -> float:
        """The share of a stage's tape that is left after its I: M_W / M_B of Zero Bubble Pipeline Parallelism."""
        shares = self.weight_memory_share
        return shares[stage % len(shares)] if isinstance(shares, Sequence) else shares

    def bytes_of(self, stage: int, stages_per_rank: int, keeps: bool = False) -> float:
        """The bytes of a stage's whole tape, if a microbatch passes through `stages_per_rank` stages of a rank.

        keeps: of a forward that is marked to keep all activations.
        """
        sizes = self.kept_bytes if keeps and self.kept_bytes is not None else self.microbatch_bytes
        return sizes[stage % len(sizes)] if isinstance(sizes, Sequence) else sizes / stages_per_rank


def costs_of_cut(units: Costs, cut: Sequence[range]) -> Costs:
    """Add up the costs of units to those of a cut's stages.

    >>> costs_of_cut(Costs([1, 2, 3], [1, 1, 1], [2, 2, 2]), [range(0, 2), range(2, 3)]).forward
    (3, 3)

    Raises: ValueError as `Costs` does.
    """
    names = ("forward", "backward_input", "backward_weight", "recompute", "offload", "microbatch_bytes", "kept_bytes")
    of_units = {name: value for name in names if isinstance(value := getattr(units, name), Sequence)}
    of_stages = {name: [sum(value[i] for i in members) for members in cut] for name, value in of_units.items()}
    return replace(units, **of_stages)


def check_cost(name: str, value: float, kind: str = "a time") -> None:
    """Check a time or size. Raises: ValueError, if it is not a number of at least 0 and at most `LARGEST_COST`."""
    if not 0 <= value <= LARGEST_COST:
        bound = f"at most {LARGEST_COST:g}" if LARGEST_COST < value < inf else "at least 0"
        raise ValueError(f"{name} must be {kind} of {bound}, got {value!r}")


class Durations:
    """The times of one schedule's actions.

    Raises: ValueError for a list that does not have one time for each stage of the model, or one length for each
    microbatch.
    """

    #: What the times are for.
    _placement: Placement
    #: By microbatch, its length; empty if all are alike.
    _lengths: tuple[float, ...]
    #: `_of_op[op][stage]`, the time of an action of length 1, and that of a pair by its forward's stage.
    _of_op: dict[Op, tuple[float, ...]]
    _pair: tuple[float, ...] | None
    #: The stages and microbatches of which nothing is left to recompute in the backward.
    _spared: frozenset[tuple[int, int]]
    #: The time of the optimizer step, and what each action costs besides.
    _step: float
    _action: float
    #: The time of a transfer, and what each message of length 1 costs besides; or those of each link.
    _links: tuple[PerLink, PerLink]
    #: By a send's op and stage, the receiving rank, and these two of its link.
    _channels: dict[tuple[Op, int], tuple[int, float, float]]

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        self._placement = schedule.placement
        if costs.lengths and len(costs.lengths) != schedule.num_microbatches:
            raise ValueError(f"{schedule.num_microbatches} microbatches need as many lengths, got {len(costs.lengths)}")
        for name in _OF_STAGES:
            if (size := getattr(costs, name)) is not None:
                check_stages(name, size, self._placement)
        self._lengths = tuple(costs.lengths)
        times = {
            name: per_stage(name, getattr(costs, name), self._placement)
            for name in dict.fromkeys(name for op in PLACED for name in op.times)
        }
        self._of_op = {op: tuple(map(sum, zip(*(times[name] for name in op.times)))) for op in PLACED}
        self._spared = frozenset[tuple[int, int]]().union(*map(spared, schedule.orders))
        for own, again in zip(times["backward_input"], times["recompute"]):
            if again > own:
                raise ValueError(f"recompute is a part of backward_input, and {again:g} is more than {own:g}")
        self._pair = None if costs.pair is None else per_stage("pair", costs.pair, self._placement)
        self._step = costs.step
        self._action = costs.action
        self._links, self._channels = (costs.transfer, costs.sending), {}
        for name, links in zip(("transfer", "bandwidth"), self._links, strict=True):
            if isinstance(links, Sequence) and len(links) != self._placement.num_ranks:
                raise ValueError(
                    f"{name} must be one {'time' if name == 'transfer' else 'number'}, or a list of "
                    f"{self._placement.num_ranks}: one for each rank's link to the next, the last's to the first; "
                    f"got {len(links)}"
                )

    def of(self, step: Step) -> float:
        """The time that a compute action, a pair or the optimizer step keeps a rank busy."""
        if isinstance(step, Pair):
            if self._pair is None:
                return self.of(step.forward) + self.of(step.backward)
            length = (self._length(step.forward.microbatch) + self._length(step.backward.microbatch)) / 2
            return self._pair[step.forward.stage] * length - self._not_recomputed(step.backward) + self._action
        if step.op is Op.STEP:
            return self._step
        whole = self._of_op[step.op][step.stage] * self._length(step.microbatch)
        if step.op.resource is Resource.HOST_LINK:
            return whole
        return whole - self._not_recomputed(step) + self._action if self._spared else whole + self._action

    def _not_recomputed(self, action: Action) -> float:
        """The time that a backward need not recompute, since all is kept."""
        if action.op not in (Op.B, Op.I) or (action.stage, action.microbatch) not in self._spared:
            return 0.0
        return self._of_op[Op.R][action.stage] * self._length(action.microbatch)

    def message(self, send: Action) -> tuple[int, float, float]:
        """The rank that a send's message goes to, and the times that it occupies its channel and is in flight.

        Raises: ValueError if times are given for each link, and none joins the two ranks.
        """
        key = send.op, send.stage
        if key not in self._channels:
            latency, sending = (one[self._link(send)] if isinstance(one, Sequence) else one for one in self._links)
            self._channels[key] = self._placement.rank_of(partner(send).stage), latency, sending
        to, latency_s, sending_s = self._channels[key]
        occupied = sending_s * self._length(send.microbatch)
        return to, occupied, latency_s + occupied

    def _link(self, send: Action) -> int:
        """The number of the link between the ranks of a send and of its receive."""
        placement = self._placement
        low, high = sorted(placement.rank_of(stage) for stage in (send.stage, partner(send).stage))
        if high - low == 1:
            return low
        if low == 0 and high == placement.num_ranks - 1:
            return high
        raise ValueError(f"{send} goes from rank to rank over no link; transfer must be one time for all messages")

    def _length(self, microbatch: int) -> float:
        return self._lengths[microbatch] if self._lengths else 1


def per_stage(name: str, time: PerStage, placement: Placement) -> tuple[float, ...]:
    """Give one time for each stage of each route: those given, or a rank's time divided evenly among its stages.

    Raises: ValueError for a list that does not have one time for each stage of the model.
    """
    if not isinstance(time, Sequence):
        return (time / placement.stages_per_microbatch,) * placement.num_stages
    check_stages(name, time, placement, "time")
    return tuple(time) * placement.num_routes


def check_stages(name: str, value: PerStage, placement: Placement, what: str = "number") -> None:
    """Refuse a list that does not have one number for each stage.

    Raises: ValueError naming the list.
    """
    if isinstance(value, Sequence) and len(value) != placement.stages_per_route:
        raise ValueError(
            f"{name} must have one {what} for each of {placement.stages_per_route} stages, got {len(value)}"
        )
