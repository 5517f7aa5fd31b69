"""The order that a search finds for given times within a given memory."""

from __future__ import annotations

from math import inf

from penstock.schedule.actions import Placement, PlacementKind, Schedule, check_count
from penstock.schedule.builders.search import search, search_step
from penstock.schedule.builders.search_problem import Problem, per_stage
from penstock.schedule.costs import PerStage

_KINDS = (PlacementKind.LOOP, PlacementKind.V)


def auto(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    *,
    placement: str = "loop",
    max_live_microbatches: float | None = None,
    weight_memory_share: float = 1.0,
    forward: PerStage = 1.0,
    backward_input: PerStage = 1.0,
    backward_weight: PerStage = 1.0,
    transfer: float = 0.0,
    effort: float = 1.0,
    whole_step: bool = False,
    microbatch_bytes: PerStage = 0.0,
) -> Schedule:
    """Searched: the shortest order found for given times within a limit of live microbatches.

    Shortest is the longest time over ranks from a rank's own first start to its own end: the optimizer step of a rank
    waits for no other. Times are of one microbatch through all stages of a rank, or a list with one for each stage of
    the model, as in `Costs`. A microbatch counts 1 from its F to its I, and `weight_memory_share` from then to its W; a
    stage's tape counts for its part of its rank. No rank has more than `max_live_microbatches` at any time, p by
    default; 1 is enough for any schedule. That is the paper's M_limit in units of M_B, with M_W / M_B as the share: so
    read, the paper's own heuristic gives the two search columns of its table of theoretical bubble rates.

    With `whole_step` shortest is the time from the common start of all ranks until the last has ended, as where every
    step begins and ends with all of them; and a stage's tape counts for what it keeps, `microbatch_bytes` (all alike
    where it is 0): no rank keeps more than `max_live_microbatches` do on the rank that keeps the most of one.

    `placement` is loop or v; `effort` scales how many small changes are tried where the lower bound is not reached.

    Raises: ValueError for counts below one, other placements, a limit below 1, a share beyond 0 to 1, and times that
    are negative or not one a stage.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241): cost and memory limit sections 3.1 and 3.2.
    """
    if placement not in [kind.value for kind in _KINDS]:
        raise ValueError(f"placement must be {' or '.join(kind.value for kind in _KINDS)}, got {placement!r}")
    check_count("ranks", ranks)
    where = Placement(PlacementKind(placement), ranks, stages_per_rank)
    if not effort >= 0:
        raise ValueError(f"effort must be at least 0, got {effort!r}")
    problem = Problem(
        where,
        microbatches,
        per_stage("forward", forward, where),
        per_stage("backward_input", backward_input, where),
        per_stage("backward_weight", backward_weight, where),
        transfer,
        max_live_microbatches=ranks if max_live_microbatches is None else max_live_microbatches,
        weight_memory_share=weight_memory_share,
    )
    if whole_step:
        kept = per_stage("microbatch_bytes", microbatch_bytes, where, "number")
        if not all(0 <= stage < inf for stage in kept):
            raise ValueError(f"microbatch_bytes must be numbers of at least 0, got {microbatch_bytes!r}")
        if not any(kept):
            kept = (1.0,) * where.num_stages
        return problem.schedule("auto", search_step(problem, kept, effort))
    return problem.schedule("auto", search(problem, effort))
