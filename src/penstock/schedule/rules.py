"""The rules of order, written once: lowering, proof and simulation all read them here.

An action *gives* facts ("the output of stage 2 for microbatch 5 exists") and *needs* facts that earlier actions of the
same rank gave, as the table of kinds says. Results of another rank come by a message: a `RECV_*` action posts the
receive, which gives a fact, and the compute action that needs it also waits until the message has arrived.

A rule is the same for each microbatch of a stage, and facts are numbered, so that a program of a million actions is
proved in seconds: a rule holds numbers to which an action adds its microbatch. Only `Rules.number` knows the numbering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.actions import (
    ALL,
    PLACED,
    TRANSFERS,
    Action,
    Direction,
    FactKind,
    Op,
    Pair,
    Schedule,
    Scope,
    Step,
    TapeState,
)
from penstock.schedule.placement import Placement
from penstock.settings.declare import check_argument


class Fact(NamedTuple):
    """Something that is true once an action has been carried out."""

    kind: FactKind
    stage: int
    microbatch: int


_KINDS = tuple(FactKind)

_GIVERS = {kind: tuple(op for op in Op if kind in op.gives) for kind in FactKind}

_PARTNERS = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}


def partner(transfer: Action) -> Action:
    """Return the transfer at the other end: the receive of a send, or the send of a receive.

    >>> print(partner(Action(Op.SEND_F, stage=0, microbatch=3)))
    1RECV_F3
    """
    op, distance = _PARTNERS[transfer.op]
    return Action(op, transfer.stage + distance, transfer.microbatch)


class Channel(NamedTuple):
    """A one-way line between two ranks, first in first out, for the tensors of one direction.

    >>> Channel(source=0, destination=1, direction=Direction.FORWARD).direction.name
    'FORWARD'
    """

    source: int
    destination: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction through one stage: where its input comes from and where its result goes to."""

    direction: Direction
    #: The stage that gives the input; None at the model's end.
    source: int | None
    #: The channel by which the input arrives; None at the model's end, or from a stage of the same rank.
    arriving: Channel | None
    #: The stage that takes the result; None at the model's end.
    target: int | None
    #: The channel by which the result leaves; None at the model's end, or to a stage of the same rank.
    leaving: Channel | None

    @classmethod
    def of(cls, placement: Placement, stage: int, direction: Direction) -> Wire:
        ends = (placement.previous(stage), placement.next(stage))
        source, target = ends if direction is Direction.FORWARD else reversed(ends)

        def channel(giver: int | None, taker: int | None) -> Channel | None:
            if giver is None or taker is None or placement.rank_of(giver) == placement.rank_of(taker):
                return None
            return Channel(placement.rank_of(giver), placement.rank_of(taker), direction)

        return cls(direction, source, channel(source, stage), target, channel(stage, target))


LOSS_AGAIN = "would compute the loss again: the stage that gives it keeps its activations"
"""Why there is no R at the last stage."""


def channels_of(placement: Placement) -> tuple[Channel, ...]:
    """Every channel between ranks, in the order in which all of them create it."""
    found = (Wire.of(placement, stage, direction) for stage in range(placement.num_stages) for direction in Direction)
    return tuple(sorted({wire.leaving for wire in found if wire.leaving is not None}))


@dataclass(frozen=True, slots=True)
class Flow:
    """The ops and facts of one direction; the rules of both directions are the same."""

    direction: Direction
    computes: tuple[Op, ...]
    receive: Op
    send: Op

    @property
    def posted(self) -> FactKind:
        return self.receive.gives[0]

    @property
    def made(self) -> FactKind:
        return self.send.needs[0]

    @property
    def sent(self) -> FactKind:
        return self.send.gives[0]


FORWARD = Flow(Direction.FORWARD, (Op.F,), Op.RECV_F, Op.SEND_F)
BACKWARD = Flow(Direction.BACKWARD, (Op.B, Op.I), Op.RECV_B, Op.SEND_B)


