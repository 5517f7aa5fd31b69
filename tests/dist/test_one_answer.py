"""The layout changes nothing but speed and memory: many layouts and schedules against one process, in float64."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from penstock import Layout
from tests.dist.grid_cases import NUM_NEW_TOKENS, Case, Compared, Outcome, cases, compare, documents, layouts, run
from tests.dist.launch import run_ranks

TOLERANCE = 1e-10
# Every layout with every schedule takes half an hour on two cores: PENSTOCK_ALL_LAYOUTS=1 runs them, else one in so
# many is run. Layouts of one number of processes run in the same ones, so many at a time.
ALL = bool(os.environ.get("PENSTOCK_ALL_LAYOUTS"))
EVERY, AT_A_TIME, LIMIT_S = (1, 12, 1800.0) if ALL else (17, 50, 800.0)
# Of those, what each two of these layouts' sizes and schedules are together is met in another.
SHOWN_BY_OTHERS = {
    (False, Layout(pp=3, cp=2)),
    (False, Layout(pp=2, dp=2, cp=2)),
    (False, Layout(pp=4, dp=2)),
    (True, Layout(pp=4, cp=2)),
}


def by_world() -> dict[str, list[Case]]:
    """The cases that are run together, each such set by its number of processes and its place among these."""
    chosen: dict[int, list[Case]] = defaultdict(list)
    for case in cases(sparse=False)[::EVERY] + cases(sparse=True)[5 * (not ALL) :: EVERY * (1 if ALL else 2)]:
        if ALL or (case.sparse, case.layout) not in SHOWN_BY_OTHERS:
            chosen[case.layout.world_size].append(case)
    return {
        f"{world_size}-{number}": list(together)
        for world_size, of_world in sorted(chosen.items())
        for number, together in enumerate(batched(of_world, AT_A_TIME))
    }


def batched(items: list[Case], size: int) -> Iterator[list[Case]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@cache
def alone(sparse: bool, variant: int) -> Outcome:
    """What one process gets for a model."""
    return run(Case(Layout(), 1, "1f1b", sparse, variant))


def check(case: Case, by_rank: list[Compared]) -> None:
    """All ranks agree with one process, and between them they hold every element of every parameter."""
    held: dict[str, set[int]] = defaultdict(set)
    whole: dict[str, int] = {}
    for compared in by_rank:
        assert compared.initial_equal, case
        assert compared.answers_equal, case
        assert compared.num_generated == NUM_NEW_TOKENS * len(documents()[-1])
        for what, distance in compared.furthest.items():
            assert distance <= TOLERANCE, (str(case), what, distance)
        for name, start, length, of in compared.held:
            held[name] |= set(range(start, start + length))
            whole[name] = of
    assert whole
    for name, elements in held.items():
        assert elements == set(range(whole[name])), (case, name)
    # Each document is scored, once by every rank that shares the last stage of its pipeline.
    copies = case.layout.tp * case.layout.cp
    assert sum(compared.num_scored for compared in by_rank) == copies * sum(map(len, documents()[-1]))


def test_the_table_holds_at_least_forty_layouts() -> None:
    assert len(set(layouts())) >= 40
    assert {layout.world_size for layout, _ in layouts()} == {1, 2, 3, 4, 6, 8}


@pytest.mark.shows(14, 84, 85, 86, 87, 89, 90, 93)
@pytest.mark.timeout(LIMIT_S + 100.0)
@pytest.mark.parametrize("together", by_world())
def test_any_layout_gives_the_numbers_of_one_process(together: str) -> None:
    chosen = by_world()[together]
    references = {(case.sparse, case.variant): alone(case.sparse, case.variant) for case in chosen}
    for case in chosen:
        reference, padding = references[case.sparse, case.variant], case.config.padding_token
        assert len(set(reference.answers)) > 1, "answers that are alike show nothing"
        if padding is not None:
            read = {token for document in documents()[0] for token in document[:-1].tolist()}
            trained = reference.gradients["embedding.weight"].any(-1).nonzero().flatten().tolist()
            assert padding in read and trained == sorted(read - {padding})
    by_rank = run_ranks(chosen[0].layout.world_size, compare, chosen, references, timeout_s=LIMIT_S)
    for number, case in enumerate(chosen):
        check(case, [compared[number] for compared in by_rank])
