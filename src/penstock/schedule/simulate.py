"""Who does what when: a program and the times of its actions give a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum

from penstock.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Program, ScheduleError, Step, parts
from penstock.schedule.costs import Costs, Durations
from penstock.schedule.rules import Rule, Rules
from penstock.schedule.timeline import Event, Timeline


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """The timeline of a verified program whose actions take the given times; `Costs()` by default.

    A rank goes through its program until it needs a message that was not sent yet, and goes on when it is; so each
    action is looked at once, however the ranks wait for each other.

    Raises: ScheduleError for a program that cannot end, which `verify` would have refused, and ValueError for costs
    that are not those of its stages and microbatches.
    """
    costs = costs or Costs()
    rules, schedule = Rules(program.schedule), program.schedule
    durations = Durations(costs, schedule)
    clocks = [_Clock(rules.of_rank[rank], program, rank, durations, costs.reduce) for rank in range(len(program.ranks))]
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
        stages_per_rank=program.placement.stages_per_microbatch,
        compute=max(clock.compute for clock in clocks),
        title=f"{schedule.name}, {len(clocks)} ranks, {schedule.num_microbatches} microbatches, simulated",
        memory=costs.memory,
    )


class _Clock:
    """One rank on its way through its program; `awaited` is the message it has stopped for, if any."""

    def __init__(
        self, own: list[dict[int, Rule]], program: Program, rank: int, durations: Durations, reduce: float
    ) -> None:
        self.own, self.steps = own, program.ranks[rank]
        self.durations, self.reduce = durations, reduce
        self.position = 0
        self.now = self.reduced = 0.0  # when the last action ended, and the last reduction
        self.events: list[Event] = []
        self.awaited: int | None = None

    @property
    def compute(self) -> float:
        """The time that the rank would take if it never waited."""
        return fsum(self.durations.of(step) for step in self.steps if parts(step)[0].op in COMPUTE)

    def run(self, arrivals: dict[int, float]) -> Iterator[int]:
        """Go on to the end, or to a message that is not in `arrivals`; add and yield the messages that are sent."""
        self.awaited = None
        while self.position < len(self.steps):
            step = self.steps[self.position]
            if isinstance(step, Action) and step.op in SENDS:
                message = self._message(step)
                assert message is not None
                arrivals[message] = self.now + self.durations.transfer(step.microbatch)
                yield message
            elif isinstance(step, Action) and step.op is Op.REDUCE_GRAD:
                start = max(self.now, self.reduced)
                self.reduced = start + self.reduce
                self.events.append(Event(step, start, self.reduced))
            elif not (isinstance(step, Action) and step.op in RECEIVES) and not self._work(step, arrivals):
                return
            self.position += 1

    def _work(self, step: Step, arrivals: dict[int, float]) -> bool:
        """Carry out compute or the optimizer step; False, if a message for it is not there yet."""
        start = self.now
        for action in parts(step):
            message = self._message(action)
            if message is not None:
                if message not in arrivals:
                    self.awaited = message
                    return False
                start = max(start, arrivals[message])
            elif action.op is Op.STEP:
                start = max(start, self.reduced)
        self.now = start + self.durations.of(step)
        self.events.append(Event(step, start, self.now))
        return True

    def _message(self, action: Action) -> int | None:
        """What a transfer carries or a compute action waits for."""
        message = self.own[action.op][action.stage].message
        return None if message is None else message + action.microbatch