@dataclass(frozen=True, slots=True)
class Rule:
    """The facts that one op on one stage needs and gives, by numbers relative to the microbatch.

    >>> from penstock.schedule import build
    >>> rules = Rules(build("1f1b", ranks=2, microbatches=3))
    >>> rule = rules.of_rank[0][Op.B][0]
    >>> [rules.fact(number + 2).kind.name for number in rule.needs]
    ['OUTPUT', 'OUTPUT_GRADIENT_POSTED']
    """

    #: The microbatches that the op is for.
    microbatches: range
    #: The facts that must be true before; adding the action's microbatch gives a fact's number.
    needs: tuple[int, ...]
    #: The facts that are true afterwards, numbered as in `needs`.
    gives: tuple[int, ...]
    #: The message that a transfer carries or a compute action waits for, named by the fact that its receive gives.
    message: int | None = None
    #: The fact on another rank that the action waits for, if every send waits for its receive.
    awaits: int | None = None
    #: The channel that the message takes.
    channel: Channel | None = None
    #: The transfer that has to follow a compute action.
    send: Op | None = None
    #: True if a tape begins when the action starts.
    opens: bool = False
    #: True if a tape ends when the action ends.
    closes: bool = False


class Rules:
    """All rules of a schedule.

    >>> from penstock.schedule import build
    >>> rules = Rules(build("1f1b", ranks=2, microbatches=3))
    >>> print(rules.of_rank[0][Op.F][0].microbatches, rules.of_rank[0][Op.F].get(1))
    range(0, 3) None
    """

    #: `of_rank[rank][op][stage]`; without a stage if the rank has no such action.
    of_rank: list[list[dict[int, Rule]]]
    #: One more than the highest fact number.
    num_facts: int
    #: The schedule, and the placement of its stages.
    schedule: Schedule
    placement: Placement
    #: Facts of a kind and stage: one for all microbatches, then one for each.
    _facts_per_stage: int

    def __init__(self, schedule: Schedule) -> None:
        check_argument("schedule", schedule, Schedule)
        self.schedule, self.placement = schedule, schedule.placement
        self._facts_per_stage = schedule.num_microbatches + 1
        self.num_facts = len(FactKind) * self.placement.num_stages * self._facts_per_stage
        self.of_rank = [[{} for _ in Op] for _ in range(self.placement.num_ranks)]
        for stage in range(self.placement.num_stages):
            own = self.of_rank[self.placement.rank_of(stage)]
            for op, rule in self._rules_of(stage):
                own[op][stage] = rule
        for own in self.of_rank if schedule.training else ():
            stages, (reduced,), (stepped,) = list(own[Op.REDUCE_GRAD]), Op.STEP.needs, Op.STEP.gives
            needs = (self.number(Fact(reduced, stage, ALL)) for stage in stages)
            own[Op.STEP][ALL] = self._rule_for_all(needs, self.number(Fact(stepped, stages[0], ALL)))

    def number(self, fact: Fact) -> int:
        """The number of a fact; facts of one kind and stage are numbered in the order of their microbatches."""
        kind, stage, microbatch = fact
        return (kind * self.placement.num_stages + stage) * self._facts_per_stage + microbatch - ALL

    def fact(self, number: int) -> Fact:
        """The fact with this number."""
        place, offset = divmod(number, self._facts_per_stage)
        kind, stage = divmod(place, self.placement.num_stages)
        return Fact(_KINDS[kind], stage, offset + ALL)

    def givers(self, number: int) -> tuple[Action, ...]:
        """The actions that give a fact; any one of them is enough."""
        kind, stage, microbatch = self.fact(number)
        return tuple(Action(op) if op.scope is Scope.RANK else Action(op, stage, microbatch) for op in _GIVERS[kind])

    def receive_of(self, message: int) -> Action:
        """The action that posts the receive of a message."""
        kind, stage, microbatch = self.fact(message)
        (receive,) = _GIVERS[kind]
        return Action(receive, stage, microbatch)

    def channels(self) -> tuple[Channel, ...]:
        """Every channel in use, in the order that all ranks share."""
        directions = Direction if self.schedule.training else (Direction.FORWARD,)
        return tuple(channel for channel in channels_of(self.placement) if channel.direction in directions)

    def _rules_of(self, stage: int) -> Iterator[tuple[Op, Rule]]:
        """Yield every op that a stage takes part in, with its rule."""
        yield from self._flow_rules(FORWARD, stage)
        if not self.schedule.training:
            return
        yield from self._flow_rules(BACKWARD, stage)
        microbatches = self.schedule.microbatches_of(stage)
        for op in PLACED - {*FORWARD.computes, *BACKWARD.computes}:
            if op is Op.R and self.placement.is_last(stage):
                continue  # the loss would be computed again, and the backward comes next
            needs, gives = (tuple(self._first(kind, stage) for kind in kinds) for kinds in (op.needs, op.gives))
            yield op, Rule(microbatches, needs, gives, closes=op.leaves is TapeState.NONE)
        (written,), (reduced,) = Op.REDUCE_GRAD.needs, Op.REDUCE_GRAD.gives
        each = (self._first(written, stage) + microbatch for microbatch in microbatches)
        yield Op.REDUCE_GRAD, self._rule_for_all(each, self.number(Fact(reduced, stage, ALL)))

    def _flow_rules(self, flow: Flow, stage: int) -> Iterator[tuple[Op, Rule]]:
        """Yield the rules for the tensors that reach a stage from one neighbour and leave for the other."""
        microbatches, training = self.schedule.microbatches_of(stage), self.schedule.training
        wire = Wire.of(self.placement, stage, flow.direction)
        posted, made, sent = (self._first(kind, stage) for kind in (flow.posted, flow.made, flow.sent))

        source = () if wire.source is None else (posted if wire.arriving else self._first(flow.made, wire.source),)
        for op in flow.computes:
            rule = Rule(
                microbatches,
                needs=(*(self._first(kind, stage) for kind in op.needs), *source),
                gives=tuple(self._first(kind, stage) for kind in op.gives),
                message=posted if wire.arriving else None,
                awaits=None if not wire.arriving or wire.source is None else self._first(flow.sent, wire.source),
                channel=wire.arriving,
                send=flow.send if wire.leaving else None,
                opens=TapeState.NONE in op.takes,
                closes=op.leaves is TapeState.NONE or not training,
            )
            yield op, rule
        if wire.arriving:
            yield flow.receive, Rule(microbatches, (), (posted,), message=posted, channel=wire.arriving)
        if wire.leaving and wire.target is not None:
            there = self._first(flow.posted, wire.target)
            yield flow.send, Rule(microbatches, (made,), (sent,), message=there, awaits=there, channel=wire.leaving)

    def _first(self, kind: FactKind, stage: int) -> int:
        """The number of a fact for microbatch 0, to which each action adds its own microbatch."""
        return self.number(Fact(kind, stage, microbatch=0))

    @staticmethod
    def _rule_for_all(needs: Iterable[int], gives: int) -> Rule:
        """Make the rule of an action on `ALL` microbatches, a number that it adds to the rule's like any other."""
        return Rule(range(ALL, ALL + 1), tuple(number - ALL for number in needs), (gives - ALL,))


