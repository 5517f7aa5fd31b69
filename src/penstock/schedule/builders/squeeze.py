"""Orders for a V placement from a repeated pattern, squeezed: each action runs as early as memory allows.

As in the papers, an F, an I and a W of one stage take one slot each.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from penstock.schedule.actions import Action, Op, peak_tapes
from penstock.schedule.placement import Placement

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
    num_microbatches = 1 + max((action.microbatch for order in orders for action in order), default=-1)
    ends: _Ends = {
        (op, stage): [_NEVER] * num_microbatches for op in (Op.F, Op.I) for stage in range(placement.num_stages)
    }
    ranks = [_SqueezedRank(placement, order, preference, max_tapes, ends) for order in orders]
    # A rank that can start nothing is asked again when another's action has given it something: asking every rank in
    # every slot would take ranks times slots.
    slot, asked = 0, set(range(len(ranks)))
    while asked:
        following: set[int] = set()
        for number in asked:
            if (woken := ranks[number].act(slot)) is not None:
                following |= {number, woken}
        slot, asked = slot + 1, following
    if any(rank.weights or any(one.rest for one in rank.passes) for rank in ranks):
        return None
    spans = [rank.end - rank.start for rank in ranks]
    return Squeezed(max(spans), max(rank.end for rank in ranks), tuple(tuple(rank.done) for rank in ranks))


_NEVER = sys.maxsize
_Ends: TypeAlias = dict[tuple[Op, int], list[int]]
"""The slots at which forwards and input backwards end, by microbatch; `_NEVER` before they have run."""


class _Pass:
    """One of a rank's four passes, each of all microbatches: forward through both stages is 0, 1; back 2, 3."""

    #: Its number, and the change in the number of live tapes when W follows I at once.
    number: int
    tapes: int
    #: The actions that have not run, with their places in the rank's order.
    rest: deque[tuple[int, Action]]
    #: The ends of what its actions need, of another stage and of their own, and of themselves, by microbatch.
    needs: tuple[list[int], list[int]]
    ends: list[int]
    #: The rank that waits for its actions.
    waiting: int

    def __init__(self, number: int, action: Action, placement: Placement, ends: _Ends) -> None:
        op, stage = action.op, action.stage
        self.number, self.tapes, self.rest = number, 1 if op is Op.F else -1, deque()
        previous, next_ = placement.previous(stage), placement.next(stage)
        source, target = (previous, next_) if op is Op.F else (next_, previous)
        self.ends = ends[op, stage]
        nothing = [0] * len(self.ends)
        self.needs = nothing if source is None else ends[op, source], ends[Op.F, stage] if op is Op.I else nothing
        self.waiting = placement.rank_of(stage if target is None else target)

    @property
    def place(self) -> int:
        """The place of its next action in the rank's order."""
        return self.rest[0][0]

    def is_ready(self, slot: int) -> bool:
        """True if everything that its next action needs was done before this slot."""
        microbatch, (other, own) = self.rest[0][1].microbatch, self.needs
        return other[microbatch] <= slot and own[microbatch] <= slot


class _SqueezedRank:
    """One rank's run through its order."""

    #: The four passes, in the order in which they are preferred if the deepest one is.
    passes: list[_Pass]
    #: The most microbatches that the pattern has between their first pass and their last.
    max_entered: int
    #: The rule by which the rank picks its next action, and the most tapes that it may keep.
    preference: Preference
    max_tapes: int
    #: Place in the order -> the change in live tapes by that action, with each W right after its I; 0 once it has run.
    changes: list[int]
    #: The W that can run.
    weights: deque[Action]
    #: The tapes that are live, and the microbatches between their first pass and their last.
    live: int
    entered: int
    #: The rank itself; the first slot in which it did something, and the end of the last.
    number: int
    start: int
    end: int
    #: The actions so far.
    done: list[Action]

    def __init__(self, placement: Placement, order: Order, preference: Preference, max_tapes: int, ends: _Ends) -> None:
        self.preference, self.max_tapes, self.weights = preference, max_tapes, deque()
        self.number = placement.rank_of(order[0].stage)
        first, second = placement.stages_of(self.number)
        # Counted from the second pass on, so that the first pass comes last.
        numbers = {(Op.F, second): 1, (Op.I, second): 2, (Op.I, first): 3, (Op.F, first): 0}
        found = {key: _Pass(number, Action(*key, 0), placement, ends) for key, number in numbers.items()}
        for place, action in enumerate(order):
            found[action.op, action.stage].rest.append((place, action))
        self.passes = list(found.values())
        self.changes = [found[action.op, action.stage].tapes for action in order]
        # As if each W followed its I at once, and so ended its tape.
        whole = [replace(a, op=Op.B) if a.op is Op.I else a for a in order if a.stage == first]
        self.max_entered = peak_tapes(whole)
        self.live = self.entered = self.start = self.end = 0
        self.done = []

    def act(self, slot: int) -> int | None:
        """Start an action in this slot, if one can start; return the rank that may wait for it, None without any."""
        chosen, waiting = self._choice(slot), self.number
        if chosen is not None and not (chosen.tapes > 0 and self.live == self.max_tapes):
            place, action = chosen.rest.popleft()
            waiting, chosen.ends[action.microbatch], self.changes[place] = chosen.waiting, slot + 1, 0
            self.entered += {0: 1, 3: -1}.get(chosen.number, 0)
            if action.op is Op.F:
                self.live += 1
            else:
                self.weights.append(Action(Op.W, action.stage, action.microbatch))
        elif self.weights:
            action = self.weights.popleft()
            self.live -= 1
        else:
            return None
        self.start = self.start if self.done else slot
        self.end = slot + 1
        self.done.append(action)
        return waiting

    def _choice(self, slot: int) -> _Pass | None:
        """Choose the pass whose next action to take, if any."""
        ready = [own for own in self.passes if own.rest and own.is_ready(slot)]
        if not self.preference.deepest_first:
            ready.sort(key=attrgetter("place"))
        return next((own for own in ready if self._fits(own)), None)

    def _fits(self, own: _Pass) -> bool:
        """True if memory is left for the next action of the pass; what is kept only for a W counts as free."""
        if own.number == 0 and self.preference.steady_entry and self.entered >= self.max_entered:
            return False
        live, place = self.live - len(self.weights), own.place
        first = min(one.place for one in self.passes if one.rest)
        # None of the actions between can take more than one tape.
        if live + place - first + own.tapes <= self.max_tapes:
            return True
        return max(accumulate(self.changes[first:place], initial=live)) + own.tapes <= self.max_tapes
