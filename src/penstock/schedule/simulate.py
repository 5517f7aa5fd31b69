"""Simulation: from a program and the times of its actions to a timeline.

A timeline, simulated or measured, has the start and end of every step, and each rank's span, bubble, idle time and
live microbatches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum
from operator import itemgetter
from typing import TypeAlias

from penstock.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Hang,
    Op,
    Program,
    Resource,
    ScheduleError,
    Step,
    TapeState,
    left_by,
    parts,
)
from penstock.schedule.costs import Costs, Durations
from penstock.schedule.rules import Rule, Rules


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a rank with its start and end.

    >>> from penstock.schedule import Op
    >>> Event(Action(Op.F, 0, 3), start=1.0, end=2.5).end
    2.5
    """

    action: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Each rank's steps in time, simulated or measured.

    >>> from penstock.schedule import build, lower, simulate
    >>> timeline = simulate(lower(build("1f1b", ranks=2, microbatches=2)))
    >>> timeline.makespan, timeline.idle, timeline.peak_live_microbatches
    (9.0, (3.0, 3.0), (2.0, 1.0))

    Source: span and bubble as in Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 5.
    """

    #: Each rank's compute, reductions and optimizer step, in order; no transfers.
    events: tuple[tuple[Event, ...], ...]
    #: The time from 0 to the last end.
    makespan: float
    #: The longest time over ranks from a rank's own first start to its own end.
    span_cost: float
    #: The share of `span_cost` that the busiest rank does not compute.
    bubble_rate: float
    #: The time of the makespan in which each rank computes nothing.
    idle: tuple[float, ...]
    title: str = ""
    #: The number of stages that a microbatch passes through on a rank.
    stages_per_rank: int = 1
    #: Those whose sizes the tapes have.
    costs: Costs = field(default=Costs(), compare=False)
    #: True if a tape lasts until its last backward action; otherwise until the end of its F.
    training: bool = False
    #: Where the ranks wait for ever, behind these events.
    hang: Hang | None = None
    #: True if the times are those of a run.
    measured: bool = False

    @classmethod
    def from_events(
        cls,
        events: Sequence[Sequence[Event]],
        *,
        stages_per_rank: int = 1,
        compute: float | None = None,
        title: str = "",
        costs: Costs | None = None,
        training: bool | None = None,
    ) -> Timeline:
        """Make a timeline of events whose times count from a common 0.

        `compute` is the time that a rank would take without waiting; by default that of the busiest rank. `training`
        is found by the backwards unless it is given.
        """
        costs = costs or Costs()
        if training is None:
            actions = (action for rank in events for event in rank for action in parts(event.action))
            training = any(action.op in (Op.B, Op.W) for action in actions)
        makespan = max((event.end for rank in events for event in rank), default=0.0)
        span_cost = max((max(event.end for event in rank) - rank[0].start for rank in events if rank), default=0.0)
        computed = [[event for event in rank if parts(event.action)[0].op in COMPUTE] for rank in events]
        busy = [sum(event.end - event.start for event in rank) for rank in computed]
        if compute is None:
            compute = max(busy, default=0.0)
        step = Action(Op.STEP)
        steps = [sum(event.end - event.start for event in rank if event.action == step) for rank in events]
        return cls(
            events=tuple(map(tuple, events)),
            makespan=makespan,
            span_cost=span_cost,
            bubble_rate=(span_cost - compute) / span_cost if span_cost else 0.0,
            idle=tuple(makespan - computing - stepping for computing, stepping in zip(busy, steps)),
            title=title,
            stages_per_rank=stages_per_rank,
            costs=costs,
            training=training,
        )

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time, up to the makespan, in which they compute nothing."""
        whole = self.makespan * len(self.events)
        return sum(self.idle) / whole if whole else 0.0

    @cached_property
    def peak_live_microbatches(self) -> tuple[float, ...]:
        """The most live tapes of each rank, from the start of F to its last backward's end, / `stages_per_rank`."""
        numbers = ([live for _, live in self._live(rank, self._weigh)] for rank in range(len(self.events)))
        return tuple(max(live, default=0) / self.stages_per_rank for live in numbers)

    def live_microbatches(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The live microbatches of a rank over time, as (time of a change, number from then on)."""
        live = dict(self._live(rank, self._weigh))
        return tuple((time, tapes / self.stages_per_rank) for time, tapes in live.items())

    def _weigh(self, action: Action, state: TapeState) -> float:
        if state is TapeState.WEIGHTS:
            return self.costs.share_of(action.stage)
        return 0 if state in (TapeState.NONE, TapeState.AWAY) else 1

    def live_bytes(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The bytes of a rank's live tapes over time, as (time of a change, bytes from then on)."""
        costs, num_stages = self.costs, self.stages_per_rank
        # Shares of a rank's bytes may not add up exactly, so the unit is multiplied last.
        unit = costs.bytes_of(0, num_stages) or 1

        def weigh(action: Action, state: TapeState) -> float:
            if state in (TapeState.NONE, TapeState.AWAY):
                return 0.0
            length = costs.lengths[action.microbatch] if costs.lengths else 1
            held = costs.bytes_of(action.stage, num_stages, state is TapeState.WHOLE) / unit * length
            return costs.share_of(action.stage) * held if state is TapeState.WEIGHTS else held

        return tuple((time, live * unit) for time, live in dict(self._live(rank, weigh)).items())

    @property
    def peak_live_bytes(self) -> tuple[float, ...]:
        """The most bytes of live tapes on each rank."""
        ranks = range(len(self.events))
        return tuple(max((live for _, live in self.live_bytes(rank)), default=0.0) for rank in ranks)

    def _live(self, rank: int, weigh: Callable[[Action, TapeState], float]) -> Iterator[tuple[float, float]]:
        """Yield the time of each change of a rank's tapes, and what is live then; `weigh` gives a tape's weight."""
        # By weight the number of tapes that have it, since whole numbers add up exactly.
        numbers = Counter[float]()
        for time, action, before, after in _changes(self.events[rank], self.training):
            numbers[weigh(action, before)] -= 1
            numbers[weigh(action, after)] += 1
            yield time, sum(weight * number for weight, number in numbers.items())


_Change: TypeAlias = tuple[float, Action, TapeState, TapeState]
"""A change of a tape: time, its action, and the states before and after it."""


def _changes(events: Sequence[Event], training: bool) -> list[_Change]:
    """The changes of a rank's tapes in order of time: memory is taken where an action starts, freed where it ends."""
    tapes: defaultdict[tuple[int, int], list[TapeState]] = defaultdict(lambda: [TapeState.NONE])
    changes: list[_Change] = []
    moves = False
    for event in events:
        ends: list[_Change] = []
        for action in parts(event.action):
            if not action.op.takes:
                continue
            states = tapes[action.stage, action.microbatch]
            before = states[-1]
            states.append(after := left_by(action, states))
            if after > before:
                changes.append((event.start, action, before, after))
            else:
                ends.append((event.end, action, before, after))
            if not training:
                ends.append((event.end, action, after, TapeState.NONE))
            moves = moves or action.op.resource is Resource.HOST_LINK
        changes += ends
    # What moves beside a rank's compute ends among later actions.
    return sorted(changes, key=itemgetter(0)) if moves else changes


def simulate(program: Program | Hang, costs: Costs | None = None) -> Timeline:
    """Compute the timeline of a verified program whose actions take the given times; `Costs()` by default.

    A rank runs its program until it needs a message that has not been sent, and continues once it has. So each action
    is visited once, however the ranks wait for each other. Of a program that was refused, its error's `hang` gives the
    timeline up to there.

    >>> from penstock.schedule import build, lower
    >>> timeline = simulate(lower(build("1f1b", ranks=2, microbatches=4)), Costs(transfer=0.5))
    >>> timeline.makespan
    17.0

    Raises: ScheduleError for a program that cannot end, which `verify` would have refused, and ValueError for costs
    that do not fit its stages and microbatches.
    """
    costs = costs or Costs()
    if isinstance(program, Hang):
        done = simulate(program.done, costs)
        return replace(done, title=f"{done.title} up to where it hangs", hang=program)
    schedule = program.schedule
    clocks = _run(program, costs)
    num_ranks, num_microbatches = len(clocks), schedule.num_microbatches
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    microbatches = f"{num_microbatches} microbatch{'es' * (num_microbatches != 1)}"
    return Timeline.from_events(
        [clock.events for clock in clocks],
        stages_per_rank=program.placement.stages_per_microbatch,
        compute=max(clock.compute for clock in clocks),
        title=f"{schedule.name}, {ranks}, {microbatches}, simulated",
        costs=costs,
        training=schedule.training,
    )


def _run(program: Program, costs: Costs) -> list[_Clock]:
    """Run all ranks to their ends. Raises: as `simulate`."""
    rules = Rules(program.schedule)
    durations = Durations(costs, program.schedule)
    clocks = [_Clock(own, steps, durations, costs.reduce) for own, steps in zip(rules.of_rank, program.ranks)]
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
        raise ScheduleError(f"rank {rank} waits forever for {rules.receive_of(message)}; verify the program first")
    return clocks


@dataclass(eq=False)
class _Clock:
    """One rank's run through its program."""

    #: The rank's rules and steps.
    rules: list[dict[int, Rule]]
    steps: tuple[Step, ...]
    #: The times of actions, and that of a reduction.
    durations: Durations
    reduce: float
    #: The place of the next step.
    position: int = 0
    #: The ends of the last action and of the last reduction.
    now: float = 0.0
    reduced: float = 0.0
    #: What has been done, with its times.
    events: list[Event] = field(default_factory=list)
    #: When the line to the host's memory is free again; the stage and microbatch that come by it -> when they are here.
    host_link: float = 0.0
    back: dict[tuple[int, int], float] = field(default_factory=dict)
    #: Rank -> when the channel to it is free again.
    channels: dict[int, float] = field(default_factory=dict)
    #: The message that the rank waits for.
    awaited: int | None = None

    @property
    def compute(self) -> float:
        """The time that the rank would take without waiting."""
        return fsum(self.durations.of(step) for step in self.steps if parts(step)[0].op in COMPUTE)

    def run(self, arrivals: dict[int, float]) -> Iterator[int]:
        """Continue to the end, or to a message that is not in `arrivals`; add and yield each message that is sent."""
        self.awaited = None
        while self.position < len(self.steps):
            step = self.steps[self.position]
            if isinstance(step, Action) and step.op in SENDS:
                message = self._message(step)
                assert message is not None
                # The message is on its channel behind those that are on it already.
                to, occupied, in_flight = self.durations.message(step)
                start = max(self.now, self.channels.get(to, self.now))
                self.channels[to] = start + occupied
                arrivals[message] = start + in_flight
                yield message
            elif isinstance(step, Action) and step.op is Op.REDUCE_GRAD:
                start = max(self.now, self.reduced)
                self.reduced = start + self.reduce
                self.events.append(Event(step, start, self.reduced))
            elif isinstance(step, Action) and step.op.resource is Resource.HOST_LINK:
                start = max(self.now, self.host_link)
                self.host_link = self.back[step.stage, step.microbatch] = start + self.durations.of(step)
                self.events.append(Event(step, start, self.host_link))
            elif not (isinstance(step, Action) and step.op in RECEIVES) and not self._work(step, arrivals):
                return
            self.position += 1

    def _work(self, step: Step, arrivals: dict[int, float]) -> bool:
        """Run a compute action, pair or optimizer step; return False if its message has not been sent yet."""
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
            if self.back:
                start = max(start, self.back.get((action.stage, action.microbatch), start))
        self.now = start + self.durations.of(step)
        self.events.append(Event(step, start, self.now))
        return True

    def _message(self, action: Action) -> int | None:
        """The message that a transfer carries or a compute action waits for."""
        message = self.rules[action.op][action.stage].message
        return None if message is None else message + action.microbatch
