"""What must come before what, written once: lowering, proof and simulation all read it here.

Every action *gives* facts ("the output of stage 2 for microbatch 5 is there") and *needs* facts that earlier actions of
the same rank gave. What another rank computed comes by a message: a `RECV_*` action posts the receive, which gives a
fact, and the compute action that needs it also waits until the message has arrived.

Facts are whole numbers, so that programs of a million actions are proved in seconds: a rule holds the number that a
fact has for microbatch 0, and adding the action's microbatch gives the fact itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from penstock.schedule.actions import Action, Op, Schedule


class Fact(IntEnum):
    """What can be true of a stage and a microbatch; `REDUCED` of a stage alone, `STEPPED` of a rank's first stage."""

    INPUT_POSTED = 0
    OUTPUT = 1
    OUTPUT_SENT = 2
    OUTPUT_GRADIENT_POSTED = 3
    INPUT_GRADIENT = 4
    INPUT_GRADIENT_SENT = 5
    WEIGHT_GRADIENT = 6
    REDUCED = 7
    STEPPED = 8


GIVERS = {
    Fact.INPUT_POSTED: (Op.RECV_F,),
    Fact.OUTPUT: (Op.F,),
    Fact.OUTPUT_SENT: (Op.SEND_F,),
    Fact.OUTPUT_GRADIENT_POSTED: (Op.RECV_B,),
    Fact.INPUT_GRADIENT: (Op.B, Op.I),
    Fact.INPUT_GRADIENT_SENT: (Op.SEND_B,),
    Fact.WEIGHT_GRADIENT: (Op.B, Op.W),
    Fact.REDUCED: (Op.REDUCE_GRAD,),
    Fact.STEPPED: (Op.STEP,),
}

_NO_MICROBATCH = range(-1, 0)

_PARTNERS = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}


def partner(transfer: Action) -> Action:
    """The transfer at the other end: the receive that a send meets, or the send that a receive waits for."""
    op, distance = _PARTNERS[transfer.op]
    return Action(op, transfer.stage + distance, transfer.microbatch)


@dataclass(frozen=True, slots=True)
class Flow:
    """One of the two directions in which tensors run through the stages; the wiring of both is the same."""

    computes: tuple[Op, ...]
    receive: Op
    send: Op
    posted: Fact
    made: Fact
    sent: Fact


FORWARD = Flow((Op.F,), Op.RECV_F, Op.SEND_F, Fact.INPUT_POSTED, Fact.OUTPUT, Fact.OUTPUT_SENT)
BACKWARD = Flow(
    (Op.B, Op.I),
    Op.RECV_B,
    Op.SEND_B,
    Fact.OUTPUT_GRADIENT_POSTED,
    Fact.INPUT_GRADIENT,
    Fact.INPUT_GRADIENT_SENT,
)


class Channel(NamedTuple):
    """A one-way line between two ranks, first in first out: `Op.F` is that of activations, `Op.B` that of gradients."""

    source: int
    destination: int
    direction: Op


@dataclass(frozen=True, slots=True)
class Rule:
    """What one op on one stage needs and gives, alike for each of its `microbatches`.

    `message` is what a transfer carries or a compute action waits for, named by the fact that its receive gives, and
    `channel` the line it takes. `send` is the transfer that has to follow a compute action. A tape is there from the
    start of an action that `opens` it to the end of the one that `closes` it.
    """

    microbatches: range
    needs: tuple[int, ...]
    gives: tuple[int, ...]
    message: int | None = None
    channel: Channel | None = None
    send: Op | None = None
    opens: bool = False
    closes: bool = False


