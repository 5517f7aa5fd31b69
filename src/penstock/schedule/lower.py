"""The passes that turn a schedule into a program.

    early_gradients   schedule -> schedule   split each B whose gradient leaves its rank, to send it earlier
    add_transfers     schedule -> steps      add the sends, and receives posted ahead of need
    add_reductions    steps -> steps         add each stage's gradient reduction
    add_step          steps -> steps         add the optimizer step
    keep_first        program -> program     mark the forwards whose activations are kept, not recomputed

`lower` runs those from `add_transfers` to `add_step`; the others are the caller's choice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.schedule.actions import (
    MOVES,
    PLACED,
    TRANSFERS,
    Action,
    Direction,
    FactKind,
    Op,
    Pair,
    Program,
    Schedule,
    ScheduleError,
    Step,
    flatten,
    parts,
)
from penstock.schedule.placement import check_count
from penstock.schedule.rules import BACKWARD, LOSS_AGAIN, Channel, Rule, Rules, Wire

# ---- The pass of `lower` that adds the transfers: each send right after its maker, receives posted ahead of need


def add_transfers(schedule: Schedule, receives_ahead: int, shared_channels: bool) -> list[list[Step]]:
    """Add each rank's sends and receives, in an order that never deadlocks if the schedule is legal.

    The order is found by walking all ranks through their steps with blocking sends. If all ranks wait for each other,
    the rank that blocks a send posts one more receive, then and from then on. The result records that walk. Since every
    send was received in it, a legal schedule never deadlocks, and no channel has more receives open than it needs.

    Raises: ScheduleError for an action the placement does not have.

    Source: Parks, Bounded Scheduling of Process Networks (Berkeley, 1995), chapter 4: enlarge what is too small.
    """
    rules = Rules(schedule)
    lines = {channel: _Line(channel, receives_ahead) for channel in rules.channels()}
    if shared_channels:
        of_ranks = {channel[:2]: line for channel, line in lines.items()}
        lines = {channel: of_ranks[channel[:2]] for channel in lines}
    ranks = [_Walker(rules, rank, lines) for rank in range(schedule.placement.num_ranks)]
    _walk_all(ranks, list(dict.fromkeys(lines.values())), _Meeting(bytearray(rules.num_facts)))
    return [rank.done for rank in ranks]


@dataclass(eq=False)
class _Line:
    """A channel in use, or the channels of both directions if they are shared."""

    #: The channel, or one of the two.
    channel: Channel
    #: The numbers of receives that may be open, and that are.
    depth: int
    num_open: int = 0
    #: The messages still without a receive, in order.
    coming: deque[int] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The messages of one op on one stage, as facts' numbers to which an action adds its microbatch."""

    #: The line on which the op's input arrives; None if it comes from this rank.
    source: _Line | None
    #: The message that brings the input, and the fact that it was sent.
    arriving: int
    arriving_sent: int
    #: The line on which the result leaves; None if it stays on this rank.
    target: _Line | None = None
    #: The message that takes the result, the fact that it was sent, and the op that sends it.
    leaving: int = -1
    leaving_sent: int = -1
    send: Op | None = None


@dataclass
class _Meeting:
    """The state that the walking ranks share."""

    #: By number, the facts that are true: receives posted and messages sent.
    given: bytearray
    #: The ranks that can continue.
    ready: list[int] = field(default_factory=list)
    #: The awaited fact -> the rank that waits for it.
    put_aside: dict[int, int] = field(default_factory=dict)

    def give(self, fact: int) -> None:
        self.given[fact] = 1
        if fact in self.put_aside:
            self.ready.append(self.put_aside.pop(fact))


def _walk_all(ranks: list[_Walker], lines: Collection[_Line], meeting: _Meeting) -> None:
    """Walk all ranks to their ends; a send waits for its receive and a compute action for its message.

    If the schedule's own order is at fault, ranks go on as if they had what they wait for; the proof reports the fault.
    """
    walks = [rank.walk(meeting) for rank in ranks]
    meeting.ready += range(len(ranks))
    while True:
        while meeting.ready:
            rank = meeting.ready.pop()
            if (awaited := next(walks[rank], None)) is not None:
                meeting.put_aside[awaited] = rank
        if not meeting.put_aside:
            return
        if too_short := [line for line in lines if line.coming and line.coming[0] in meeting.put_aside]:
            line = min(too_short, key=lambda line: line.depth)
            line.depth = max(line.depth, line.num_open) + 1
            ranks[line.channel.destination].post_ahead(line, meeting)
        else:
            meeting.ready += meeting.put_aside.values()
            meeting.put_aside.clear()


