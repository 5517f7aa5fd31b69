"""Simulation: a program and the times of its actions give a timeline, and the path that makes it so long."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum

from penstock.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Program, ScheduleError, Step, parts
from penstock.schedule.costs import Costs, Durations
from penstock.schedule.rules import Rule, Rules, partner
from penstock.schedule.timeline import Event, Timeline


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Compute the timeline of a verified program whose actions take the given times; `Costs()` by default.

    A rank goes through its program until it needs a message that was not sent yet, and goes on once it is. So each
    action is looked at once, however the ranks wait for each other.

    >>> from penstock.schedule import build, lower
    >>> timeline = simulate(lower(build("1f1b", ranks=2, microbatches=4)), Costs(transfer=0.5))
    >>> timeline.makespan
    17.0

    Raises: ScheduleError for a program that cannot end, which `verify` would have refused, and ValueError for costs
    that are not those of its stages and microbatches.
    """
    costs = costs or Costs()
    rules, schedule = Rules(program.schedule), program.schedule
    durations = Durations(costs, schedule)
    clocks = [_Clock(rules.of_rank[rank], program, rank, durations, costs.reduce) for rank in range(len(program.ranks))]
    arrivals: dict[int, float] = {}
    put_aside: dict[int, int] = {}  # awaited message -> the rank that waits for it
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
    """One rank on its way through its program."""

    #: The place of the next step.
    position: int
    #: The end of the last action.
    now: float
    #: The end of the last reduction.
    reduced: float
    #: The message that the rank has stopped for.
    awaited: int | None

    def __init__(
        self, own: list[dict[int, Rule]], program: Program, rank: int, durations: Durations, reduce: float
    ) -> None:
        self.own, self.steps = own, program.ranks[rank]
        self.durations, self.reduce = durations, reduce
        self.position = 0
        self.now = self.reduced = 0.0
        self.events: list[Event] = []
        self.awaited = None

    @property
    def compute(self) -> float:
        """The time that the rank would take without waiting."""
        return fsum(self.durations.of(step) for step in self.steps if parts(step)[0].op in COMPUTE)

    def run(self, arrivals: dict[int, float]) -> Iterator[int]:
        """Go on to the end, or to a message that is not in `arrivals`; add and yield each message that is sent."""
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
        """Carry out compute or the optimizer step; return False if its message has not been sent yet."""
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
        """The message that a transfer carries or a compute action waits for."""
        message = self.own[action.op][action.stage].message
        return None if message is None else message + action.microbatch


_MAKERS = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}


def critical_path(program: Program, costs: Costs | None = None) -> tuple[Event, ...]:
    """Find the events, first to last, that add up to a verified program's makespan under the given times.

    Each starts when the one before it ends on the same rank, or when a message from it arrives; if both hold, the path
    stays on the rank. Only shortening one of these events, or a transfer between two of them, can shorten the step.

    >>> from penstock.schedule import build, lower
    >>> [str(event.action) for event in critical_path(lower(build("1f1b", ranks=2, microbatches=1)))]
    ['0F0', '1F0', '1B0', '0B0']

    Raises: the errors of `simulate`.
    """
    return _PathSearch(program, costs or Costs()).path()


class _PathSearch:
    """The way back from the last event to the first, from each to the one that it waited for."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.rules, self.durations = Rules(program.schedule), Durations(costs, program.schedule)
        self.events = simulate(program, costs).events
        self.places = {
            action: (rank, place)
            for rank, events in enumerate(self.events)
            for place, event in enumerate(events)
            for action in parts(event.action)
        }

    def path(self) -> tuple[Event, ...]:
        """The events of the critical path."""
        places = [(rank, place) for rank, events in enumerate(self.events) for place in range(len(events))]
        at = max(places, key=lambda at: self.events[at[0]][at[1]].end, default=None)
        path: list[Event] = []
        while at is not None:
            rank, place = at
            path.append(self.events[rank][place])
            at = self._before_on_rank(rank, place) or self._sender(rank, path[-1])
        return tuple(reversed(path))

    def _before_on_rank(self, rank: int, place: int) -> tuple[int, int] | None:
        """The event that ended when this one started; only reductions and the optimizer step wait for reductions."""
        event, earlier = self.events[rank][place], range(place - 1, -1, -1)
        kinds = (True,) if _computes(event) else (True, False)
        for kind in kinds:
            nearest = next((at for at in earlier if _computes(self.events[rank][at]) is kind), None)
            if nearest is not None and self.events[rank][nearest].end == event.start:
                return rank, nearest
        return None

    def _sender(self, rank: int, event: Event) -> tuple[int, int] | None:
        """The event whose message arrived when this one started."""
        for action in parts(event.action):
            message = self.rules.of_rank[rank][action.op][action.stage].message
            if message is None:
                continue
            receive = self.rules.receive_of(message + action.microbatch)
            stage = partner(receive).stage
            makers = (Action(op, stage, action.microbatch) for op in _MAKERS[receive.op])
            source = next(self.places[maker] for maker in makers if maker in self.places)
            sent = self.events[source[0]][source[1]].end
            if sent + self.durations.transfer(action.microbatch) == event.start:
                return source
        return None


def _computes(event: Event) -> bool:
    return parts(event.action)[0].op not in (Op.REDUCE_GRAD, Op.STEP)
