"""Orders that several builders share: whole passes over a rank's stages, and forwards and backwards in turn."""

from collections.abc import Sequence

from penstock.schedule.actions import Action, Op, Pair, Step, parts
from penstock.schedule.placement import Placement
from penstock.settings import ScheduleConfig


def forwards(placement: Placement, rank: int, num_microbatches: int, group_size: int = 0) -> list[Action]:
    """A rank's forwards: groups of `group_size` microbatches (0: of p), each group through the rank's stages in turn.

    In a group of p, the first microbatch is back at the first rank, ready for its next stage, while the last one is
    still on its way to the last rank, so no rank waits between groups.
    """
    return _passes(Op.F, placement.stages_of(rank), num_microbatches, group_size or placement.num_ranks)


def backwards(
    placement: Placement, rank: int, num_microbatches: int, group_size: int = 0, *, op: Op = Op.B
) -> list[Action]:
    """A rank's backwards: the groups of its forwards, each through the stages from last to first."""
    stages = placement.stages_of(rank)[::-1]
    return _passes(op, stages, num_microbatches, group_size or placement.num_ranks)


def _passes(op: Op, stages: Sequence[int], num_microbatches: int, group_size: int) -> list[Action]:
    return [
        Action(op, stage, microbatch)
        for start in range(0, num_microbatches, group_size)
        for stage in stages
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def check_stages_per_rank(name: str, stages_per_rank: int, wanted: int) -> None:
    if stages_per_rank != wanted:
        stages = "one stage" if wanted == 1 else "two stages"
        raise ValueError(f"{name} has {stages} on each rank: stages_per_rank must be {wanted}, got {stages_per_rank}")


def num_ahead(placement: Placement, rank: int, group_size: int) -> int:
    """The number of forwards that a rank runs before its first backward's turn."""
    return 2 * (placement.num_ranks - rank - 1) + (placement.stages_per_rank - 1) * group_size


def groups(num_ranks: int, num_microbatches: int, group_size: int | None) -> tuple[int, list[int | None]]:
    """The number of places in a group, and the microbatch at each place of all groups; None for an empty place.

    If one of several groups had fewer than p places, two ranks could end up waiting for each other. So every group gets
    at least p places; the order is made for all places and then loses the empty ones.

    Raises: ConfigError for a size below one.
    """
    group_size = ScheduleConfig(group_size=group_size).group_size or num_ranks
    size = max(group_size, num_ranks)
    if num_microbatches <= group_size:
        return size, list(range(num_microbatches))
    places: list[int | None] = []
    for start in range(0, num_microbatches, group_size):
        group = range(start, min(start + group_size, num_microbatches))
        places += [*group, *[None] * (num_ranks - len(group))]
    return size, places


def take_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Step]:
    """First `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    order: list[Step] = [*forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards):
        order += [forward, backward]
    return order + [*backwards[len(forwards) - warm_up :]]


def fuse_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Step]:
    """Take turns as in `take_turns`, with each forward fused with the backward that follows it."""
    warm_up = min(warm_up, len(forwards))
    pairs: list[Step] = [Pair(forward, backward) for forward, backward in zip(forwards[warm_up:], backwards)]
    return [*forwards[:warm_up], *pairs, *backwards[len(pairs) :]]


def take_turns_split(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, delay: int) -> list[Step]:
    """Take turns as in `take_turns`, with split backwards.

    Once more than `delay` of the `I` have run, or no forwards are left, the oldest `W` follows each `I`; the remaining
    `W` come last.
    """
    warm_up = min(warm_up, len(forwards))
    num_pairs = len(forwards) - warm_up
    weights = [Action(Op.W, action.stage, action.microbatch) for action in backwards]
    order: list[Step] = [*forwards[:warm_up]]
    num_weights = 0
    for number, backward in enumerate(backwards):
        if number < num_pairs:
            order.append(forwards[warm_up + number])
        order.append(backward)
        if number >= min(delay, num_pairs):
            order.append(weights[num_weights])
            num_weights += 1
    return order + weights[num_weights:]


def split_backwards(order: Sequence[Step]) -> list[Step]:
    """Replace each `B` of an order, in a pair or alone, by an `I` with its `W` right after the step."""
    done: list[Step] = []
    for step in order:
        split = [Action(Op.I, a.stage, a.microbatch) if a.op is Op.B else a for a in parts(step)]
        done.append(Pair(*split) if isinstance(step, Pair) else split[0])
        done += [Action(Op.W, a.stage, a.microbatch) for a in parts(step) if a.op is Op.B]
    return done


def renumber(order: Sequence[Step], places: Sequence[int | None]) -> tuple[Step, ...]:
    """Replace each microbatch m of an order by `places[m]`, or leave it out where that is None.

    An order stays legal when a microbatch is left out everywhere, since no other waits for it; so an order for
    convenient numbers serves any others. A pair that loses one action becomes the other.
    """
    renumbered: list[Step] = []
    for step in order:
        found = [(action, places[action.microbatch]) for action in parts(step)]
        kept = [Action(action.op, action.stage, number) for action, number in found if number is not None]
        renumbered += [Pair(*kept)] if len(kept) == 2 else kept
    return tuple(renumbered)
