"""Why a step takes as long as it does: the chain of actions none of which could have started earlier."""

from __future__ import annotations

from penstock.schedule.actions import Action, Op, Program, parts
from penstock.schedule.costs import Costs, Durations
from penstock.schedule.rules import Rules, partner
from penstock.schedule.simulate import simulate
from penstock.schedule.timeline import Event

_MAKERS = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}


def critical_path(program: Program, costs: Costs | None = None) -> tuple[Event, ...]:
    """The events, first to last, that a verified program's makespan consists of under the given times.

    Each starts when the one before it ends, on the same rank, or when a message from it arrives; where both are so, the
    path stays on the rank. Only to shorten one of these, or a transfer between two of them, can shorten the step.

    Raises: as `simulate`.
    """
    return _Search(program, costs or Costs()).path()


class _Search:
    """The way back from the last event to the start, from each event to what it waited for."""

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
        """The event that ended when this one started; reductions are waited for by each other and by the step alone."""
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
