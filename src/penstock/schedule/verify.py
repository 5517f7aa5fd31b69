"""The proof that a program can be carried out: complete, in a legal order, and free of deadlock."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.schedule.actions import (
    MOVES,
    RECEIVES,
    SENDS,
    Action,
    Hang,
    Op,
    Program,
    ScheduleError,
    Scope,
    TapeState,
    flatten,
    left_by,
    parts,
)
from penstock.schedule.rules import BACKWARD, FORWARD, LOSS_AGAIN, Channel, Rule, Rules, partner


@dataclass(frozen=True)
class Proof:
    """The counts that a proof found.

    >>> from penstock.schedule import build, lower
    >>> verify(lower(build("1f1b", ranks=2, microbatches=3)))
    Proof(num_actions=28, num_messages=6, peak_live_tapes=(2, 1))
    """

    #: Actions of all ranks; a pair counts as two.
    num_actions: int
    num_messages: int
    #: The most tapes (one for each local stage and microbatch) that each rank keeps at once.
    peak_live_tapes: tuple[int, ...]

    @property
    def sentences(self) -> tuple[str, str, str]:
        """The proof in words, with its counts."""
        num_ranks = len(self.peak_live_tapes)
        ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
        return (
            f"{self.num_actions} actions on {ranks}, each exactly once and in a legal order",
            f"{self.num_messages} messages, first in first out; no deadlock even if every send blocks",
            f"live tapes at the peak, by rank: {' '.join(map(str, self.peak_live_tapes))}",
        )


def verify(program: Program) -> Proof:
    """Prove that a program is complete, legal in its order, and ends even if every send waits for its receive.

    The proof shows, in this order: each rank has every action it needs exactly once, after those it depends on, and the
    optimizer step last; each tape goes through the states in which its actions take it; the live tapes keep to the
    schedule's bound; both ends of every channel have the same order of
    messages; and no ring of ranks waits for each other.

    >>> from dataclasses import replace
    >>> from penstock.schedule import build, lower
    >>> program = lower(build("1f1b", ranks=2, microbatches=1))
    >>> verify(replace(program, ranks=(program.ranks[0][1:], program.ranks[1])))
    Traceback (most recent call last):
    penstock.schedule.actions.ScheduleError: rank 0, action 3: 0B0 waits for 0RECV_B0, which this rank does not have

    Raises: ScheduleError naming rank, action and what it waits for. Its `hang` is where ranks would wait for ever,
        unless an action fails before.
    """
    rules = Rules(program.schedule)
    readings = [_Reading(program, rules, rank) for rank in range(program.placement.num_ranks)]
    faults = [fault for reading in readings if (fault := reading.first_fault()) is not None]
    if not faults:
        faults = _crossed_channels(rules, readings)
    hang = _hang(rules, readings)
    if faults or hang is not None:
        deadlock = [hang.sentence] if hang is not None and len(hang.arrows) > 1 else []
        done = [] if hang is None else [sum(1 for _ in flatten(steps)) for steps in hang.done.ranks]
        fails_before = any(one.fails_at is not None and one.fails_at <= own for one, own in zip(readings, done))
        raise ScheduleError("; ".join([*faults[:1], *deadlock]), None if fails_before else hang)
    return Proof(
        num_actions=sum(reading.num_actions for reading in readings),
        num_messages=sum(len(messages) for reading in readings for messages in reading.sent.values()),
        peak_live_tapes=tuple(reading.peak_live for reading in readings),
    )


_NOTHING = -1


def _numbers() -> array[int]:
    return array("i")


def _numbers_by_channel() -> defaultdict[Channel, array[int]]:
    return defaultdict(_numbers)


@dataclass(eq=False)
class _Reading:
    """One rank's actions, read once in order.

    `given` and `awaited` have one entry for each action that sends, receives or needs a message.
    """

    #: The program, its rules, and the rank.
    program: Program
    rules: Rules
    rank: int
    #: The fact that the action gives, and that of another rank that it waits for, or `_NOTHING`.
    given: array[int] = field(default_factory=_numbers)
    awaited: array[int] = field(default_factory=_numbers)
    #: The messages that the rank sends on each channel, and receives from each, in order.
    sent: dict[Channel, array[int]] = field(default_factory=_numbers_by_channel)
    received: dict[Channel, array[int]] = field(default_factory=_numbers_by_channel)
    #: The actions so far, and the most tapes live at once.
    num_actions: int = 0
    peak_live: int = 0
    #: The number of the first action that cannot be carried out, whatever other ranks do.
    fails_at: int | None = None

    def first_fault(self) -> str | None:
        """Find the rank's first fault of its own: an action that is misplaced, repeated, too early or missing."""
        rules, given = self.rules.of_rank[self.rank], bytearray(self.rules.num_facts)
        live, last, fault, has_moves = 0, None, None, False
        for last in flatten(self.program.ranks[self.rank]):
            self.num_actions += 1
            rule, microbatch = rules[last.op].get(last.stage), last.microbatch
            if rule is None or microbatch not in rule.microbatches:
                fault = fault or self._misplaced(last, rule)
                self._fail(last)
                continue
            if not rule.gives:
                has_moves = True
            for fact in rule.needs:
                if not given[fact + microbatch]:
                    fault = fault or self._too_early(last, fact + microbatch)
                    self._fail(last)
            for fact in rule.gives:
                if given[fact + microbatch]:
                    fault = fault or self._repeated(last, fact + microbatch)
                    self._fail(last)
                given[fact + microbatch] = 1
            if rule.message is not None:
                self._record(last.op, rule, microbatch)
            if rule.opens:
                live += 1
                if live > self.peak_live:
                    self.peak_live = live
            if rule.closes:
                live -= 1
        return (
            fault or self._missing(given) or (self._fault_of_tapes() if has_moves else None) or self._fault_at_end(last)
        )

    def _fault_of_tapes(self) -> str | None:
        """Find the first action that takes a tape in another state than it is in; where none is moved, facts say it."""
        tapes: defaultdict[tuple[int, int], list[TapeState]] = defaultdict(lambda: [TapeState.NONE])
        last: dict[tuple[int, int], Action] = {}
        for number, action in enumerate(flatten(self.program.ranks[self.rank]), start=1):
            if not action.op.takes:
                continue
            key = action.stage, action.microbatch
            states = tapes[key]
            if states[-1] not in action.op.takes:
                wanted = " or ".join(state.word for state in action.op.takes)
                self.fails_at = min(self.fails_at or number, number)
                where = f"rank {self.rank}, action {number}: {action}"
                # It has a forward before it, as facts have shown.
                return f"{where} takes a tape that is {wanted}, but {last[key]} left it {states[-1].word}"
            states.append(left_by(action, states))
            last[key] = action
        return None

    def _fail(self, action: Action) -> None:
        """Note that the rank gets no further than this; a reduction or step takes the gradients that there are."""
        if self.fails_at is None and action.op.scope is Scope.MICROBATCH:
            self.fails_at = self.num_actions

    def _record(self, op: Op, rule: Rule, microbatch: int) -> None:
        assert rule.channel is not None and rule.message is not None
        self.given.append(rule.gives[0] + microbatch)
        if op in RECEIVES:
            self.received[rule.channel].append(rule.message + microbatch)
            self.awaited.append(_NOTHING)
            return
        if op in SENDS:
            self.sent[rule.channel].append(rule.message + microbatch)
        assert rule.awaits is not None
        self.awaited.append(rule.awaits + microbatch)

    def _missing(self, given: bytearray) -> str | None:
        for rule in (rule for of_stage in self.rules.of_rank[self.rank] for rule in of_stage.values()):
            for fact in rule.gives:
                missing = given.find(0, fact + rule.microbatches.start, fact + rule.microbatches.stop)
                if missing >= 0:
                    return f"rank {self.rank}: {_either(self.rules.givers(missing))} is missing"
        return None

    def _fault_at_end(self, last: Action | None) -> str | None:
        schedule = self.program.schedule
        if schedule.training and last is not None and last.op is not Op.STEP:
            return f"rank {self.rank}: STEP must be the last action, but {last} comes after it"
        if schedule.live_bound is None or self.peak_live <= (most := schedule.live_bound[self.rank]):
            return None
        return f"rank {self.rank}: {self.peak_live} tapes are live at once, {schedule.name} promises at most {most}"

    def _misplaced(self, action: Action, rule: Rule | None) -> str:
        placement = self.program.placement
        where = f"rank {self.rank}, action {self.num_actions}: {action}"
        if rule is not None:
            if action.op.scope is not Scope.MICROBATCH:
                return f"{where} cannot have a microbatch"
            return f"{where} has a microbatch the stage does not see, its last one is {rule.microbatches.stop - 1}"
        if action.op is not Op.STEP:
            if not 0 <= action.stage < placement.num_stages:
                return f"{where} names a stage that is not there, the last one is {placement.num_stages - 1}"
            if (home := placement.rank_of(action.stage)) != self.rank:
                return f"{where} belongs on rank {home}, which holds stage {action.stage}"
            if action.op in MOVES and self.program.schedule.training:
                return f"{where} {LOSS_AGAIN}"
        if action.op in (FORWARD.send, FORWARD.receive) or self.program.schedule.training:
            return f"{where} has no other rank at its far end: the neighbour is on this rank, or there is none"
        return f"{where} has no place in a forward-only program"

    def _too_early(self, action: Action, fact: int) -> str:
        wanted = self.rules.givers(fact)
        later = [at for at, other in enumerate(flatten(self.program.ranks[self.rank]), start=1) if other in wanted]
        found = f"which comes only at action {later[0]}" if later else "which this rank does not have"
        return f"rank {self.rank}, action {self.num_actions}: {action} waits for {_either(wanted)}, {found}"

    def _repeated(self, action: Action, fact: int) -> str:
        wanted = self.rules.givers(fact)
        actions = enumerate(flatten(self.program.ranks[self.rank]), start=1)
        at, first = next((at, other) for at, other in actions if other in wanted)
        return f"rank {self.rank}, action {self.num_actions}: {action} repeats what {first} did at action {at}"


