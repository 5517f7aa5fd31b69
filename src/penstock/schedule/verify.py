"""The proof that a program can be carried out: complete, in a legal order, and free of deadlock."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum

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
    for walk in walks:
        walk.check_order()
    num_messages = _check_channels(rules, walks)
    _check_progress(rules, walks)
    return Proof(sum(walk.num_actions for walk in walks), num_messages, tuple(walk.peak_live for walk in walks))


class _Move(IntEnum):
    """What a rank does to a message."""

    POST = 0
    SEND = 1
    AWAIT = 2


class _Walk:
    """One rank's actions, read once in order.

    `moves` keeps what matters to other ranks: three times a message's number plus the kind of the move. `sent` and
    `received` are the messages of each channel in order.
    """

    def __init__(self, program: Program, rules: Rules, rank: int) -> None:
        self.program, self.rules, self.rank = program, rules, rank
        self.own = rules.of_rank[rank]
        self.num_actions = self.peak_live = 0
        self.moves = array("q")
        self.sent: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
        self.received: dict[Channel, array[int]] = defaultdict(lambda: array("q"))

    def check_order(self) -> None:
        """Each action is due here, not yet done, and behind what it needs; none is missing."""
        own, given, live = self.own, bytearray(self.rules.num_facts), 0
        position, last = 0, None
        for position, last in enumerate(flatten(self.program.ranks[self.rank]), start=1):
            rule, microbatch = own[last.op].get(last.stage), last.microbatch
            if rule is None or microbatch not in rule.microbatches:
                raise self._foreign(position, last)
            for fact in rule.needs:
                if not given[fact + microbatch]:
                    raise self._too_early(position, last, fact + microbatch)
            for fact in rule.gives:
                if given[fact + microbatch]:
                    raise self._repeated(position, last, fact + microbatch)
                given[fact + microbatch] = 1
            if rule.message is not None:
                self._record(last.op, rule, rule.message + microbatch)
            if rule.opens:
                live += 1
                self.peak_live = max(self.peak_live, live)
            if rule.closes:
                live -= 1
        self.num_actions = position
        self._check_complete(given, last)
        self._check_live()

    def _record(self, op: Op, rule: Rule, message: int) -> None:
        assert rule.channel is not None
        if op in SENDS:
            self.sent[rule.channel].append(message)
            self.moves.append(3 * message + _Move.SEND)
        elif op in RECEIVES:
            self.received[rule.channel].append(message)
            self.moves.append(3 * message + _Move.POST)
        else:
            self.moves.append(3 * message + _Move.AWAIT)

    def _check_complete(self, given: bytearray, last: Action | None) -> None:
        for fact, microbatches in self.rules.facts_due(self.rank).items():
            part = given[fact + microbatches.start : fact + microbatches.stop]
            if (missing := part.find(0)) >= 0:
                wanted = _either(self.rules.givers(fact + microbatches.start + missing))
                raise ScheduleError(f"rank {self.rank}: {wanted} is missing")
        if self.program.schedule.training and (last is None or last.op is not Op.STEP):
            raise ScheduleError(f"rank {self.rank}: STEP must be the last action, but {last} comes behind it")

    def _check_live(self) -> None:
        bound = self.program.schedule.live_bound
        if bound is not None and self.peak_live > bound[self.rank]:
            raise ScheduleError(
                f"rank {self.rank}: {self.peak_live} tapes are live at once, "
                f"{self.program.schedule.name} promises at most {bound[self.rank]}"
            )

    def _foreign(self, position: int, action: Action) -> ScheduleError:
        rule = self.own[action.op].get(action.stage)
        where = f"rank {self.rank}, action {position}: {action}"
        if rule is not None:
            last = rule.microbatches.stop - 1
            return ScheduleError(f"{where} has a microbatch the stage does not see, the last one is {last}")
        placement = self.program.placement
        if action.op is not Op.STEP and not 0 <= action.stage < placement.num_stages:
            return ScheduleError(f"{where} names a stage that is not there, the last one is {placement.num_stages - 1}")
        if action.op is not Op.STEP and (home := placement.rank_of(action.stage)) != self.rank:
            return ScheduleError(f"{where} belongs on rank {home}, which holds stage {action.stage}")
        if action.op in SENDS | RECEIVES:
            return ScheduleError(f"{where} has no other rank at its far end: the neighbour is on this rank, or is none")
        return ScheduleError(f"{where} has no place in a forward-only program")

    def _too_early(self, position: int, action: Action, fact: int) -> ScheduleError:
        wanted = self.rules.givers(fact)
        later = [at for at, other in enumerate(flatten(self.program.ranks[self.rank]), start=1) if other in wanted]
        found = f"which comes only at action {later[0]}" if later else "which this rank does not have"
        return ScheduleError(f"rank {self.rank}, action {position}: {action} waits for {_either(wanted)}, {found}")

    def _repeated(self, position: int, action: Action, fact: int) -> ScheduleError:
        wanted = self.rules.givers(fact)
        actions = enumerate(flatten(self.program.ranks[self.rank]), start=1)
        first_position, first = next((at, other) for at, other in actions if other in wanted)
        return ScheduleError(
            f"rank {self.rank}, action {position}: {action} repeats what {first} did at action {first_position}"
        )


def _either(actions: tuple[Action, ...]) -> str:
    return " or ".join(map(str, actions))


def _check_channels(rules: Rules, walks: list[_Walk]) -> int:
    """Both ends of every channel name the same messages in the same order; returns how many there are."""
    num_messages = 0
    for channel in rules.channels():
        sent = walks[channel.source].sent[channel]
        received = walks[channel.destination].received[channel]
        if sent != received:
            # Both ends are complete, so they have the same messages and differ in order alone.
            place = next(place for place, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
            raise ScheduleError(
                f"rank {channel.source} sends {partner(rules.receive_of(sent[place]))} as message {place + 1} to rank "
                f"{channel.destination}, which waits there for {rules.receive_of(received[place])}: "
                f"both ends of a channel must have one order"
            )
        num_messages += len(sent)
    return num_messages


def _check_progress(rules: Rules, walks: list[_Walk]) -> None:
    """Carry out all ranks' moves, a send waiting until its receive is posted, a compute until its message was sent.

    Each move is looked at once or twice: a rank that must wait is put aside until the move it waits for is made.
    """
    done = bytearray(3 * rules.num_facts)
    next_move = [0] * len(walks)
    put_aside: dict[int, int] = {}  # by the move that is waited for, the rank that waits
    ready = list(range(len(walks)))
    while ready:
        rank = ready.pop()
        moves, at = walks[rank].moves, next_move[rank]
        while at < len(moves):
            move = moves[at]
            kind = move % 3
            # A send waits for the post (one below it), a compute for the send (one below it).
            if kind != _Move.POST and not done[move - 1]:
                put_aside[move - 1] = rank
                break
            done[move] = 1
            if (woken := put_aside.pop(move, None)) is not None:
                ready.append(woken)
            at += 1
        next_move[rank] = at
    if put_aside:
        waits = {rank: move for move, rank in put_aside.items()}
        raise _deadlock(rules, walks, waits)


def _deadlock(rules: Rules, walks: list[_Walk], waits: dict[int, int]) -> ScheduleError:
    """The error that tells of a ring of ranks each of which waits for the next.

    Every rank that is waited for is itself in `waits`: its program is complete, so the move is still ahead of it.
    """
    peers = {rank: _peer(rules, move) for rank, move in waits.items()}
    ring, rank = [], min(waits)
    while rank not in ring:
        ring.append(rank)
        rank = peers[rank]
    ring = ring[ring.index(rank) :]
    sentences = [_waiting(rules, walks[rank], waits[rank], peers[rank]) for rank in ring]
    return ScheduleError(f"deadlock, if sends wait for their receives: {'; '.join(sentences)}")


def _peer(rules: Rules, move: int) -> int:
    """The rank that has to make a move."""
    message, kind = divmod(move, 3)
    receive = rules.receive_of(message)
    return rules.placement.rank_of(receive.stage if kind == _Move.POST else partner(receive).stage)


def _waiting(rules: Rules, walk: _Walk, move: int, peer: int) -> str:
    """What a rank waits for, where `move` is the one that is due from `peer`."""
    message, kind = divmod(move, 3)
    receive = rules.receive_of(message)
    if kind == _Move.POST:
        return f"rank {walk.rank} at {partner(receive)} waits until rank {peer} posts {receive}"
    ops = FORWARD.computes if receive.op is FORWARD.receive else BACKWARD.computes
    users = [Action(op, receive.stage, receive.microbatch) for op in ops]
    user = next(action for action in flatten(walk.program.ranks[walk.rank]) if action in users)
    return f"rank {walk.rank} at {user} waits until rank {peer} starts {partner(receive)}"