class _Walker:
    """One rank's walk through its order."""

    #: The rank's steps so far, with their transfers.
    done: list[Step]
    #: The lines that end at this rank.
    arriving: list[_Line]
    #: `traffic[op][stage]`.
    traffic: list[dict[int, _Traffic]]
    #: The rank, the rules, and those of its own actions.
    rank: int
    rules: Rules
    own: list[dict[int, Rule]]
    #: Its compute actions.
    order: tuple[Step, ...]

    def __init__(self, rules: Rules, rank: int, lines: dict[Channel, _Line]) -> None:
        self.rank, self.rules, self.own = rank, rules, rules.of_rank[rank]
        self.order = rules.schedule.orders[rank]
        self.done = []
        self.arriving = list(dict.fromkeys(line for channel, line in lines.items() if channel.destination == rank))
        self.traffic = [{stage: self._traffic_of(stage, rule, lines) for stage, rule in of.items()} for of in self.own]
        for action in flatten(self.order):
            traffic = self.traffic[action.op].get(action.stage)
            if traffic is None or action.op not in PLACED:
                if action.op in MOVES and action.stage in self.own[Op.W]:
                    raise ScheduleError(f"rank {rank}: {action} {LOSS_AGAIN}")
                kind = "training" if rules.schedule.training else "forward-only"
                stages = ", ".join(map(str, rules.placement.stages_of(rank)))
                raise ScheduleError(
                    f"rank {rank}: {action} does not belong here: in this {kind} schedule the rank computes "
                    f"stage{'s' * (',' in stages)} {stages}"
                )
            if traffic.target is not None:
                traffic.target.coming.append(traffic.leaving + action.microbatch)

    def _traffic_of(self, stage: int, rule: Rule, lines: dict[Channel, _Line]) -> _Traffic:
        source = None if rule.channel is None else lines[rule.channel]
        arriving, arriving_sent = (-1 if number is None else number for number in (rule.message, rule.awaits))
        if rule.send is None:
            return _Traffic(source, arriving, arriving_sent)
        send = self.own[rule.send][stage]
        assert send.channel is not None and send.message is not None
        return _Traffic(source, arriving, arriving_sent, lines[send.channel], send.message, send.gives[0], rule.send)

    def walk(self, meeting: _Meeting) -> Iterator[int]:
        """Add the rank's steps to `done`; yield each fact that it must wait for."""
        given, done = meeting.given, self.done
        for line in self.arriving:
            self.post_ahead(line, meeting)
        for step in self.order:
            traffics = [(self.traffic[action.op][action.stage], action) for action in parts(step)]
            for traffic, action in traffics:
                if traffic.source is not None:
                    microbatch = action.microbatch
                    message, line = traffic.arriving + microbatch, traffic.source
                    while not given[message]:
                        # What is never sent has its receive too; the proof will report the fault.
                        self._post(line, line.coming.popleft() if line.coming else message, meeting)
                    if not given[traffic.arriving_sent + microbatch]:
                        yield traffic.arriving_sent + microbatch
            done.append(step)
            for traffic, _ in traffics:
                if traffic.source is not None:
                    traffic.source.num_open -= 1
            for traffic, action in traffics:
                if traffic.send is not None:
                    message = traffic.leaving + action.microbatch
                    if not given[message]:
                        # The send may have to wait: first post the receives that other ranks may be waiting for.
                        self._post_next(traffics, meeting)
                    if not given[message]:
                        yield message
                    done.append(Action(traffic.send, action.stage, action.microbatch))
                    meeting.give(traffic.leaving_sent + action.microbatch)
            self._post_next(traffics, meeting)

    def _post_next(self, traffics: Sequence[tuple[_Traffic, Action]], meeting: _Meeting) -> None:
        for traffic, _ in traffics:
            if traffic.source is not None:
                self.post_ahead(traffic.source, meeting)

    def post_ahead(self, line: _Line, meeting: _Meeting) -> None:
        """Post receives until the most allowed are open."""
        while line.coming and line.num_open < line.depth:
            self._post(line, line.coming.popleft(), meeting)

    def _post(self, line: _Line, message: int, meeting: _Meeting) -> None:
        line.num_open += 1
        self.done.append(self.rules.receive_of(message))
        meeting.give(message)


