"""The proof that a program can be carried out: complete, in a legal order, and free of deadlock."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass

from penstock.schedule.actions import RECEIVES, SENDS, Action, Op, Program, ScheduleError, flatten
from penstock.schedule.rules import BACKWARD, FORWARD, Channel, Rule, Rules, partner


@dataclass(frozen=True)
class Proof:
    """What a proof found out about a program.

    `num_actions` counts both halves of a pair. `peak_live_tapes` holds, per rank, the most tapes (one a local stage and
    microbatch) that are there at once.
    """

    num_actions: int
    num_messages: int
    peak_live_tapes: tuple[int, ...]


def verify(program: Program) -> Proof:
    """Prove that a program is complete, legal in its order, and ends even if every send waits for its receive.

    Shown are, in this order: each rank has every action it needs exactly once, each behind those it depends on, the
    optimizer step last; the live tapes keep to the schedule's bound; every channel is received from in the order in
    which it is sent to; and no ring of ranks waits for each other.

    Raises: ScheduleError naming rank, action and what it waits for.
    """
    rules = Rules(program.schedule)
    walks = [_Walk(program, rules, rank) for rank in range(program.placement.num_ranks)]
    faults = [fault for walk in walks if (fault := walk.first_fault()) is not None]
    if not faults:
        faults = _crossed_channels(rules, walks)
    deadlock = _deadlock(rules, walks)
    if faults or deadlock:
        raise ScheduleError("; ".join([*faults[:1], *deadlock]))
    return Proof(
        num_actions=sum(walk.num_actions for walk in walks),
        num_messages=sum(len(messages) for walk in walks for messages in walk.sent.values()),
        peak_live_tapes=tuple(walk.peak_live for walk in walks),
    )


# What a rank does to a message; three times the message's number plus one of these is a move.
_POST, _SEND, _AWAIT = range(3)


class _Walk:
    """One rank's actions, read once in order.

    `moves` keeps what matters to other ranks, `sent` and `received` the messages of each channel, all in order.
    """

    def __init__(self, program: Program, rules: Rules, rank: int) -> None:
        self.program, self.rules, self.rank = program, rules, rank
        self.own = rules.of_rank[rank]
        self.num_actions = self.peak_live = 0
        self.moves = array("q")
        self.sent: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
        self.received: dict[Channel, array[int]] = defaultdict(lambda: array("q"))

    def first_fault(self) -> str | None:
        """What is wrong with the rank by itself: an action that is not due here, done before, too early, or missing."""
        own, given, live, last, fault = self.own, bytearray(self.rules.num_facts), 0, None, None
        for last in flatten(self.program.ranks[self.rank]):
            self.num_actions += 1
            rule, microbatch = own[last.op].get(last.stage), last.microbatch
            if rule is None or microbatch not in rule.microbatches:
                fault = fault or self._foreign(last, rule)
                continue
            for fact in rule.needs:
                if not given[fact + microbatch]:
                    fault = fault or self._too_early(last, fact + microbatch)
            for fact in rule.gives:
                if given[fact + microbatch]:
                    fault = fault or self._repeated(last, fact + microbatch)
                given[fact + microbatch] = 1
            if rule.message is not None:
                self._record(last.op, rule, rule.message + microbatch)
            if rule.opens:
                live += 1
                self.peak_live = max(self.peak_live, live)
            if rule.closes:
                live -= 1
        return fault or self._missing(given) or self._misplaced_step(last) or self._too_many_live()

    def _record(self, op: Op, rule: Rule, message: int) -> None:
        assert rule.channel is not None
        if op in SENDS:
            self.sent[rule.channel].append(message)
            self.moves.append(3 * message + _SEND)
        elif op in RECEIVES:
            self.received[rule.channel].append(message)
            self.moves.append(3 * message + _POST)
        else:
            self.moves.append(3 * message + _AWAIT)

    def _missing(self, given: bytearray) -> str | None:
        for fact, microbatches in self.rules.facts_due(self.rank).items():
            missing = given.find(0, fact + microbatches.start, fact + microbatches.stop)
            if missing >= 0:
                return f"rank {self.rank}: {_either(self.rules.givers(missing))} is missing"
        return None

    def _misplaced_step(self, last: Action | None) -> str | None:
        if not self.program.schedule.training or (last is not None and last.op is Op.STEP):
            return None
        return f"rank {self.rank}: STEP must be the last action, but {last} comes behind it"

    def _too_many_live(self) -> str | None:
        schedule = self.program.schedule
        if schedule.live_bound is None or self.peak_live <= schedule.live_bound[self.rank]:
            return None
        return (
            f"rank {self.rank}: {self.peak_live} tapes are live at once, "
            f"{schedule.name} promises at most {schedule.live_bound[self.rank]}"
        )

    def _foreign(self, action: Action, rule: Rule | None) -> str:
        placement = self.program.placement
        where = f"rank {self.rank}, action {self.num_actions}: {action}"
        if rule is not None:
            if action.op is Op.REDUCE_GRAD or action.op is Op.STEP:
                return f"{where} cannot have a microbatch"
            return f"{where} has a microbatch the stage does not see, its last one is {rule.microbatches.stop - 1}"
        if action.op is not Op.STEP:
            if not 0 <= action.stage < placement.num_stages:
                return f"{where} names a stage that is not there, the last one is {placement.num_stages - 1}"
            if (home := placement.rank_of(action.stage)) != self.rank:
                return f"{where} belongs on rank {home}, which holds stage {action.stage}"
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


def _crossed_channels(rules: Rules, walks: list[_Walk]) -> list[str]:
    """What is wrong between complete ranks: channels whose two ends do not name the messages in one order."""
    faults = []
    for channel in rules.channels():
        sent = walks[channel.source].sent[channel]
        received = walks[channel.destination].received[channel]
        if sent == received:
            continue
        # Both ends are complete, so they have the same messages and differ in order alone.
        place = next(place for place, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
        faults.append(
            f"rank {channel.source} sends {partner(rules.receive_of(sent[place]))} as message {place + 1} to rank "
            f"{channel.destination}, which waits there for {rules.receive_of(received[place])}: "
            f"both ends of a channel must have one order"
        )
    return faults


def _deadlock(rules: Rules, walks: list[_Walk]) -> list[str]:
    """A sentence on a ring of ranks each of which waits for the next, if there is one."""
    waits = _carry_out(rules, walks)
    peers = {rank: _peer(rules, move) for rank, move in waits.items()}
    # A move that its rank has not in its program is missing there, not late: that is another fault.
    late = {rank: peers[rank] for rank, move in waits.items() if move in walks[peers[rank]].moves}
    for rank in late:
        ring: list[int] = []
        while rank in late and rank not in ring:
            ring.append(rank)
            rank = late[rank]
        if rank in ring:
            ring = ring[ring.index(rank) :]
            sentences = [_waiting(rules, walks[rank], waits[rank], peers[rank]) for rank in ring]
            return [f"deadlock, if sends wait for their receives: {'; '.join(sentences)}"]
    return []


def _carry_out(rules: Rules, walks: list[_Walk]) -> dict[int, int]:
    """Make all ranks' moves, a send waiting until its receive is posted and a compute action until its message is sent.

    Each move is looked at once or twice: a rank that must wait is put aside until the move it waits for is made. Given
    back is, for each rank that never comes to its end, the move which it waits for.
    """
    made = bytearray(3 * rules.num_facts)
    next_move = [0] * len(walks)
    put_aside: dict[int, int] = {}  # by the move that is waited for, the rank that waits
    ready = list(range(len(walks)))
    while ready:
        rank = ready.pop()
        moves, at = walks[rank].moves, next_move[rank]
        while at < len(moves):
            move = moves[at]
            # One below a send's number is the post of its receive, one below a compute's the send.
            if move % 3 != _POST and not made[move - 1]:
                put_aside[move - 1] = rank
                break
            made[move] = 1
            if move in put_aside:
                ready.append(put_aside.pop(move))
            at += 1
        next_move[rank] = at
    return {rank: move for move, rank in put_aside.items()}


def _peer(rules: Rules, move: int) -> int:
    """The rank that has to make a move."""
    message, kind = divmod(move, 3)
    receive = rules.receive_of(message)
    return rules.placement.rank_of(receive.stage if kind == _POST else partner(receive).stage)


def _waiting(rules: Rules, walk: _Walk, move: int, peer: int) -> str:
    """What a rank waits for, where `move` is the one that is due from `peer`."""
    message, kind = divmod(move, 3)
    receive = rules.receive_of(message)
    if kind == _POST:
        return f"rank {walk.rank} at {partner(receive)} waits until rank {peer} posts {receive}"
    ops = FORWARD.computes if receive.op is FORWARD.receive else BACKWARD.computes
    users = [Action(op, receive.stage, receive.microbatch) for op in ops]
    user = next(action for action in flatten(walk.program.ranks[walk.rank]) if action in users)
    return f"rank {walk.rank} at {user} waits until rank {peer} starts {partner(receive)}"