class Rules:
    """All rules of a schedule: `of_rank[rank][op][stage]`, with nothing where a rank has no such action."""

    def __init__(self, schedule: Schedule) -> None:
        self.placement = schedule.placement
        self.schedule = schedule
        # The first place of each stage is for facts without a microbatch, whose microbatch is -1.
        self._stride = schedule.num_microbatches + 1
        self.num_facts = len(Fact) * self.placement.num_stages * self._stride
        self.of_rank: list[list[dict[int, Rule]]] = [[{} for _ in Op] for _ in range(self.placement.num_ranks)]
        for stage in range(self.placement.num_stages):
            own = self.of_rank[self.placement.rank_of(stage)]
            for op, rule in self._rules_of(stage):
                own[op][stage] = rule
        for own in self.of_rank if schedule.training else ():
            stages = list(own[Op.REDUCE_GRAD])
            # Counted from microbatch -1, which is the step's own.
            needs = tuple(self._fact(Fact.REDUCED, stage) for stage in stages)
            own[Op.STEP][-1] = Rule(_NO_MICROBATCH, needs, (self._fact(Fact.STEPPED, stages[0]),))

    def _rules_of(self, stage: int) -> Iterator[tuple[Op, Rule]]:
        """Every op that a stage takes part in, with its rule."""
        previous, following = self.placement.previous(stage), self.placement.next(stage)
        yield from self._flow_rules(FORWARD, stage, previous, following)
        if not self.schedule.training:
            return
        yield from self._flow_rules(BACKWARD, stage, following, previous)
        microbatches = self.schedule.microbatches_of(stage)
        weight_gradient = self._fact(Fact.WEIGHT_GRADIENT, stage)
        gradient = self._fact(Fact.INPUT_GRADIENT, stage)
        yield Op.W, Rule(microbatches, (gradient,), (weight_gradient,), closes=True)
        # Counted from microbatch -1, which is the reduction's own.
        written = tuple(weight_gradient + 1 + microbatch for microbatch in microbatches)
        yield Op.REDUCE_GRAD, Rule(_NO_MICROBATCH, written, (self._fact(Fact.REDUCED, stage),))

    def _flow_rules(self, flow: Flow, stage: int, source: int | None, target: int | None) -> Iterator[tuple[Op, Rule]]:
        """What a stage does with the tensors that come from one neighbour and go to the other."""
        microbatches, training = self.schedule.microbatches_of(stage), self.schedule.training
        line_in, line_out = self._channel(flow, source, stage), self._channel(flow, stage, target)
        posted, made, sent = (self._fact(kind, stage) for kind in (flow.posted, flow.made, flow.sent))

        needs = [] if flow is FORWARD else [self._fact(Fact.OUTPUT, stage)]
        if source is not None:
            needs.append(posted if line_in else self._fact(flow.made, source))
        for op in flow.computes:
            rule = Rule(
                microbatches,
                needs=tuple(needs),
                gives=(made, self._fact(Fact.WEIGHT_GRADIENT, stage)) if op is Op.B else (made,),
                message=posted if line_in else None,
                channel=line_in,
                send=flow.send if line_out else None,
                opens=op is Op.F,
                closes=op is Op.B or not training,
            )
            yield op, rule
        if line_in:
            yield flow.receive, Rule(microbatches, (), (posted,), posted, line_in)
        if line_out and target is not None:
            yield flow.send, Rule(microbatches, (made,), (sent,), self._fact(flow.posted, target), line_out)

    def _channel(self, flow: Flow, source: int | None, target: int | None) -> Channel | None:
        """The line between two neighbours; none beyond the model's ends, nor where one rank holds both stages."""
        if source is None or target is None:
            return None
        ranks = self.placement.rank_of(source), self.placement.rank_of(target)
        return Channel(*ranks, flow.computes[0]) if ranks[0] != ranks[1] else None

    def _fact(self, kind: Fact, stage: int) -> int:
        """The number of a fact for microbatch 0."""
        return (kind * self.placement.num_stages + stage) * self._stride + 1

    def givers(self, fact: int) -> tuple[Action, ...]:
        """The actions any one of which gives a fact."""
        place, offset = divmod(fact, self._stride)
        kind, stage = divmod(place, self.placement.num_stages)
        ops = GIVERS[Fact(kind)]
        return tuple(Action(op) if op is Op.STEP else Action(op, stage, offset - 1) for op in ops)

    def receive_of(self, message: int) -> Action:
        """The action that posts the receive of a message."""
        (receive,) = self.givers(message)
        return receive

    def facts_due(self, rank: int) -> dict[int, range]:
        """The facts that a complete program gives on a rank, each with the microbatches it is due for."""
        rules = (rule for of_stage in self.of_rank[rank] for rule in of_stage.values())
        return {fact: rule.microbatches for rule in rules for fact in rule.gives}

    def channels(self) -> tuple[Channel, ...]:
        """Every line that the placement uses, in one order which all ranks share."""
        rules = (rule for own in self.of_rank for of_stage in own for rule in of_stage.values())
        return tuple(sorted({rule.channel for rule in rules if rule.channel is not None}))
