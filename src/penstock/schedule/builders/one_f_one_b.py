"""All forwards and then all backwards, or one forward, one backward: with one stage on a rank, several, in pairs."""

from penstock.schedule.actions import Schedule, peak_tapes
from penstock.schedule.builders.orders import (
    backwards,
    check_stages_per_rank,
    forwards,
    fuse_turns,
    groups,
    num_ahead,
    renumber,
    split_backwards,
    take_turns,
)
from penstock.schedule.builders.registry import builder
from penstock.schedule.placement import Placement, PlacementKind


@builder("afab")
def afab(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest order, and the most memory.

    The backwards take the microbatches in the forwards' order, not the reverse, so that every schedule of this package
    adds gradients in the same order. All microbatches are live at the peak; the bubble is (p-1)/(m+p-1).

    Raises: ValueError for counts below one.

    Source: Huang et al., GPipe (arXiv 1811.06965), section 2.
    """
    return _all_forwards_first("afab", ranks, microbatches, stages_per_rank, group_size=ranks)


@builder("looped-bfs")
def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """All microbatches through one local stage after another: each stage's work in one piece, and the most memory.

    A stage's backwards follow each other, so its gradients are reduced, and its sharded weights gathered, once and
    early, while the other stages compute. All microbatches are live at the peak; if m is a multiple of p, the bubble is
    (p-1)/(vm+p-1). The backwards take the microbatches in the forwards' order, as in every builder.

    Raises: ValueError for counts below one.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953).
    """
    return _all_forwards_first("looped-bfs", ranks, microbatches, stages_per_rank, group_size=microbatches)


def _all_forwards_first(name: str, ranks: int, microbatches: int, stages_per_rank: int, group_size: int) -> Schedule:
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    orders = tuple(
        (*forwards(placement, rank, microbatches, group_size), *backwards(placement, rank, microbatches, group_size))
        for rank in range(ranks)
    )
    return Schedule(name, placement, microbatches, orders, live_bound=(microbatches * stages_per_rank,) * ranks)


@builder("inference", trains=False)
def inference(ranks: int, microbatches: int, stages_per_rank: int = 1, placement: str = "loop") -> Schedule:
    """Forwards alone: a microbatch passes a stage a step.

    With one stage a rank, stage s runs microbatch m at step m + s, and m microbatches take m + p - 1 steps. A tape ends
    with its forward, so each rank has one live tape at a time. `placement` is loop, v or bidirectional, to run on the
    stages of a schedule that trains.

    Raises: ValueError for counts below one, or an unknown placement.
    """
    kinds = [kind.value for kind in PlacementKind if kind is not PlacementKind.MAP]
    if placement not in kinds:
        raise ValueError(f"placement must be one of {', '.join(kinds)}, got {placement!r}")
    return forwards_alone(Placement(PlacementKind(placement), ranks, stages_per_rank), microbatches)


def forwards_alone(where: Placement, microbatches: int) -> Schedule:
    """The schedule `inference` on the stages of any placement."""
    ranks = where.num_ranks
    empty = Schedule("inference", where, microbatches, ((),) * ranks, training=False)
    orders = tuple(
        tuple(a for a in forwards(where, rank, microbatches) if a.microbatch in empty.microbatches_of(a.stage))
        for rank in range(ranks)
    )
    return Schedule("inference", where, microbatches, orders, live_bound=(1,) * ranks, training=False)


@builder("1f1b")
def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward, one backward in turn: AFAB's bubble at the memory of p microbatches.

    Stage s starts with min(p-s-1, m) forwards (its warm-up). From then on each forward is followed by the oldest
    backward; the remaining backwards come last. At most min(p-s, m) microbatches are live on the stage; the bubble is
    (p-1)/(m+p-1).

    Raises: ValueError for counts below one or more than one stage a rank.

    Source: Narayanan et al., PipeDream-Flush (arXiv 2006.09503), section 3.2, and Megatron-LM (arXiv 2104.04473), 2.2.
    """
    check_stages_per_rank("1f1b", stages_per_rank, 1)
    placement = Placement(PlacementKind.LOOP, ranks)
    orders = tuple(
        tuple(
            take_turns(
                forwards(placement, stage, microbatches), backwards(placement, stage, microbatches), ranks - stage - 1
            )
        )
        for stage in range(ranks)
    )
    live_bound = tuple(min(ranks - stage, microbatches) for stage in range(ranks))
    return Schedule("1f1b", placement, microbatches, orders, live_bound)


@builder("interleaved")
def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None) -> Schedule:
    """One forward, one backward over several local stages: 1F1B's bubble cut by their number, for more memory.

    A rank takes n = `group_size` microbatches (None: p) through its first stage, the same through its second, and on;
    its backwards take the same groups through its stages in reverse. Rank s starts with 2(p-s-1) + (v-1)n forwards,
    or all of them. If m is a multiple of n = p, the bubble is (p-1)/(vm+p-1).

    Any m and n are possible, but ranks wait if a group has fewer than p microbatches.

    Raises: ValueError for counts below one.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv
    2104.04473), section 2.2.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    size, places = groups(ranks, microbatches, group_size)
    orders = []
    for rank in range(ranks):
        passes = (pass_over(placement, rank, len(places), size) for pass_over in (forwards, backwards))
        orders.append(renumber(take_turns(*passes, warm_up=num_ahead(placement, rank, size)), places))
    return Schedule("interleaved", placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))


@builder("combined-1f1b")
def combined_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 1, split_backward: bool = False) -> Schedule:
    """1F1B in fused pairs, which hide expert and tensor communication, for twice its memory.

    A pair is one step for its neighbours, so the way to the last rank and back takes twice as many steps as in 1F1B.
    Stage s starts with 2(p-s-1) + 1 forwards; the last of them makes the two actions of every pair independent. At most
    2(p-s) microbatches are live. On one rank the order is F0, (F1, B0), (F2, B1) and so on, then the last B alone.

    With `split_backward` every backward is an I in its pair with a W right after the pair, so that a rank sends its
    input gradient before it computes its weight gradients.

    Raises: ValueError for counts below one, or more than one stage a rank (see combined-interleaved).

    Source: Megatron Core, combined 1F1B (arXiv 2603.07685); its lead without local stages follows from the above.
    """
    check_stages_per_rank("combined-1f1b", stages_per_rank, 1)
    return _combined("combined-1f1b", ranks, microbatches, stages_per_rank, None, split_backward)


@builder("combined-interleaved")
def combined_interleaved(
    ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None, split_backward: bool = False
) -> Schedule:
    """The interleaved order in fused pairs, which hide expert and tensor communication, for one more tape.

    The order is that of `interleaved` with one more forward ahead of the first pair; without it the last rank would
    pair a forward with the backward that needs it. `split_backward` is that of `combined_1f1b`.

    Raises: ValueError for counts below one.

    Source: Megatron Core, combined 1F1B with interleaved stages (arXiv 2603.07685).
    """
    return _combined("combined-interleaved", ranks, microbatches, stages_per_rank, group_size, split_backward)


def _combined(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, group_size: int | None, split_backward: bool
) -> Schedule:
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    size, places = groups(ranks, microbatches, group_size)
    orders = []
    for rank in range(ranks):
        passes = (pass_over(placement, rank, len(places), size) for pass_over in (forwards, backwards))
        order = fuse_turns(*passes, warm_up=num_ahead(placement, rank, size) + 1)
        orders.append(renumber(split_backwards(order) if split_backward else order, places))
    return Schedule(name, placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))
