"""From a schedule to a program: transfers, early receives, gradient reductions and the optimizer step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.actions import (
    COMPUTE,
    TRANSFERS,
    Action,
    Op,
    Program,
    Schedule,
    ScheduleError,
    Step,
    check_count,
    flatten,
    parts,
)
from penstock.schedule.rules import Channel, Rule, Rules


def lower(schedule: Schedule, *, receives_ahead: int = 2, shared_channels: bool = False) -> Program:
    """The program that carries out a schedule, which itself is not changed.

    A send stands right behind the action that made its tensor. The order of the sends along a channel is the order in
    which the other side posts its receives: at the start up to `receives_ahead` on each channel, then one more behind
    each action that used one up: behind that action's own sends, for which others wait, unless one of these has to wait
    itself. A gradient is reduced right behind the last action that writes to it; the optimizer step comes last.

    Where that many receives are too few, a channel gets more. To find out, the ranks are walked through their orders
    with sends that block: should they all wait for each other, the rank that a send is blocked by posts one receive
    more, there and from then on. What is given back is the record of that walk, in which every send was taken, so that
    a schedule with a legal order never deadlocks, and no channel has more receives open than it takes.

    With `shared_channels` activations and gradients from one rank to another are received in the order in which both
    together are sent: for a runtime that has one channel for both, as torch's has. Where they are apart, which is more
    usual, that does no harm, but some receives are posted later.

    Raises: ValueError for `receives_ahead` below one, ScheduleError for an action the placement does not have.

    Source: Parks, Bounded Scheduling of Process Networks (Berkeley, 1995), chapter 4: enlarging what is too small.
    """
    check_count("receives_ahead", receives_ahead)
    rules = Rules(schedule)
    lines = {channel: _Line(channel, receives_ahead) for channel in rules.channels()}
    if shared_channels:
        of_ranks = {channel[:2]: line for channel, line in lines.items()}
        lines = {channel: of_ranks[channel[:2]] for channel in lines}
    ranks = [_Rank(rules, rank, lines) for rank in range(schedule.placement.num_ranks)]
    _walk_all(ranks, list(dict.fromkeys(lines.values())), _Meeting(rules))
    return Program(schedule, tuple(rank.steps() for rank in ranks))


class _Line:
    """A channel in use: the messages it will carry that have no receive yet, and how many receives may be open."""

    def __init__(self, channel: Channel, depth: int) -> None:
        self.channel, self.depth, self.num_open = channel, depth, 0
        self.coming: deque[int] = deque()


@dataclass(frozen=True, slots=True)
class _Work:
    """What an op on a stage has to do with messages: the first one's number and line, received and sent."""

    source: _Line | None
    awaited: int
    target: _Line | None
    sent: int
    send: Op | None


class _Meeting:
    """What the walking ranks know of each other: which receives are posted, which messages sent, and who waits.

    Twice a message's number stands for the posting of its receive, one more for its sending.
    """

    def __init__(self, rules: Rules) -> None:
        self.made = bytearray(2 * rules.num_facts)
        self.ready = list(range(rules.placement.num_ranks))
        self.put_aside: dict[int, int] = {}  # by the event that is waited for, the rank that waits

    def make(self, event: int) -> None:
        self.made[event] = 1
        if event in self.put_aside:
            self.ready.append(self.put_aside.pop(event))