def early_sends(steps: Sequence[Step]) -> frozenset[Action]:
    """Find the sends of a rank's program that leave before the step that makes their tensor has ended.

    Such a step is a fused pair, whose other action is still running, or a `B`, which still computes weight gradients.
    Only transfers lie between the step and the send, and the send overtakes no other in its direction. A runtime never
    blocks in a send, so no rank waits longer than if each send left after its step, as proof and simulation have it.

    >>> from penstock.schedule.actions import Pair
    >>> pair = Pair(Action(Op.F, 1, 1), Action(Op.B, 1, 0))
    >>> print(*sorted(map(str, early_sends([pair, Action(Op.SEND_F, 1, 1), Action(Op.SEND_B, 1, 0)]))))
    1SEND_B0 1SEND_F1
    """
    early: list[Action] = []
    # The send that is due -> the result of the last step that it has not sent yet.
    due: dict[Op, tuple[int, int]] = {}
    for step in steps:
        if isinstance(step, Pair):
            f, b = step.forward, step.backward
            due = {Op.SEND_F: (f.stage, f.microbatch), Op.SEND_B: (b.stage, b.microbatch)}
        elif step.op is Op.B:
            due = {Op.SEND_B: (step.stage, step.microbatch)}
        elif step.op not in TRANSFERS:
            due = {}
        elif step.op in due and due.pop(step.op) == (step.stage, step.microbatch):
            early.append(step)
    return frozenset(early)
