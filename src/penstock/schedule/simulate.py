"""Who does what when: a program and the times of its actions give a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite

from penstock.schedule.actions import RECEIVES, SENDS, Action, Op, Program, Schedule, ScheduleError, Step, parts
from penstock.schedule.rules import Rule, Rules
from penstock.schedule.timeline import Event, Timeline


@dataclass(frozen=True)
class Costs:
    """Times, all in one unit, which is also that of the timeline.

    `forward`, `backward_input` and `backward_weight` are those of one microbatch through *all* local stages of a rank,
    divided evenly among them, so that schedules compare at equal work; a full backward takes the sum of the latter two.
    `transfer` is the time from a send to the message's arrival and keeps no rank busy. A reduction runs beside its
    rank's compute, one after the other; the optimizer `step` waits for them.

    Raises: ValueError for a time that is negative or not finite.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    reduce: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isfinite(value) or value < 0:
                raise ValueError(f"{field.name} must be a time of at least 0, got {value!r}")

    def durations(self, stages_per_rank: int) -> dict[Op, float]:
        """The time of one action, for every op that takes any of a rank's own time."""
        return {
            Op.F: self.forward / stages_per_rank,
            Op.B: (self.backward_input + self.backward_weight) / stages_per_rank,
            Op.I: self.backward_input / stages_per_rank,
            Op.W: self.backward_weight / stages_per_rank,
            Op.STEP: self.step,
        }


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """The timeline of a verified program whose actions take the given times; `Costs()` by default.

    A rank goes through its program until it needs a message that was not sent yet, and goes on when it is; so each
    action is looked at once, however the ranks wait for each other.

    Raises: ScheduleError for a program that cannot end, which `verify` would have refused.
    """
    costs = costs or Costs()
    rules, schedule = Rules(program.schedule), program.schedule
    clocks = [_Clock(rules.of_rank[rank], program, rank, costs) for rank in range(program.placement.num_ranks)]
    arrivals: dict[int, float] = {}
    put_aside: dict[int, int] = {}  # by the message that is waited for, the rank that waits
    ready = list(range(len(clocks)))
    while ready:
        rank = ready.pop()
        for sent in clocks[rank].run(arrivals):
            if sent in put_aside:
                ready.append(put_aside.pop(sent))
        if (awaited := clocks[rank].awaited) is not None:
            put_aside[awaited] = rank
    for message, rank in put_aside.items():
        raise ScheduleError(f"rank {rank} waits for ever for {rules.receive_of(message)}; verify the program first")
    return Timeline.from_events(
        [clock.events for clock in clocks],
        stages_per_rank=program.placement.stages_per_rank,
        compute=_bare_compute(schedule, costs),
        title=f"{schedule.name}, {len(clocks)} ranks, {schedule.num_microbatches} microbatches, simulated",
    )


def _bare_compute(schedule: Schedule, costs: Costs) -> float:
    """The time that the busiest rank would take if it never waited."""
    placement = schedule.placement
    num_passes = max(
        sum(len(schedule.microbatches_of(stage)) for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )
    one = costs.forward + costs.backward_input + costs.backward_weight if schedule.training else costs.forward
    return num_passes * one / placement.stages_per_rank


class _Clock:
    """One rank on its way through its program; `awaited` is the message it has stopped for, if any."""

    def __init__(self, own: list[dict[int, Rule]], program: Program, rank: int, costs: Costs) -> None:
        self.own, self.steps, self.costs = own, program.ranks[rank], costs
        self.durations = costs.durations(program.placement.stages_per_rank)
        self.position = 0
        self.now = self.reduced = 0.0  # when the last action ended, and the last reduction
        self.events: list[Event] = []
        self.awaited: int | None = None

    def run(self, arrivals: dict[int, float]) -> Iterator[int]:
        """Go on to the end, or to a message that is not in `arrivals`; add and yield the messages that are sent."""
        self.awaited = None
        while self.position < len(self.steps):
            step = self.steps[self.position]
            if isinstance(step, Action) and step.op in SENDS:
                message = self._message(step)
                assert message is not None
                arrivals[message] = self.now + self.costs.transfer
                yield message
            elif isinstance(step, Action) and step.op is Op.REDUCE_GRAD:
                start = max(self.now, self.reduced)
                self.reduced = start + self.costs.reduce
                self.events.append(Event(step, start, self.reduced))
            elif not (isinstance(step, Action) and step.op in RECEIVES) and not self._work(step, arrivals):
                return
            self.position += 1

    def _work(self, step: Step, arrivals: dict[int, float]) -> bool:
        """Carry out compute or the optimizer step; False, if a message for it is not there yet."""
        start, duration = self.now, 0
        for action in parts(step):
            message = self._message(action)
            if message is not None:
                if message not in arrivals:
                    self.awaited = message
                    return False
                start = max(start, arrivals[message])
            elif action.op is Op.STEP:
                start = max(start, self.reduced)
            duration += self.durations[action.op]
        self.now = start + duration
        self.events.append(Event(step, start, self.now))
        return True

    def _message(self, action: Action) -> int | None:
        """What a transfer carries or a compute action waits for."""
        message = self.own[action.op][action.stage].message
        return None if message is None else message + action.microbatch
