"""From a schedule to a program: transfers, early receives, gradient reductions and the optimizer step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from penstock.schedule.actions import (
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
from penstock.schedule.rules import Channel, Rule, Rules, partner


def lower(schedule: Schedule, *, receives_ahead: int = 2) -> Program:
    """The program that carries out a schedule, which itself is not changed.

    A send stands right behind the action that made its tensor. The order of the sends along a channel is the order in
    which the other side posts its receives: at the start up to `receives_ahead` on each channel, then one more behind
    each action that used one up, and *before* that action's own sends, so that a rank which has to wait for its send to
    be taken has already told the others where their next message may go. A gradient is reduced right behind the last
    action that writes to it; the optimizer step comes last.

    Raises: ValueError for `receives_ahead` below one, ScheduleError for an action the placement does not have.
    """
    check_count("receives_ahead", receives_ahead)
    rules = Rules(schedule)
    arriving = _receives(schedule, rules)
    ranks = range(schedule.placement.num_ranks)
    return Program(schedule, tuple(_Lowering(rules, rank, arriving[rank], receives_ahead).steps() for rank in ranks))


def _receives(schedule: Schedule, rules: Rules) -> list[dict[Channel, deque[Action]]]:
    """For each rank and channel towards it, the receives in the order of the sends that they meet."""
    arriving: list[dict[Channel, deque[Action]]] = [defaultdict(deque) for _ in schedule.orders]
    for rank, order in enumerate(schedule.orders):
        own = rules.of_rank[rank]
        for action in flatten(order):
            rule = own[action.op].get(action.stage)
            if rule is None:
                raise ScheduleError(f"rank {rank}: {action} does not belong here: {_stages(schedule, rank)}")
            if rule.send is None:
                continue
            channel = own[rule.send][action.stage].channel
            assert channel is not None
            receive = partner(Action(rule.send, action.stage, action.microbatch))
            arriving[channel.destination][channel].append(receive)
    return arriving


def _stages(schedule: Schedule, rank: int) -> str:
    kind = "training" if schedule.training else "forward-only"
    stages = ", ".join(map(str, schedule.placement.stages_of(rank)))
    return f"in this {kind} schedule the rank computes stage{'s' * (',' in stages)} {stages}"


class _Lowering:
    """One rank's list of steps in the making."""

    def __init__(self, rules: Rules, rank: int, arriving: dict[Channel, deque[Action]], ahead: int) -> None:
        self.rank, self.rules, self.own = rank, rules, rules.of_rank[rank]
        self.order, self.training = rules.schedule.orders[rank], rules.schedule.training
        self.arriving, self.ahead = arriving, ahead
        self.num_open = dict.fromkeys(arriving, 0)  # receives posted and not yet used up
        self.posted: set[Action] = set()
        self.done: list[Step] = []

    def steps(self) -> tuple[Step, ...]:
        for channel in self.arriving:
            self._post_ahead(channel)
        for step in self.order:
            actions = [(action, self.own[action.op][action.stage]) for action in parts(step)]
            for action, rule in actions:
                self._post_needed(action, rule)
            self.done.append(step)
            for _, rule in actions:
                if rule.channel is not None:
                    self.num_open[rule.channel] -= 1
                    self._post_ahead(rule.channel)
            self.done += [Action(r.send, a.stage, a.microbatch) for a, r in actions if r.send is not None]
        if not self.training:
            return tuple(self.done)
        return (*add_reductions(self.done, self.own[Op.REDUCE_GRAD]), Action(Op.STEP))

    def _post(self, channel: Channel) -> None:
        receive = self.arriving[channel].popleft()
        self.num_open[channel] += 1
        self.posted.add(receive)
        self.done.append(receive)

    def _post_ahead(self, channel: Channel) -> None:
        while self.arriving[channel] and self.num_open[channel] < self.ahead:
            self._post(channel)

    def _post_needed(self, action: Action, rule: Rule) -> None:
        """Post the receive that an action waits for, and with it those before it in its channel's order."""
        if rule.channel is None:
            return
        receive = Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, action.stage, action.microbatch)
        while receive not in self.posted:
            if not self.arriving[rule.channel]:
                raise ScheduleError(
                    f"rank {self.rank}: {action} waits for {receive}, but nothing is sent there: "
                    f"rank {rule.channel.source} has no such action"
                )
            self._post(rule.channel)
        self.posted.discard(receive)


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
