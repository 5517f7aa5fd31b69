"""Schedules drawn at random among all legal ones: any placement, split and whole backwards, fused pairs."""

import random

from hypothesis import strategies as st

from penstock.schedule import Action, Op, Pair, Placement, PlacementKind, Schedule, Step


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 5) -> Schedule:
    kind = draw(st.sampled_from(PlacementKind))
    ranks = draw(st.integers(1, max_ranks))
    stages = draw(st.integers(1, 3)) if kind is not PlacementKind.BIDIRECTIONAL else 2
    microbatches = draw(st.integers(1, max_microbatches))
    # One number for the whole order: hypothesis is there to vary the sizes, and shrinks those.
    chance = random.Random(draw(st.integers(0, 2**32)))
    homes: tuple[int, ...] = ()
    if kind is PlacementKind.MAP:
        more = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
        homes = tuple(draw(st.permutations([*range(ranks), *more])))
    return legal_schedule(Placement(kind, ranks, stages, homes), microbatches, draw(st.booleans()), chance)


def legal_schedule(placement: Placement, num_microbatches: int, training: bool, chance: random.Random) -> Schedule:
    """Actions whose inputs are there, taken at random until all are done."""
    empty = Schedule("random", placement, num_microbatches, ((),) * placement.num_ranks, training=training)
    works = [(stage, number) for stage in range(placement.num_stages) for number in empty.microbatches_of(stage)]
    split = {work for work in works if chance.random() < 0.5}
    forwards, gradients, weights = set(), set(), set()
    orders: list[list[Step]] = [[] for _ in range(placement.num_ranks)]

    def ready() -> list[Action]:
        found = []
        for stage, number in works:
            before, after = placement.previous(stage), placement.next(stage)
            if (stage, number) not in forwards and (before is None or (before, number) in forwards):
                found.append(Action(Op.F, stage, number))
            if not training or (stage, number) not in forwards:
                continue
            if (stage, number) not in gradients and (after is None or (after, number) in gradients):
                found.append(Action(Op.I if (stage, number) in split else Op.B, stage, number))
            if (stage, number) in gradients and (stage, number) not in weights:
                found.append(Action(Op.W, stage, number))
        return found

    def do(action: Action) -> None:
        work = action.stage, action.microbatch
        if action.op is Op.F:
            forwards.add(work)
        if action.op in (Op.B, Op.I):
            gradients.add(work)
        if action.op in (Op.B, Op.W):
            weights.add(work)

    while possible := ready():
        step = action = chance.choice(possible)
        rank = placement.rank_of(action.stage)
        partners = [other for other in possible if other.op in (Op.B, Op.I) and placement.rank_of(other.stage) == rank]
        if action.op is Op.F and partners and chance.random() < 0.3:
            step = Pair(action, chance.choice(partners))
            do(step.backward)
        do(action)
        orders[rank].append(step)
    return Schedule("random", placement, num_microbatches, tuple(map(tuple, orders)), training=training)