def _walk_all(ranks: list[_Rank], lines: Collection[_Line], meeting: _Meeting) -> None:
    """Walk all ranks to their ends, a send waiting for its receive and a compute action for its message.

    Where a schedule's own order is at fault nobody waits for anything any more: what is wrong the proof will say.
    """
    walks = [rank.walk(meeting) for rank in ranks]
    while True:
        while meeting.ready:
            rank = meeting.ready.pop()
            if (event := next(walks[rank], None)) is not None:
                meeting.put_aside[event] = rank
        if not meeting.put_aside:
            return
        refused = {event // 2 for event in meeting.put_aside if event % 2 == 0}
        if too_short := [line for line in lines if line.coming and line.coming[0] in refused]:
            line = min(too_short, key=lambda line: line.depth)
            line.depth = max(line.depth, line.num_open) + 1
            ranks[line.channel.destination].post_ahead(line, meeting)
        else:
            meeting.made[1::2] = b"\1" * (len(meeting.made) // 2)
            meeting.ready += meeting.put_aside.values()
            meeting.put_aside.clear()


class _Rank:
    """One rank's list of steps in the making."""

    def __init__(self, rules: Rules, rank: int, lines: dict[Channel, _Line]) -> None:
        self.rank, self.rules, self.own = rank, rules, rules.of_rank[rank]
        self.order, self.training = rules.schedule.orders[rank], rules.schedule.training
        self.arriving = list(dict.fromkeys(line for channel, line in lines.items() if channel.destination == rank))
        self.works = [{stage: self._work(stage, rule, lines) for stage, rule in of.items()} for of in self.own]
        self.done: list[Step] = []
        for action in flatten(self.order):
            work = self.works[action.op].get(action.stage)
            if work is None or action.op not in COMPUTE:
                raise ScheduleError(f"rank {rank}: {action} does not belong here: {_stages(rules.schedule, rank)}")
            if work.target is not None:
                work.target.coming.append(work.sent + action.microbatch)

    def _work(self, stage: int, rule: Rule, lines: dict[Channel, _Line]) -> _Work:
        source = None if rule.channel is None else lines[rule.channel]
        awaited = -1 if rule.message is None else rule.message
        if rule.send is None:
            return _Work(source, awaited, None, -1, None)
        send = self.own[rule.send][stage]
        assert send.channel is not None and send.message is not None
        return _Work(source, awaited, lines[send.channel], send.message, rule.send)

    def walk(self, meeting: _Meeting) -> Iterator[int]:
        """Add step by step what the rank does; each event that it must wait for is given out."""
        made, done = meeting.made, self.done
        for line in self.arriving:
            self.post_ahead(line, meeting)
        for step in self.order:
            works = [(self.works[action.op][action.stage], action) for action in parts(step)]
            for work, action in works:
                if work.source is not None:
                    message = work.awaited + action.microbatch
                    self._post_needed(work.source, action, message, meeting)
                    if not made[2 * message + 1]:
                        yield 2 * message + 1
            done.append(step)
            for work, _ in works:
                if work.source is not None:
                    work.source.num_open -= 1
            for work, action in works:
                if work.send is not None:
                    message = work.sent + action.microbatch
                    if not made[2 * message]:
                        # It may have to wait: first tell the others where their next messages may go.
                        self._post_behind(works, meeting)
                    if not made[2 * message]:
                        yield 2 * message
                    done.append(Action(work.send, action.stage, action.microbatch))
                    meeting.make(2 * message + 1)
            self._post_behind(works, meeting)

    def _post_behind(self, works: Sequence[tuple[_Work, Action]], meeting: _Meeting) -> None:
        for work, _ in works:
            if work.source is not None:
                self.post_ahead(work.source, meeting)

    def post_ahead(self, line: _Line, meeting: _Meeting) -> None:
        while line.coming and line.num_open < line.depth:
            self._post(line, meeting)

    def _post(self, line: _Line, meeting: _Meeting) -> None:
        message = line.coming.popleft()
        line.num_open += 1
        self.done.append(self.rules.receive_of(message))
        meeting.make(2 * message)

    def _post_needed(self, line: _Line, action: Action, message: int, meeting: _Meeting) -> None:
        """Post the receive that an action waits for, and with it those before it in its channel's order."""
        while not meeting.made[2 * message]:
            if not line.coming:
                raise ScheduleError(
                    f"rank {self.rank}: {action} waits for {self.rules.receive_of(message)}, but nothing is sent "
                    f"there: rank {line.channel.source} has no such action"
                )
            self._post(line, meeting)

    def steps(self) -> tuple[Step, ...]:
        """The rank's whole program, once all ranks have been walked to their ends."""
        if not self.training:
            return tuple(self.done)
        return (*add_reductions(self.done, self.own[Op.REDUCE_GRAD]), Action(Op.STEP))


def _stages(schedule: Schedule, rank: int) -> str:
    kind = "training" if schedule.training else "forward-only"
    stages = ", ".join(map(str, schedule.placement.stages_of(rank)))
    return f"in this {kind} schedule the rank computes stage{'s' * (',' in stages)} {stages}"


def add_reductions(steps: Sequence[Step], stages: Iterable[int]) -> list[Step]:
    """A rank's steps with a reduction for each of its stages, behind its last writer and the transfers next to that."""
    writers = ((at, a) for at, step in enumerate(steps) for a in parts(step) if a.op in (Op.B, Op.W))
    last_write = {action.stage: at for at, action in writers}
    reduced_at: dict[int, list[int]] = defaultdict(list)
    for stage in stages:
        at = last_write.get(stage, len(steps) - 1)
        while at + 1 < len(steps) and parts(steps[at + 1])[0].op in TRANSFERS:
            at += 1
        reduced_at[at].append(stage)
    done: list[Step] = []
    for at, step in enumerate(steps):
        done.append(step)
        done += [Action(Op.REDUCE_GRAD, stage) for stage in reduced_at[at]] if at in reduced_at else []
    return done
