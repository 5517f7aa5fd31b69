"""A schedule of one's own, which beats 1F1B where messages take long: python examples/own_schedule.py

It is handed over, `EngineOptions(schedule=eager_1f1b)`, or named, `name = "examples/own_schedule.py:eager_1f1b"`.
"""

from penstock import schedule
from penstock.schedule import Action, Op, Placement, PlacementKind, Schedule


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice its warm-up: a forward is there when it is needed, though its message takes long."""
    orders = []
    for stage in range(ranks):
        warm_up = min(2 * (ranks - stage - 1), microbatches)
        forwards = [Action(Op.F, stage, number) for number in range(microbatches)]
        backwards = [Action(Op.B, stage, number) for number in range(microbatches)]
        turns = [step for pair in zip(forwards[warm_up:], backwards, strict=False) for step in pair]
        orders.append((*forwards[:warm_up], *turns, *backwards[microbatches - warm_up :]))
    return Schedule("eager-1f1b", Placement(PlacementKind.LOOP, ranks), microbatches, tuple(orders))


if __name__ == "__main__":
    costs = schedule.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=1.0)
    for order in (schedule.build("1f1b", ranks=4, microbatches=16), eager_1f1b(4, 16)):
        program = schedule.lower(order)
        schedule.verify(program)
        timeline = schedule.simulate(program, costs)
        live = " ".join(f"{number:g}" for number in timeline.peak_live_microbatches)
        print(f"{order.name}: {timeline.makespan:g} units of time, live microbatches by rank {live}")
