"""Orders for a V placement from a repeated pattern, squeezed: each action runs as early as memory allows.

As in the papers, an F, an I and a W of one stage take one slot each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.actions import Action, Op, Placement
from penstock.schedule.builders.orders import peak_tapes

PERIOD = 6  # slots between one microbatch and the next: a rank has an F, an I and a W for each of its two stages
Order = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Preference:
    """The preference among the actions that a rank could start."""

    #: Prefer the action deepest in the pipeline; else the one that comes first in the pattern.
    deepest_first: bool
    #: Admit no more microbatches than the pattern has in progress on the rank.
    steady_entry: bool


PREFERENCES = tuple(Preference(*flags) for flags in ((False, False), (False, True), (True, True)))


def pattern(placement: Placement, num_microbatches: int, step: int, gaps: tuple[int, int, int]) -> list[Order] | None:
    """Each rank's forwards and input backwards, in the order of a building block that repeats every period.

    On the way down the ranks a microbatch's actions start `step` slots apart, on the way up one slot. `gaps` has the
    slots between starts at the three turns: down to up, forward to backward, down to up again. The result is None if
    two actions of a rank fall into one slot.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3.
    """
    last = placement.num_ranks - 1
    offsets, start = [], 0
    for gap in (*gaps, 0):
        offsets.append(start)
        start += gap + last * (step if len(offsets) % 2 else 1)
    orders = []
    for rank in range(placement.num_ranks):
        first, second = placement.stages_of(rank)
        down, up = step * rank, last - rank
        works = ((Op.F, first, down), (Op.F, second, up), (Op.I, second, down), (Op.I, first, up))
        starts = [(offset + wait, op, stage) for offset, (op, stage, wait) in zip(offsets, works, strict=True)]
        if len({start % PERIOD for start, _, _ in starts}) < len(starts):
            return None
        timed = sorted(
            (start + PERIOD * m, op, stage, m) for start, op, stage in starts for m in range(num_microbatches)
        )
        orders.append(tuple(Action(op, stage, microbatch) for _, op, stage, microbatch in timed))
    return orders


@dataclass(frozen=True, slots=True)
class Squeezed:
    """Orders with their W, and the slots that they take."""

    #: The slots that the slowest rank takes, from its first start to its end.
    span: int
    #: The slots until all ranks have ended.
    makespan: int
    orders: tuple[Order, ...]


def squeeze(placement: Placement, orders: Sequence[Order], preference: Preference, max_tapes: int) -> Squeezed | None:
    """Run every rank's actions as early as possible, and W when nothing else can run; None if the ranks get stuck.

    An action may overtake those before it in its rank's order if the remaining order, with each W right after its I,
    still keeps to `max_tapes`.
    """
    ends = _Ends({}, {})
    ranks = [_SqueezedRank(placement, order, preference, max_tapes) for order in orders]
    slot = 0
    while not all(rank.finished for rank in ranks):
        acted = [rank.act(slot, ends) for rank in ranks]
        if not any(acted):
            return None
        slot += 1
    spans = [rank.end - rank.start for rank in ranks]
    return Squeezed(max(spans), max(rank.end for rank in ranks), tuple(tuple(rank.done) for rank in ranks))


class _Ends(NamedTuple):
    """The slots at which the forwards and input backwards ended, by stage and microbatch."""

    forward: dict[tuple[int, int], int]
    backward: dict[tuple[int, int], int]


class _SqueezedRank:
    """One rank's run through its order."""

    #: (op, stage) -> the pass it belongs to, along a microbatch's way: forward through both stages is 0, 1; back 2, 3.
    passes: dict[tuple[Op, int], int]
    #: The most microbatches that the pattern has between their first pass and their last.
    max_entered: int
    #: The rule by which the rank picks its next action, and the most tapes that it may keep.
    preference: Preference
    max_tapes: int
    #: Where the stages lie.
    placement: Placement
    #: The actions of the order that have not run, and the W that can.
    rest: list[Action]
    weights: deque[Action]
    #: The tapes that are live, and the microbatches between their first pass and their last.
    live: int
    entered: int
    #: The first slot in which the rank did something, and the end of the last.
    start: int
    end: int
    #: The actions so far.
    done: list[Action]

    def __init__(self, placement: Placement, order: Order, preference: Preference, max_tapes: int) -> None:
        self.placement, self.preference, self.max_tapes = placement, preference, max_tapes
        self.rest, self.weights = list(order), deque[Action]()
        first, second = placement.stages_of(placement.rank_of(order[0].stage))
        self.passes = {(Op.F, first): 0, (Op.F, second): 1, (Op.I, second): 2, (Op.I, first): 3}
        self.max_entered = peak_tapes([_whole(action) for action in order if action.stage == first])
        self.live = self.entered = self.start = self.end = 0
        self.done = []

    @property
    def finished(self) -> bool:
        return not self.rest and not self.weights

    def act(self, slot: int, ends: _Ends) -> bool:
        """Start an action in this slot, if one can start; return False if none can."""
        place = self._choice(slot, ends)
        wait_for_memory = place is not None and self.rest[place].op is Op.F and self.live == self.max_tapes
        if place is not None and not wait_for_memory:
            action = self.rest.pop(place)
            self._count(action, slot + 1, ends)
        elif self.weights:
            action = self.weights.popleft()
            self.live -= 1
        else:
            return False
        self.start = self.start if self.done else slot
        self.end = slot + 1
        self.done.append(action)
        return True

    def _count(self, action: Action, end: int, ends: _Ends) -> None:
        work = action.stage, action.microbatch
        self.entered += {0: 1, 3: -1}.get(self.passes[action.op, action.stage], 0)
        if action.op is Op.F:
            ends.forward[work] = end
            self.live += 1
        else:
            ends.backward[work] = end
            self.weights.append(Action(Op.W, *work))

    def _choice(self, slot: int, ends: _Ends) -> int | None:
        """Choose the place of the action to take, if any; memory kept only for a W counts as free."""
        best, seen = None, set[int]()
        live = highest = self.live - len(self.weights)
        for place, action in enumerate(self.rest):
            number, tapes = self.passes[action.op, action.stage], 1 if action.op is Op.F else -1
            if number not in seen:
                seen.add(number)
                fits = highest + tapes <= self.max_tapes and (number > 0 or self._may_enter())
                if fits and self._ready(action, slot, ends):
                    # Counted from the second pass on, so that the first pass comes last.
                    found = ((number - 1) % 4 if self.preference.deepest_first else place), place
                    best = min(best, found) if best else found
                    if not self.preference.deepest_first:
                        break
                if len(seen) == len(self.passes):
                    break
            live += tapes
            highest = max(highest, live)
        return best[1] if best else None

    def _may_enter(self) -> bool:
        return not self.preference.steady_entry or self.entered < self.max_entered

    def _ready(self, action: Action, slot: int, ends: _Ends) -> bool:
        """True if everything that an action needs was done before this slot."""
        stage, microbatch = action.stage, action.microbatch
        never = slot + 1
        if action.op is Op.F:
            source = self.placement.previous(stage)
            return source is None or ends.forward.get((source, microbatch), never) <= slot
        source = self.placement.next(stage)
        arrived = source is None or ends.backward.get((source, microbatch), never) <= slot
        return arrived and ends.forward.get((stage, microbatch), never) <= slot


def _whole(action: Action) -> Action:
    """The action that would end the tape if W followed I at once."""
    return Action(Op.B, action.stage, action.microbatch) if action.op is Op.I else action