def _either(actions: tuple[Action, ...]) -> str:
    return " or ".join(map(str, actions))


def _crossed_channels(rules: Rules, readings: list[_Reading]) -> list[str]:
    """Find the faults between complete ranks: channels whose ends disagree on the order of messages."""
    faults = []
    for channel in rules.channels():
        sent = readings[channel.source].sent[channel]
        received = readings[channel.destination].received[channel]
        if sent == received:
            continue
        # Both ends are complete, so they have the same messages and differ only in order.
        place = next(place for place, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
        faults.append(
            f"rank {channel.source} sends {partner(rules.receive_of(sent[place]))} as message {place + 1} to rank "
            f"{channel.destination}, which waits there for {rules.receive_of(received[place])}: "
            f"both ends of a channel must have one order"
        )
    return faults


def _hang(rules: Rules, readings: list[_Reading]) -> Hang | None:
    """Find where ranks would wait for ever: those of a ring each for the next, or one for what another never does."""
    awaited = _run_blocking(rules, readings)
    if not awaited:
        return None
    waits = {rank: _waiting(rules, readings[rank], fact) for rank, fact in awaited.items()}
    givers = {rank: rules.placement.rank_of(transfer.stage) for rank, (_, transfer) in waits.items()}
    # A fact that no action of its rank gives is missing there, not late: that is another fault.
    late = {rank: givers[rank] for rank, fact in awaited.items() if fact in readings[givers[rank]].given}
    ring = [min(waits, key=lambda rank: (rank in late, rank))]
    for start in late:
        path: list[int] = []
        rank = start
        while rank in late and rank not in path:
            path.append(rank)
            rank = late[rank]
        if rank in path:
            ring = path[path.index(rank) :]
            break
    sentences = []
    for rank in ring:
        action, transfer = waits[rank]
        act = "posts" if transfer.op in RECEIVES else "starts"
        until = f"until rank {givers[rank]} {act}" if rank in late else f"for ever: rank {givers[rank]} never {act}"
        sentences.append(f"rank {rank} at {action} waits {until} {transfer}")
    done = [reading.program.ranks[reading.rank] for reading in readings]
    for rank, (action, _) in waits.items():
        done[rank] = done[rank][: next(at for at, step in enumerate(done[rank]) if action in parts(step))]
    return Hang(
        Program(rules.schedule, tuple(done)),
        dict(sorted(waits.items())),
        tuple((rank, givers[rank]) for rank in ring),
        "deadlock, if sends wait for their receives: " * (len(ring) > 1) + "; ".join(sentences),
    )


def _run_blocking(rules: Rules, readings: list[_Reading]) -> dict[int, int]:
    """Run all ranks; a send waits until its receive is posted, a compute action until its message is sent.

    Each action is visited once or twice: a rank that must wait is put aside until the fact it waits for is given.
    Returns, for each rank that never finishes, the fact that it waits for.
    """
    true = bytearray(rules.num_facts) + b"\1"  # and `_NOTHING`, in the last place, is always true
    position = [0] * len(readings)
    put_aside: dict[int, int] = {}  # awaited fact -> the rank that waits for it
    ready = list(range(len(readings)))
    while ready:
        rank = ready.pop()
        given, awaited, at = readings[rank].given, readings[rank].awaited, position[rank]
        while at < len(given):
            if not true[awaited[at]]:
                put_aside[awaited[at]] = rank
                break
            fact = given[at]
            true[fact] = 1
            if fact in put_aside:
                ready.append(put_aside.pop(fact))
            at += 1
        position[rank] = at
    return {rank: fact for fact, rank in put_aside.items()}


def _waiting(rules: Rules, reading: _Reading, awaited: int) -> tuple[Action, Action]:
    """Find a rank's action that waits for a fact, and the other rank's transfer that gives it."""
    (transfer,) = rules.givers(awaited)
    if transfer.op in RECEIVES:
        return partner(transfer), transfer
    receive = partner(transfer)
    ops = FORWARD.computes if receive.op is FORWARD.receive else BACKWARD.computes
    users = [Action(op, receive.stage, receive.microbatch) for op in ops]
    return next(action for action in flatten(reading.program.ranks[reading.rank]) if action in users), transfer