def lower(schedule: Schedule, *, receives_ahead: int = 2, shared_channels: bool = False) -> Program:
    """Turn a schedule into a program that carries it out, without changing the schedule.

    A send comes right after the step that makes its tensor, so it may leave while that step goes on. The receives on a
    channel are posted in the order of the sends: up to `receives_ahead` of them at the start, then one more after each
    action that used one up. That receive follows the action's own sends, since other ranks wait for those, unless a
    send itself has to wait. If `receives_ahead` is too few for blocking sends, a channel gets more. A gradient is
    reduced right after the last action that writes to it; the optimizer step comes last.

    With `shared_channels`, a rank receives activations and gradients from another in the one order in which they are
    sent. A runtime with one channel for both, such as torch's, needs this. A runtime with two channels can run such a
    program too, but posts some receives later.

    >>> from penstock.schedule import build
    >>> print(*lower(build("1f1b", ranks=2, microbatches=1)).ranks[0])
    0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD STEP

    Raises: ValueError for `receives_ahead` below one, ScheduleError for an action the placement does not have.
    """
    check_count("receives_ahead", receives_ahead)
    ranks = add_transfers(schedule, receives_ahead, shared_channels)
    if schedule.training:
        stages_of = schedule.placement.stages_of
        ranks = [add_step(add_reductions(steps, stages_of(rank))) for rank, steps in enumerate(ranks)]
    return Program(schedule, tuple(map(tuple, ranks)))


def early_gradients(schedule: Schedule) -> Schedule:
    """Split every `B` whose gradient goes to another rank into an `I` directly followed by its `W`.

    The order of microbatches and the memory stay the same: `B` computes both parts anyway, and only the message moves
    from after the second part to between the two. Earlier ranks wait less: at the end of 1F1B, by p-1 times the time
    of a `W`. Fused pairs stay whole, since the runtime sends from inside them.

    >>> from penstock.schedule import build
    >>> print(*early_gradients(build("1f1b", ranks=2, microbatches=1)).orders[1])
    1F0 1I0 1W0
    """
    placement = schedule.placement
    # Found once for all ranks: with hundreds of them, anything else would take minutes.
    leaving = {s for s in range(placement.num_stages) if Wire.of(placement, s, Direction.BACKWARD).leaving}

    def split(step: Step) -> tuple[Step, ...]:
        if isinstance(step, Action) and step.op is Op.B and step.stage in leaving:
            return tuple(Action(op, step.stage, step.microbatch) for op in (Op.I, Op.W))
        return (step,)

    orders = tuple(tuple(part for step in order for part in split(step)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def add_reductions(steps: Sequence[Step], stages: Iterable[int]) -> list[Step]:
    """Add each stage's reduction after the last action that writes its gradients and the transfers that follow it."""
    writers = ((at, a) for at, step in enumerate(steps) for a in parts(step) if FactKind.WEIGHT_GRADIENT in a.op.gives)
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


def add_step(steps: Sequence[Step]) -> list[Step]:
    return [*steps, Action(Op.STEP)]


def keep_first(program: Program, num_kept: int) -> Program:
    """Mark each forward of a stage at which fewer than `num_kept` of its microbatches keep all their activations.

    A microbatch keeps them from its `F` until its `B` or `I`. So at most `num_kept` of a stage do so at once, the first
    ones of those under way; where other microbatches are recomputed, this bounds what the marks add to the memory. The
    order does not change.

    >>> from penstock.schedule import build
    >>> print(*keep_first(lower(build("1f1b", ranks=2, microbatches=4)), 1).schedule.orders[0])
    0F0K 0F1 0B0 0F2K 0B1 0F3 0B2 0B3

    Source: num_microbatches_with_partial_activation_checkpoints of Megatron-Core, which in 1F1B marks the same ones.
    """
    check_count("num_kept", num_kept, least=0)

    def marked(steps: Sequence[Step]) -> Iterator[Step]:
        full: dict[int, set[int]] = defaultdict(set)  # stage -> its microbatches that keep all activations now
        for step in steps:
            own = parts(step)
            forward = own[0] if own[0].op is Op.F else None
            if forward is not None and len(full[forward.stage]) < num_kept:
                full[forward.stage].add(forward.microbatch)
                keeping = replace(forward, keeps=True)
                yield replace(step, forward=keeping) if isinstance(step, Pair) else keeping
            else:
                yield step
            for action in own:
                if action.op in BACKWARD.computes:
                    full[action.stage].discard(action.microbatch)

    orders, ranks = (tuple(tuple(marked(steps)) for steps in rows) for rows in (program.schedule.orders, program.ranks))
    return replace(program, schedule=replace(program.schedule, orders=orders), ranks=ranks)
